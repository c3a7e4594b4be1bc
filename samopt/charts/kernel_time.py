"""Where the time of a call goes, before a recipe and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samopt.charts.style import BLUE, GREY, plain_axes, short, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from samopt.profiling import Comparison

HEIGHT = 0.38  # of a bar, where rows are 1 apart


def kernel_time(comparison: Comparison) -> Figure:
    """Milliseconds in one call of all kernels, and of each group of them, before and after; on a CPU of operators."""
    from matplotlib.figure import Figure

    from samopt.profiling import GROUPS, by_group

    profiles = (comparison.before, comparison.after)
    found = [{group.group: 1e3 * group.seconds for group in by_group(profile.kernels)} for profile in profiles]
    names = [name for name in GROUPS if any(name in times for times in found)]
    what = "kernels" if comparison.after.memory else "operators"
    with styled():
        figure = Figure(figsize=(8, 0.52 * len(names) + 2.1), layout="constrained")
        axes = figure.subplots()
        for side, (times, colour, label) in enumerate(zip(found, (GREY, BLUE), ("before", "after"), strict=True)):
            values = [sum(times.values()), *(times.get(name, 0.0) for name in names)]
            places = [row + (side - 0.5) * HEIGHT for row in range(len(values))]
            bars = axes.barh(places, values, height=HEIGHT, color=colour, label=label)
            axes.bar_label(bars, [short(value) if value else "none" for value in values], padding=3, fontsize=9)
        axes.set_yticks(range(len(names) + 1), [f"all {what}", *names])
        axes.set_ylim(len(names) + 0.55, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.1)
        plain_axes(axes, "ms in one call, set_image and predict")
        axes.legend(frameon=False, loc="lower right")
        title = f"Time of {what} before and after {comparison.recipe}, on {comparison.after.device} (lower is better)"
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure
