"""The search's own parts, against torchvision and plain counting. What it finds is compared with Meta's in
test_automatic_mask_generator.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms

from samopt.mask_search import Room, first_of, without_duplicates


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


@pytest.mark.parametrize(("room", "indices"), [(None, [1, 2]), (1, [1]), (3, [1, 2, -1]), (9, [1, 2, -1, -1])])
def test_what_is_chosen_is_found_and_counted_as_room_allows(room: int | None, indices: list[int]) -> None:
    index, count = first_of(torch.tensor([False, True, True, False]), room)
    assert index.tolist() == indices
    assert int(count) == 2


def test_room_grows_at_once_and_shrinks_slowly() -> None:
    room = Room(100, 100, 8, 100, 100)
    grown = room.after(Room(1000, 1, 1, 1, 1))
    assert not grown.lacks(Room(1000, 1, 1, 1, 1))
    assert 80 < grown.stable < 100
    assert room.lacks(Room(1, 1, 1, 101, 1))
    for _ in range(60):
        grown = grown.after(Room(10, 10, 2, 10, 10))
    assert not grown.lacks(Room(10, 10, 2, 10, 10))
    assert max(grown.rated, grown.changes) < 20


def test_room_comes_in_few_sizes() -> None:
    sizes = {Room(number, 1, 1, 1, 1).rounded().rated for number in range(1, 1025)}
    assert sorted(sizes) == [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(Room(size, 1, 1, 1, 1).rounded().rated >= size for size in range(1, 1025))
