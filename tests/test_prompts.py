from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from samopt.prompts import PromptBatch, box_of, choose_objects, innermost, make_prompts

Mask = NDArray[np.bool_]


def rectangle(x0: int, y0: int, x1: int, y1: int, size: tuple[int, int] = (40, 50)) -> Mask:
    """A mask [H, W] of the pixels from (x0, y0) to (x1, y1), both inclusive."""
    mask = np.zeros(size, dtype=np.bool_)
    mask[y0 : y1 + 1, x0 : x1 + 1] = True
    return mask


def ring() -> Mask:
    return rectangle(10, 5, 30, 25) & ~rectangle(14, 9, 26, 21)


MASKS: Mask = np.stack([rectangle(3, 4, 20, 30), ring(), rectangle(49, 39, 49, 39), rectangle(0, 0, 49, 5)])


def doubled(points: NDArray[np.float64]) -> Tensor:
    """An input frame of twice the picture's size."""
    return torch.as_tensor(points * 2, dtype=torch.float32)


@pytest.fixture
def batches() -> dict[str, PromptBatch]:
    return {batch.kind: batch for batch in make_prompts(MASKS, None, doubled)}


def under(points: Tensor) -> NDArray[np.bool_]:
    """Whether point [i, k] lies on mask i: bool [B, K]."""
    x, y = (points / 2).long().unbind(-1)
    return MASKS[np.arange(len(MASKS))[:, None], y, x]


def test_every_kind_is_there_with_one_prompt_per_object(batches: dict[str, PromptBatch]) -> None:
    assert list(batches) == ["point", "points", "single", "box", "box+point"], "and mask, which needs a model"
    given = {kind: (b.points is not None, b.boxes is not None, b.multimask) for kind, b in batches.items()}
    assert given == {
        "point": (True, False, True),
        "points": (True, False, True),
        "single": (True, False, False),
        "box": (False, True, False),
        "box+point": (True, True, False),
    }
    for batch in batches.values():
        assert (batch.labels is None) is (batch.points is None)
        assert batch.masks is None
        for tensor, shape in ((batch.points, (4, -1, 2)), (batch.labels, (4, -1)), (batch.boxes, (4, 4))):
            if tensor is not None:
                assert [a for a, b in zip(tensor.shape, shape, strict=True) if b > 0] == [b for b in shape if b > 0]
                assert tensor.dtype == (torch.int32 if len(shape) == 2 and shape[1] < 0 else torch.float32)


def test_positive_points_lie_on_their_object_and_negative_ones_beside_it(batches: dict[str, PromptBatch]) -> None:
    for batch in batches.values():
        if batch.points is not None:
            assert batch.labels is not None
            assert np.array_equal(under(batch.points), batch.labels.bool().numpy()), batch.kind
    several = batches["points"].labels
    assert several is not None
    assert several.tolist() == [[1, 1, 0]] * len(MASKS)


def test_negative_points_are_near_their_object(batches: dict[str, PromptBatch]) -> None:
    points, boxes = batches["points"].points, batches["box"].boxes
    assert points is not None
    assert boxes is not None
    low, high = boxes[:, :2], boxes[:, 2:]
    margin = (high - low) / 2 + 4
    negative = points[:, 2]
    assert bool(((low - margin <= negative) & (negative <= high + margin)).all())
    assert bool(((negative >= 0) & (negative <= 2 * torch.tensor([49, 39]))).all()), "and in the picture"


def test_boxes_are_tight(batches: dict[str, PromptBatch]) -> None:
    expected = torch.tensor([[3, 4, 20, 30], [10, 5, 30, 25], [49, 39, 49, 39], [0, 0, 49, 5]]) * 2.0
    for kind in ("box", "box+point"):
        boxes = batches[kind].boxes
        assert boxes is not None
        assert torch.equal(boxes, expected)
    assert box_of(ring()).tolist() == [10, 5, 30, 25]


def test_given_points_are_used_as_they_are() -> None:
    points = np.array([[4, 5], [11, 6], [49, 39], [2, 2]], dtype=np.float64)
    for batch in make_prompts(MASKS, points, doubled):
        if batch.points is not None:
            assert torch.equal(batch.points[:, 0], doubled(points))


def test_prompts_are_the_same_every_time(batches: dict[str, PromptBatch]) -> None:
    for again in make_prompts(MASKS, None, doubled):
        assert str(again) == str(batches[again.kind])


def test_an_object_that_fills_the_picture_still_gets_every_kind() -> None:
    full = np.ones((1, 6, 8), dtype=np.bool_)
    kinds = {batch.kind: batch for batch in make_prompts(full, None, doubled)}
    assert len(kinds) == 5
    points = kinds["points"].points
    assert points is not None
    assert bool(((points >= 0) & (points <= 2 * torch.tensor([7, 5]))).all())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (rectangle(3, 4, 7, 8), (5, 6)),
        (rectangle(0, 0, 4, 4), (2, 2)),  # the picture's border counts as the outside
        (rectangle(45, 35, 49, 39), (47, 37)),
        (rectangle(2, 2, 8, 8) | rectangle(20, 2, 40, 3), (5, 5)),  # the thickest part
    ],
)
def test_the_innermost_pixel_is_farthest_from_any_outside(mask: Mask, expected: tuple[int, int]) -> None:
    assert tuple(innermost(mask)) == expected


def test_objects_are_chosen_from_the_smallest_to_the_largest() -> None:
    sides = [5, 0, 1, 9, 3, 7, 0]
    masks = np.stack([rectangle(0, 0, side - 1, side - 1) if side else rectangle(1, 1, 0, 0) for side in sides])
    assert choose_objects(masks, 3).tolist() == [2, 0, 3]
    assert choose_objects(masks, 9).tolist() == [2, 4, 0, 5, 3]
    assert choose_objects(masks, 1).tolist() == [2]
    assert choose_objects(masks[[1, 6]], 3).tolist() == []
    assert choose_objects(masks[:0], 3).tolist() == []


def test_moving_a_batch_moves_what_it_has(batches: dict[str, PromptBatch]) -> None:
    moved = batches["points"].to(torch.device("meta"))
    assert moved.points is not None
    assert moved.labels is not None
    assert moved.points.is_meta
    assert moved.labels.is_meta
    assert moved.boxes is None
    assert (moved.kind, moved.multimask) == ("points", True)
