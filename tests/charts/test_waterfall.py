"""Bars are as long as the figures say, and what a step gained or lost is told apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from samopt.bench_table import Row
from samopt.charts import memory_waterfall, throughput_waterfall
from samopt.charts.style import BLUE, GREEN, GREY, RED
from tests.made_up_results import BASE, ROWS, SETTING


def panels(figure: Figure | None) -> list[Axes]:
    assert figure is not None
    return figure.axes


def bars(axes: Axes) -> list[tuple[int, float, float, str]]:
    """Of each bar: its row, where it begins, its length, and its colour."""
    found = []
    for bar in axes.patches:
        box: Any = bar
        colour = to_hex(box.get_facecolor() if box.get_fill() else box.get_edgecolor())
        row = round(box.get_y() + box.get_height() / 2)
        found.append((row, round(box.get_x(), 6), round(box.get_width(), 6), colour))
    return found


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_each_step_is_told_from_what_was_before() -> None:
    small, large = panels(throughput_waterfall(SETTING, ROWS))
    assert bars(small) == [
        (0, 0, 20, GREY),
        (1, 0, 20, BLUE),
        (1, 20, 40, GREEN),
        (2, 0, 48, BLUE),
        (2, 48, 12, RED),  # lost: an outline beside the bar
    ]
    assert words(small) == ["20.0", "60.0 (3.00x)", "48.0 (2.40x)", "left out"]
    assert bars(large)[1:] == [(1, 0, 20, BLUE), (1, 20, 60, GREEN), (2, 0, 80, BLUE), (2, 80, 120, GREEN)]
    assert [axes.get_title(loc="left") for axes in (small, large)] == ["batch 1", "batch 8"]
    assert small.get_xlim() == large.get_xlim(), "one scale"
    assert small.get_xlabel() == "images/s"
    labels = ["unmodified (batch 1)", "+ dtype", "+ sdpa & <b>", "+ sparse24"]
    assert [label.get_text() for label in small.get_yticklabels()] == labels
    assert {label.get_text() for label in large.get_yticklabels()} == {""}


def test_memory_of_another_batch_size_is_no_steps_doing() -> None:
    small, large = panels(memory_waterfall(SETTING, ROWS))
    assert bars(small)[1:] == [(1, 0, 2.5, BLUE), (1, 2.5, 1.5, GREEN), (2, 0, 2, BLUE), (2, 2, 0.5, GREEN)]
    assert bars(large)[1:] == [(1, 0, 6, BLUE), (2, 0, 5, BLUE), (2, 5, 1, GREEN)]
    assert small.get_xlabel() == "GiB"


def test_rows_side_by_side_are_plain_bars_with_names_of_their_own() -> None:
    setting = dataclasses.replace(SETTING, bench="encoder")
    rows = [BASE, Row("fast", 1, 5.0, images_per_second=200.0, ratio=10.0), Row("peer", 8, status="failed")]
    small, large = panels(throughput_waterfall(setting, rows))
    assert bars(small) == [(0, 0, 20, GREY), (1, 0, 200, BLUE)]
    assert words(large) == ["20.0", "failed"]
    assert [label.get_text() for label in large.get_yticklabels()] == ["unmodified (batch 1)", "peer"]


def test_a_pass_alone_is_not_what_the_next_row_builds_on() -> None:
    alone = dataclasses.replace(ROWS[2], what="sdpa alone", ratio_before=None)
    (axes,) = panels(throughput_waterfall(SETTING, [BASE, alone, ROWS[1]]))
    assert bars(axes) == [(0, 0, 20, GREY), (1, 0, 48, BLUE), (2, 0, 20, BLUE), (2, 20, 40, GREEN)]


@pytest.mark.parametrize("gib", [0.0, None])
def test_there_is_no_chart_of_memory_where_none_was_measured(gib: float | None) -> None:
    rows = [dataclasses.replace(row, peak_gib=gib) for row in ROWS]
    assert memory_waterfall(SETTING, rows) is None
    assert throughput_waterfall(SETTING, rows) is not None
