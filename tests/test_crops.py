"""Crops and points, against Meta's functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from segment_anything.utils import amg

from samopt.crops import crop_boxes, cut_off, unit_grid


@pytest.mark.parametrize("side", [1, 2, 7, 32])
def test_grids_are_metas_to_the_last_bit(side: int) -> None:
    assert np.array_equal(unit_grid(side), amg.build_point_grid(side))


@pytest.mark.parametrize("size", [(100, 100), (37, 200), (601, 350), (9, 8)])
@pytest.mark.parametrize("ratio", [0.0, 512 / 1500, 0.9])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_crops_are_metas(size: tuple[int, int], ratio: float, layers: int) -> None:
    boxes, indices = amg.generate_crop_boxes(size, layers, ratio)
    filled = [box[0] < box[2] and box[1] < box[3] for box in boxes]
    expected = [(i, tuple(box)) for i, box, full in zip(indices, boxes, filled, strict=True) if full]
    assert list(crop_boxes(size, layers, ratio)) == expected
    assert all(filled) or min(size) < 10


def test_crops_without_a_pixel_are_left_out() -> None:
    assert list(crop_boxes((1, 1), 1, 0.3)) == [(0, (0, 0, 1, 1)), (1, (0, 0, 1, 1))]


def test_what_the_edge_of_a_crop_cut_off_is_metas() -> None:
    random = np.random.default_rng(0)
    size = (90, 120)
    found = []
    for _, crop in crop_boxes(size, 2, 0.3):
        x0, y0, x1, y1 = crop
        corners = np.sort(random.integers(0, [x1 - x0, y1 - y0], (200, 2, 2)), axis=1).reshape(-1, 4)
        boxes = torch.from_numpy(corners)
        expected = amg.is_box_near_crop_edge(boxes, list(crop), [0, 0, size[1], size[0]])
        assert torch.equal(cut_off(boxes + torch.tensor([x0, y0, x0, y0]), crop, size), expected)
        found.append(float(expected.float().mean()))
    assert found[0] == 0, "nothing cuts the whole image"
    assert 0.1 < found[1] < 1
