"""What speed costs: the accuracy of every row of a benchmark against its speed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from samopt.bench_table import Row, Setting
from samopt.charts.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, plain_axes, styled
from samopt.charts.waterfall import batch_sizes, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAP = "\N{NO-BREAK SPACE}" * 2  # in an SVG, spaces side by side are one
MARKERS = "osD^vP"
LEAST_ERROR = 1e-6  # below it, the axis of errors is linear
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
ACCURACIES = {  # of a row: what the axis is called
    "mask_iou": "mask IoU with the unmodified model",
    "miou": "mIoU with ground truth",
    "error": "embedding error, relative",
}


def accuracy_against_speed(setting: Setting, rows: Sequence[Row]) -> Figure | None:
    """Accuracy upwards, images per second to the right, on a logarithmic axis, one line for each batch size.

    Accuracy is the mask IoU with the unmodified model, and the mIoU with ground truth where there is some; where masks
    were not measured, the embedding's relative error, the smallest on top. Points are numbered as the rows beside them.
    None where no row but the base has both.
    """
    from matplotlib.figure import Figure

    names = [name for name in ACCURACIES if any(_has(row, [name]) for row in rows[1:])]
    names = [name for name in names if name != "error"] or names
    if not names:
        return None
    shown = list(dict.fromkeys(row.what for row in rows if _has(row, names)))
    numbers = {what: str(number) for number, what in enumerate(shown)}
    key = [textwrap.fill(f"{number}{GAP}{what}", 38, subsequent_indent=2 * GAP) for what, number in numbers.items()]
    title = f"{title_of(setting)}: accuracy against speed (right and up is better)"
    with styled():
        lines = sum(1 + text.count("\n") for text in key) + len(batch_sizes(rows)) + 1
        figure = Figure(figsize=(3.3 + 4.2 * len(names), max(3.8, 0.2 * lines + 1.2)), layout="constrained")
        *found, beside = figure.subplots(1, len(names) + 1, width_ratios=[*(1.4 for _ in names), 1.0])
        for axes, name in zip(found, names, strict=True):
            _points(axes, rows, name, numbers)
        beside.axis("off")
        beside.text(0, 1, "\n".join(key), va="top", fontsize=9, linespacing=1.35, transform=beside.transAxes)
        handles, labels = found[0].get_legend_handles_labels()
        beside.legend(handles, labels, frameon=False, fontsize=9, loc="lower left", borderaxespad=0)
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _has(row: Row, names: Sequence[str]) -> bool:
    return row.images_per_second is not None and any(getattr(row, name) is not None for name in names)


def _points(axes: Axes, rows: Sequence[Row], name: str, numbers: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    base, *others = rows
    exact = any(row.error == 0 for row in others)
    if name != "error" or exact:  # a logarithmic axis has no place for what errs by 0
        _series(axes, [base], name, numbers, "*", GREY, f"unmodified, batch {base.batch_size}")
    for size, marker, colour in zip(batch_sizes(rows), cycle(MARKERS), cycle(COLOURS), strict=False):
        of_size = [row for row in others if row.batch_size == size]
        _series(axes, of_size, name, numbers, marker, colour, f"batch {size}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.12, 0.16)
    if name == "error":
        if exact:
            axes.set_yscale("symlog", linthresh=LEAST_ERROR)
        else:
            axes.set_yscale("log")
        axes.invert_yaxis()
    else:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, min(top, 1 + 0.1 * (1 - bottom)))
    axes.set_xlabel("images/s")
    plain_axes(axes, ACCURACIES[name], upright=True)


def _series(
    axes: Axes, rows: Sequence[Row], name: str, numbers: dict[str, str], marker: str, colour: str, label: str
) -> None:
    timed = [row for row in rows if _has(row, [name])]
    points = [(row.images_per_second, getattr(row, name)) for row in timed]
    axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, markersize=7, label=label)
    for row, point in zip(timed, points, strict=True):
        number = numbers[row.what]
        offset = (0, 7 if int(number) % 2 else -15)  # neighbours' numbers on either side
        axes.annotate(number, point, offset, textcoords="offset points", ha="center", fontsize=8)
