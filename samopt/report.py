"""The report of an optimised model: what each pass did, and what it cost."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from samopt.base import Numerics, Phase
from samopt.errors import SamoptError
from samopt.result import Site, Skip, by_reason
from samopt.shown import Shown
from samopt.speed import BlockSpeed
from samopt.verify import Agreement

if TYPE_CHECKING:
    from rich.console import Group

ATTRIBUTE = "_samopt_report"  # on an optimised model


@dataclass(frozen=True)
class StepReport:
    """What became of one entry of the recipe.

    Attributes:
        name: the pass, with its options.
        phase: when it runs.
        numerics: what it may do to the outputs.
        status: "applied"; "skipped", as it does not apply here; "dropped", as it cost too much accuracy; "undone", as
            it was to be kept only if it is faster, and is not; or "refused", as it cost too much accuracy, which ended
            the run.
        reason: why it was not applied, or why it was kept without having been timed; "" otherwise.
        sites: what was rewritten.
        skipped: what was declined, each with its reason.
        seconds: how long the rewrite took.
        agreement: accuracy and timings after the pass (of a dropped or undone one too); None where they were not
            measured.
        speed: of the encoder's blocks without and with it, where it was to be kept only if it is faster; None where
            that was not asked, or could not be timed.
    """

    name: str
    phase: Phase
    numerics: Numerics
    status: Literal["applied", "skipped", "dropped", "undone", "refused"]
    reason: str = ""
    sites: tuple[Site, ...] = ()
    skipped: tuple[Skip, ...] = ()
    seconds: float = 0.0
    agreement: Agreement | None = None
    speed: BlockSpeed | None = None

    @property
    def emulated(self) -> bool:
        """Whether the device has no instructions for the pass's arithmetic, so that plain torch computes it."""
        return any(site.facts.get("emulated") is True for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "pass": self.name,
            "numerics": self.numerics.value,
            "status": self.status,
            "reason": self.reason,
            "sites": [str(site) for site in self.sites],
            "skipped": [str(skip) for skip in self.skipped],
            "seconds": self.seconds,
            "emulated": self.emulated,
            "speed": self.speed and self.speed.to_dict(),
            "accuracy": self.agreement and self.agreement.to_dict(),
        }


@dataclass(frozen=True)
class Report(Shown):
    """What a recipe did to a model, entry by entry.

    Attributes:
        recipe: its name.
        model: what was optimised, in words.
        samples: what accuracy was measured on; empty where nothing was measured.
        device: where the model was.
        baseline: the unmodified model's own figures; None where nothing was measured.
        steps: what became of each entry.
        versions: of Python and the libraries the figures depend on.
        notes: what has changed since, such as a copy that lost its compilation, or a machine that it was loaded on.
        model_digest: a checksum of the unmodified model's weights; see `samopt.fingerprint`.
        result_digest: likewise, of the weights after all passes.
    """

    recipe: str
    model: str
    samples: tuple[str, ...]
    device: str
    baseline: Agreement | None
    steps: tuple[StepReport, ...]
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    model_digest: str = ""
    result_digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return {
            "recipe": self.recipe,
            "model": self.model,
            "model_digest": self.model_digest,
            "result_digest": self.result_digest,
            "samples": list(self.samples),
            "device": self.device,
            "versions": self.versions,
            "unmodified": self.baseline and self.baseline.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
            "notes": list(self.notes),
        }

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        agreements = [self.baseline, *(step.agreement for step in self.steps)]
        columns = [column for column in COLUMNS if any(column.figure(of) for of in agreements if of is not None)]
        table = Table("pass")
        table.add_column("sites", justify="right")
        for column in columns:
            table.add_column(column.title, justify="right")
        names = ["unmodified", *(_short(step.name) for step in self.steps)]
        sites = ["", *map(_sites, self.steps)]
        for name, count, of in zip(names, sites, agreements, strict=True):
            table.add_row(Text(name), count, *("" if of is None else column.figure(of) for column in columns))
        # As Text, for rich would read "[...]" in a reason or a name as markup.
        title = Text(f"{self.model}, recipe {self.recipe}, on {self.device}", style="table.title")
        return Group(title, table, Text(self._caption(), style="table.caption"))

    def _caption(self) -> str:
        lines = [line for step in self.steps for line in _outcome(step)]
        lines += [f"{_short(step.name)} left out {those}" for step in self.steps for those in by_reason(step.skipped)]
        if self.baseline is not None and self.baseline.masks is None:
            lines.append("masks: not measured, untrained weights")
        if self.samples:
            shown = ", ".join(self.samples[:4]) + (", ..." if len(self.samples) > 4 else "")
            lines.append(f"measured on {shown}")
        lines += _slower(self.baseline, self.steps)
        return "\n".join([*lines, *self.notes, ", ".join(map(" ".join, self.versions.items()))])


def report(model: nn.Module) -> Report:
    """The report of a model that `optimize` returned, or of a copy of one. Prints as a table.

    Raises:
        SamoptError: the model was not optimised by `optimize`.
    """
    found = vars(model).get(ATTRIBUTE) if isinstance(model, nn.Module) else None
    if not isinstance(found, Report):
        raise SamoptError("this model has no report: it was not made by samopt.optimize")
    return dataclasses.replace(found, notes=(*found.notes, *_lost_compilations(model, found)))


def _lost_compilations(model: nn.Module, found: Report) -> Iterator[str]:
    """A deep copy and an unpickled model are not compiled; what is not must not be reported as if it were."""
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    for step in found.steps:
        if step.phase is Phase.COMPILE and step.status == "applied" and not compiled:
            yield f"not compiled: a copy loses its compilation; apply samopt.passes.{step.name} to it again"


def _slower(baseline: Agreement | None, steps: Sequence[StepReport]) -> Iterator[str]:
    """Says where the result is slower than the unmodified model: half precision on some CPUs, for one."""
    last = next((step.agreement for step in reversed(steps) if step.status == "applied"), None)
    if baseline is None or last is None:
        return
    for what, name in (("encoding", "encode_seconds"), ("answering prompts", "decode_seconds")):
        ratio = getattr(last.timings, name) / getattr(baseline.timings, name)
        if ratio > 1.25:  # less is within the noise of one measurement
            yield f"slower: {what} takes {ratio:.1f} times as long as unmodified here; leave out the pass that costs it"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that figures depend on, and the processor or GPU."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    else:
        found["threads"] = str(torch.get_num_threads())
    return found


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and its figure of an agreement, "" where there is none."""

    title: str
    figure: Callable[[Agreement], str]


def _of_masks(name: str, form: str) -> Callable[[Agreement], str]:
    def figure(of: Agreement) -> str:
        value = None if of.masks is None else getattr(of.masks, name)
        return "" if value is None else format(value, form)

    return figure


COLUMNS = (
    Column("emb. error", lambda of: f"{of.embedding_error:.1e}"),
    Column("mask IoU", _of_masks("mean_iou", ".4f")),
    Column("worst", _of_masks("min_iou", ".3f")),
    Column("true mIoU", _of_masks("truth", ".4f")),
    Column("first s", lambda of: f"{of.timings.first_seconds:.2f}"),
    Column("encode ms", lambda of: f"{of.timings.encode_seconds * 1e3:.1f}"),
    Column("ms/prompt", lambda of: f"{of.timings.decode_seconds * 1e3:.2f}"),
    Column("GPU GiB", lambda of: f"{of.timings.peak_bytes / 2**30:.2f}" if of.timings.peak_bytes else ""),
)


def _sites(step: StepReport) -> str:
    if step.status != "applied":
        return step.status
    return f"{len(step.sites)}, emulated" if step.emulated else str(len(step.sites))


def _outcome(step: StepReport) -> Iterator[str]:
    """What the table has no column for: it would not fit into a terminal."""
    name = _short(step.name)
    if step.reason:
        yield f"{name} {step.status}: {step.reason}"
    elif step.speed is not None:
        yield f"{name} {step.status}: {step.speed}"
    if step.status == "applied" and step.emulated:
        yield f"{name} applied, emulated: in plain torch on this device, so its times say nothing of others"


def _short(name: str) -> str:
    return name.partition("(")[0]
