"""Profiles as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from samopt.profiling.kernels import GROUPS, GroupTime, by_group

if TYPE_CHECKING:
    from rich.console import RenderableType

    from samopt.profiling.comparison import Comparison
    from samopt.profiling.profiler import Profile
    from samopt.profiling.sync_audit import Audit

MOST_KERNELS = 10  # shown of each profile; all are in the JSON


def of_profile(profile: Profile) -> Group:
    """One model's figures."""
    return Group(*_figures([profile]))


def of_comparison(comparison: Comparison) -> Group:
    """Two models' figures side by side, and what torch.compile did between them."""
    title = f"{comparison.model}, recipe {comparison.recipe}, {comparison.image}, on {comparison.after.device}"
    parts: list[RenderableType] = [Text(title, style="table.title")]
    parts += _figures([comparison.before, comparison.after])
    left_out = [f"{name} {status}" for name, status in comparison.passes if status != "applied"]
    if left_out:
        parts.append(Text("after, without: " + "; ".join(left_out)))
    if comparison.compilations is not None:
        parts += [_title("torch.compile"), comparison.compilations]
    return Group(*parts, Text(", ".join(map(" ".join, comparison.versions.items())), style="table.caption"))


def _figures(profiles: Sequence[Profile]) -> Iterator[RenderableType]:
    yield _call(profiles)
    yield _groups(profiles)
    for profile in profiles:
        yield _kernels(profile)
    for profile in profiles:
        if profile.audit is not None:
            yield _title(f"{profile.name}: where the host waits for a GPU")
            yield of_audit(profile.audit)
    for note in dict.fromkeys(note for profile in profiles for note in profile.notes):
        yield Text(note)


def _call(profiles: Sequence[Profile]) -> Table:
    """A call and its stages: on a GPU with the time of the kernels that each launched."""
    on_gpu = any(profile.memory for profile in profiles)
    table = Table("", title=Text("one call, set_image and predict", style="table.title"), title_justify="left")
    for profile in profiles:
        table.add_column(f"{profile.name} ms", justify="right")
        if on_gpu:
            table.add_column("GPU ms", justify="right")
    cells = [[_ms(profile.seconds), *([_ms(profile.kernel_seconds)] if on_gpu else [])] for profile in profiles]
    table.add_row("whole call", *_flat(cells), end_section=True)
    found = [{stage.name: stage for stage in profile.stages} for profile in profiles]
    for name in dict.fromkeys(name for stages in found for name in stages):
        cells = []
        for stages in found:
            stage = stages.get(name)
            empty = ["", ""] if on_gpu else [""]
            figures = [] if stage is None else [_ms(stage.seconds), *([_ms(stage.gpu_seconds)] if on_gpu else [])]
            cells.append(figures or empty)
        table.add_row(f"{name}, profiled", *_flat(cells))
    if on_gpu:
        peaks = [[f"{profile.memory.peak_bytes / 2**30:.2f} GiB" if profile.memory else "", ""] for profile in profiles]
        table.add_row("peak memory", *_flat(peaks))
    return table


def _groups(profiles: Sequence[Profile]) -> Table:
    table = Table("what", title=Text("where the time goes", style="table.title"), title_justify="left")
    for profile in profiles:
        for heading in (f"{profile.name} ms", "share", "calls"):
            table.add_column(heading, justify="right")
    table.add_column("mostly, of the last" if len(profiles) > 1 else "mostly")
    found = [{group.group: group for group in by_group(profile.kernels)} for profile in profiles]
    for name in GROUPS:
        of: list[GroupTime | None] = [groups.get(name) for groups in found]
        if any(of):
            cells = [["", "", ""] if g is None else [_ms(g.seconds), f"{g.share:.0%}", str(g.calls)] for g in of]
            names = () if of[-1] is None else of[-1].names[:2]
            table.add_row(name, *_flat(cells), Text(", ".join(_cut(kernel, 40) for kernel in names)))
    return table


def _kernels(profile: Profile) -> Table:
    heading = f"{profile.name}: the {'kernels' if profile.memory else 'operators'} that take longest"
    table = Table("what", title=Text(heading, style="table.title"), title_justify="left")
    for column in ("ms", "share", "calls"):
        table.add_column(column, justify="right")
    table.add_column("name")
    for kernel in profile.kernels[:MOST_KERNELS]:
        share = f"{kernel.seconds / profile.kernel_seconds:.0%}"
        table.add_row(kernel.group, _ms(kernel.seconds), share, str(kernel.calls), Text(_cut(kernel.short, 80)))
    return table


def of_audit(audit: Audit) -> Table:
    """Each place that waits, and what it does there."""
    table = Table("stage", "a call", "what it does", "where")
    for sync, count in audit.syncs:
        where = f"{sync.place} in {sync.function}\n{sync.code}"
        table.add_row(*map(Text, (sync.stage, str(count), sync.reason, where)))
    total, inside = (sum(count for _, count in syncs) for syncs in (audit.syncs, audit.inside()))
    words = f"{total} a call, {inside} of them inside the model's stages"
    table.caption = Text(words + (f"; the rest is not known: {audit.stopped}" if audit.stopped else ""))
    table.caption_justify = "left"
    return table


def _title(text: str) -> Text:
    return Text(text, style="table.title")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _flat(cells: Iterable[Iterable[str]]) -> list[str]:
    return [cell for row in cells for cell in row]
