"""Waterfalls: one bar for each row of a benchmark, with what it gained or lost since the row before."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from samopt.bench_table import TIMED, Row, Setting
from samopt.charts.style import BLUE, GREEN, GREY, RED, plain_axes, short, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

LABEL = 30  # characters of a row's name in a line
PANEL = 3.6  # inches
BAR = 0.62  # height, where rows are 1 apart
GONE = "////"

Difference = tuple[str, str]  # what it is called, and its colour


def throughput_waterfall(setting: Setting, rows: Sequence[Row]) -> Figure | None:
    """Images per second of every row, one panel for each batch size; None where nothing was timed."""

    def words(row: Row) -> str:
        ratio = "" if row.ratio is None or row is rows[0] else f" ({short(row.ratio)}x)"
        return f"{short(row.images_per_second or 0.0)}{ratio}"

    title = f"{title_of(setting)}: image encoder, images per second (higher is better)"
    return _figure(rows, "images_per_second", title, "images/s", words, ("gained", GREEN), ("lost", RED))


def memory_waterfall(setting: Setting, rows: Sequence[Row]) -> Figure | None:
    """Peak GPU memory of every row, one panel for each batch size; None where none was measured, as on a CPU."""

    def words(row: Row) -> str:
        return f"{row.peak_gib:.2f}"

    title = f"{title_of(setting)}: image encoder, peak GPU memory (lower is better)"
    return _figure(rows, "peak_gib", title, "GiB", words, ("added", RED), ("saved", GREEN))


def title_of(setting: Setting) -> str:
    """The model, and of a waterfall its recipe."""
    return f"{setting.model}, {setting.recipes[0]}" if setting.bench == "waterfall" else setting.model


def batch_sizes(rows: Sequence[Row]) -> list[int]:
    """Those of all rows but the base, or the base's where it is the only one."""
    return list(dict.fromkeys(row.batch_size for row in rows[1:])) or [row.batch_size for row in rows[:1]]


def _figure(
    rows: Sequence[Row],
    name: str,
    title: str,
    unit: str,
    words: Callable[[Row], str],
    more: Difference,
    less: Difference,
) -> Figure | None:
    """The panels, on one scale.

    Args:
        rows: the base of all ratios first; it is the first of every panel.
        name: of the figure in a row.
        title: of the chart.
        unit: of the figure.
        words: written beside a row's bar.
        more: a difference to the row before that lengthens the bar.
        less: one that shortens it.
    """
    from matplotlib.figure import Figure

    if not any(getattr(row, name) for row in rows):
        return None
    sizes = batch_sizes(rows)
    panels = [[rows[0], *(row for row in rows[1:] if row.batch_size == size)] for size in sizes]
    several = sizes != [rows[0].batch_size]
    labels = [[_label(row, several and row is rows[0]) for row in panel] for panel in panels]
    most = max(value for row in rows if (value := getattr(row, name)) is not None)
    stepwise = any(row.ratio_before is not None for row in rows)
    with styled():
        figure = Figure(figsize=(2.6 + PANEL * len(panels), 0.44 * max(map(len, panels)) + 1.5), layout="constrained")
        found = figure.subplots(1, len(panels), squeeze=False)[0]
        for index, (axes, panel, size) in enumerate(zip(found, panels, sizes, strict=True)):
            _bars(axes, panel, name, words, more[1], less[1], most)
            repeated = index > 0 and labels[index] == labels[0]
            axes.set_yticks(range(len(panel)), [""] * len(panel) if repeated else labels[index])
            axes.set_ylim(len(panel) - 0.45, -0.55)
            axes.set_xlim(0, most * 1.32)
            axes.tick_params(axis="y", length=0)
            axes.set_title(f"batch {size}")
            plain_axes(axes, unit)
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        if stepwise:
            figure.legend(
                handles=list(_legend(more, less)), loc="outside lower left", ncols=4, frameon=False, fontsize=9
            )
    return figure


def _label(row: Row, with_batch: bool) -> str:
    return textwrap.fill(row.what, LABEL) + (f" (batch {row.batch_size})" if with_batch else "")


def _bars(
    axes: Axes, rows: Sequence[Row], name: str, words: Callable[[Row], str], more: str, less: str, most: float
) -> None:
    """A bar for each row: in one colour up to the smaller of it and the row before, the difference in another."""
    before = rows[0]
    for place, row in enumerate(rows):
        value = getattr(row, name)
        if row.status != TIMED or value is None:
            axes.text(most * 0.01, place, row.status, va="center", style="italic", fontsize=9)
            continue
        # More images take more memory, which is no step's doing.
        of_step = row.ratio_before is not None and (name != "peak_gib" or before.batch_size == row.batch_size)
        step = getattr(before, name) if of_step else value
        axes.barh(place, min(step, value), height=BAR, color=GREY if row is rows[0] else BLUE)
        if value > step:
            axes.barh(place, value - step, left=step, height=BAR, color=more)
        elif value < step:  # what is gone is an outline
            axes.barh(place, step - value, left=value, height=BAR, fill=False, edgecolor=less, hatch=GONE)
        axes.text(max(step, value) + most * 0.02, place, words(row), va="center", fontsize=9)
        if row.ratio_before is not None:
            before = row


def _legend(more: Difference, less: Difference) -> Iterator[Patch]:
    from matplotlib.patches import Patch

    yield Patch(color=GREY, label="unmodified, float32")
    yield Patch(color=BLUE, label="as before")
    yield Patch(color=more[1], label=f"{more[0]} by the step")
    yield Patch(fill=False, edgecolor=less[1], hatch=GONE, label=f"{less[0]} by the step")
