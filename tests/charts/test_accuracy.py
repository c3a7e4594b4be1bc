"""Every row is where its speed and accuracy are, with its number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from samopt.charts import accuracy_against_speed
from tests.made_up_results import BASE, ROWS, SETTING


def without_masks(error: float | None) -> list[Any]:
    rows = [dataclasses.replace(row, mask_iou=None, miou=None) for row in ROWS]
    return [dataclasses.replace(rows[0], error=0.0), *(dataclasses.replace(row, error=error) for row in rows[1:])]


def test_points_are_the_rows() -> None:
    figure = accuracy_against_speed(SETTING, ROWS)
    assert figure is not None
    masks, truth, beside = figure.axes
    assert (masks.get_ylabel(), truth.get_ylabel()) == ("mask IoU with the unmodified model", "mIoU with ground truth")
    lines: list[Any] = [*masks.lines]
    found = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in lines}
    assert found == {
        "unmodified, batch 1": [(20.0, 1.0)],
        "batch 1": [(60.0, 0.999), (48.0, 0.998)],
        "batch 8": [(80.0, 0.999), (200.0, 0.998)],
    }
    assert [text.get_text() for text in masks.texts] == ["0", "1", "2", "1", "2"]
    (key,) = (text.get_text() for text in beside.texts)
    assert key.split() == ["0", "unmodified", "1", "+", "dtype", "2", "+", "sdpa", "&", "<b>"]
    assert masks.get_xscale() == "log"
    assert masks.get_ylim()[1] < 1.001, "no tick above 1"


@pytest.mark.parametrize(("error", "scale", "series"), [(0.01, "log", 2), (0.0, "symlog", 3)])
def test_without_masks_the_least_error_is_on_top(error: float, scale: str, series: int) -> None:
    figure = accuracy_against_speed(SETTING, without_masks(error))
    assert figure is not None
    axes, _ = figure.axes
    assert axes.get_ylabel() == "embedding error, relative"
    assert axes.yaxis_inverted()
    assert axes.get_yscale() == scale
    assert len(axes.lines) == series
    figure.draw_without_rendering()


def test_nothing_to_show() -> None:
    assert accuracy_against_speed(SETTING, [BASE]) is None
    assert accuracy_against_speed(SETTING, without_masks(None)) is None
