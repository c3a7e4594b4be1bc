"""What a pass saw and did: sites, skips, and the means to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samopt.errors import SamoptError


@dataclass(frozen=True)
class Site:
    """A module that a pass will rewrite.

    Attributes:
        fqn: the module's dotted name in the model; "" is the model itself.
        facts: what `match` saw and the module alone cannot know, such as its token grid.
    """

    fqn: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={value}" for key, value in self.facts.items())
        return f"{self.fqn or '(the model)'}{f' ({facts})' if facts else ''}"


@dataclass(frozen=True)
class Skip:
    """A module that a pass declines, and why."""

    fqn: str
    reason: str

    def __str__(self) -> str:
        return f"{self.fqn or '(the model)'}: {self.reason}"


def by_reason(skips: Iterable[Skip]) -> list[str]:
    """Skips in words, each reason once: of the first module it holds for, and how many others."""
    alike: dict[str, list[Skip]] = {}
    for skip in skips:
        alike.setdefault(skip.reason, []).append(skip)
    return [_together(first, len(others)) for first, *others in alike.values()]


def _together(skip: Skip, others: int) -> str:
    name = skip.fqn or "(the model)"
    return f"{name} and {others} other{'s' if others > 1 else ''}: {skip.reason}" if others else str(skip)


class PassResult:
    """The outcome of one pass on one model.

    Attributes:
        name: the pass, with its options.
        sites: what was rewritten.
        skipped: what was declined, each with its reason.
        seconds: how long matching, building and installing took.
    """

    def __init__(
        self, name: str, sites: tuple[Site, ...], skipped: tuple[Skip, ...], seconds: float, undo: Callable[[], None]
    ) -> None:
        self.name = name
        self.sites = sites
        self.skipped = skipped
        self.seconds = seconds
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Puts the modules the pass replaced back, the very objects, bit for bit.

        Weights loaded since are in both where the pass left values as they were, and in the new modules only where it
        changed them, as a cast does: load them again afterwards.

        Raises:
            SamoptError: when undone before; when a later pass rewrote the same modules: undo that one first; when the
                model was moved to another device since.
        """
        if self._undo is None:
            raise SamoptError(f"{self.name} was undone already; apply the pass again to redo it")
        self._undo()
        self._undo = None

    def __repr__(self) -> str:
        return f"PassResult({self.name}: {len(self.sites)} sites, {len(self.skipped)} skipped, {self.seconds:.2f} s)"
