"""Room for what is counted later. What a search finds in it is compared with Meta's in
test_automatic_mask_generator.py."""

from __future__ import annotations

import pytest
import torch

from samopt.room import Room, first_of


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
