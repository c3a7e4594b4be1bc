"""Non-maximum suppression against torchvision's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms

from samopt.nms import without_duplicates


def random_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, 40, (count, 2), generator=generator)
    return torch.cat([corners, corners + torch.randint(0, 30, (count, 2), generator=generator)], dim=1)


@pytest.mark.parametrize("count", [0, 1, 2, 300])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("rounds", [None, 64])
def test_duplicates_are_those_of_torchvision(count: int, threshold: float, rounds: int | None) -> None:
    boxes = random_boxes(count, seed=count)
    scores = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(1)) / 50  # with ties
    valid = torch.rand(count, generator=torch.Generator().manual_seed(2)) < 0.8
    keep, order, needed = without_duplicates(boxes, scores, valid, threshold, rounds)
    there = valid.nonzero()[:, 0]
    wanted = there[nms(boxes[there].float(), scores[there], threshold)]
    assert torch.equal(order[keep], wanted)
    assert 1 <= int(needed) <= 64


def test_too_few_rounds_are_told() -> None:
    chain = torch.tensor([[0, 0, 10, 10 + 3 * step] for step in range(9)])  # each overlaps the next two
    scores = torch.arange(9, 0, -1) / 10
    everything = torch.ones(9, dtype=torch.bool)
    _, _, needed = without_duplicates(chain, scores, everything, 0.7, None)
    assert int(needed) > 2
    for rounds in range(1, 9):
        _, _, told = without_duplicates(chain, scores, everything, 0.7, rounds)
        assert int(told) == (2 * rounds if rounds < int(needed) else int(needed))
