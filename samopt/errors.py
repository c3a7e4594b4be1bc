"""What samopt raises. Each message says what was found, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samopt.report import Report


class SamoptError(Exception):
    """Base of every error samopt raises on purpose."""


class InvalidInput(SamoptError, ValueError):
    """An argument, option, image or sample that cannot be used as given."""


class RecipeError(SamoptError, ValueError):
    """A recipe that cannot be read, or whose entries contradict each other."""


class CheckpointError(SamoptError):
    """A checkpoint that is missing, unreadable, or not the model it is said to be."""


class SavedModelError(SamoptError):
    """A model that cannot be saved, or a saved one that is missing, damaged, or not for this machine."""


class Unsupported(SamoptError):
    """A pass that cannot run on this model or this machine.

    Args:
        reason: what was found.
        remedy: what the user can do about it.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy

    @property
    def why(self) -> str:
        """Reason and remedy, for a report, which names the pass itself."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class NoSites(Unsupported):
    """A pass that found nothing to rewrite.

    Args:
        reason: the reasons it met.
        remedy: what the user can do about it.
        name: of the pass, for the message; `reason` and `why` are without it.
    """

    def __init__(self, reason: str, remedy: str = "", name: str = "") -> None:
        super().__init__(f"{name} found nothing to rewrite: {reason}" if name else reason, remedy)
        self.reason = reason


class AlreadyApplied(Unsupported):
    """A pass that was applied to this model before."""


class AccuracyError(SamoptError):
    """A pass that cost more accuracy than its class or the recipe's budget allows.

    Args:
        message: pass, figure and budget.
        report: the report up to and including that pass.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def first_line(error: Exception) -> str:
    """An error of any library in one line: its class, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
