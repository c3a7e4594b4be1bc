"""Numbers, run lengths and regions of masks, against Meta's functions with OpenCV, and against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco
from segment_anything.utils import amg
from torch import Tensor

from samopt.masks import (
    area_of,
    boxes_of,
    changes_of,
    coco_rle,
    drop_islands,
    fill_holes,
    mask_of,
    run_lengths,
    stability_scores,
)

SIZES = [(1, 1), (1, 7), (7, 1), (13, 9)]


def random_masks(size: tuple[int, int]) -> Tensor:
    """Masks [N, H, W] from empty to full."""
    random = torch.Generator().manual_seed(size[0])
    shares = torch.tensor([0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]).repeat(3)
    return torch.rand(len(shares), *size, generator=random) < shares[:, None, None]


@pytest.mark.parametrize("size", SIZES)
def test_run_lengths_are_metas_and_those_of_coco(size: tuple[int, int]) -> None:
    masks = random_masks(size)
    firsts, counts, changes = changes_of(masks)
    where = torch.split(changes, counts.tolist())
    ours = [run_lengths(bool(first), at.numpy(), size) for first, at in zip(firsts, where, strict=True)]
    assert ours == amg.mask_to_rle_pytorch(masks)
    for rle, mask in zip(ours, masks.numpy(), strict=True):
        assert np.array_equal(mask_of(rle), mask)
        assert area_of(rle) == mask.sum()
        assert np.array_equal(coco.decode(coco_rle(rle)), mask)
        assert coco_rle(rle) == amg.coco_encode_rle(rle)


@pytest.mark.parametrize("size", SIZES)
def test_boxes_are_metas(size: tuple[int, int]) -> None:
    masks = random_masks(size)
    assert torch.equal(boxes_of(masks), amg.batched_mask_to_box(masks))


def test_stability_scores_are_metas() -> None:
    logits = torch.randn(20, 9, 13, generator=torch.Generator().manual_seed(0)) * 3
    logits[3] = -9  # nothing above either threshold
    scores = stability_scores(logits, 0.5, 1.25)
    torch.testing.assert_close(scores, amg.calculate_stability_score(logits, 0.5, 1.25), rtol=0, atol=0, equal_nan=True)
    assert scores.isnan().nonzero().flatten().tolist() == [3]


def test_rows_of_more_than_16_bits_are_counted() -> None:
    assert stability_scores(torch.tensor([1.0, -0.5]).repeat(1, 1, 40_000), 0.0, 0.75).tolist() == [0.5]


def test_nothing_comes_of_no_masks() -> None:
    none = torch.empty(0, 4, 5, dtype=torch.bool)
    assert boxes_of(none).shape == (0, 4)
    assert [len(values) for values in changes_of(none)] == [0, 0, 0]
    assert stability_scores(none.float(), 0.0, 1.0).shape == (0,)


def speckled(seed: int) -> NDArray[np.bool_]:
    random = np.random.default_rng(seed)
    return random.random(random.integers(1, 40, 2)) < random.choice([0.02, 0.1, 0.3, 0.9])


@pytest.mark.parametrize("area", [0, 1, 2, 5, 20, 2000])
def test_small_regions_are_metas(area: int) -> None:
    for seed in range(100):
        mask = speckled(seed)
        for ours, mode in ((fill_holes, "holes"), (drop_islands, "islands")):
            theirs, changed = amg.remove_small_regions(mask, area, mode)
            assert np.array_equal(ours(mask, area), theirs)
            assert (ours(mask, area) is not mask) == changed, "who asks whether it changed compares objects"
