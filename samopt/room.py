"""Room on the device for what nobody has counted yet: to count it is to wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samopt.passes.kernels.arithmetic import power_of_two

SPARE, LASTING = 1.25, 0.9  # room for more than a view needed, and for less with every view that needs less


@dataclass(frozen=True)
class Room:
    """For how many of each kind there is room, or how many there were.

    Attributes:
        rated: masks of a piece of the prompts that the model rates above the threshold.
        stable: masks that pass all thresholds.
        rounds: of dropping duplicates, until no mask changes any more.
        kept: masks that are no duplicates.
        changes: pixels where they change, of a group of masks that is upscaled together, per mask of the group.
    """

    rated: int = 384
    stable: int = 768
    rounds: int = 8
    kept: int = 128
    changes: int = 4096

    def lacks(self, needed: Room) -> bool:
        """Whether there is too little room for what is needed."""
        return any(room < need for room, need in zip(vars(self).values(), vars(needed).values(), strict=True))

    def after(self, needed: Room) -> Room:
        """Room for what is needed and a little more, and for not much less than there was: pictures that follow each
        other are alike, and a second search costs more than room that is not used."""
        pairs = zip(vars(self).values(), vars(needed).values(), strict=True)
        return Room(*(max(int(SPARE * need), int(LASTING * room)) for room, need in pairs))

    def rounded(self) -> Room:
        """Room for a little more, in few sizes, so that memory is used again."""
        return Room(*map(_step, vars(self).values()))


def _step(number: int) -> int:
    """The smallest of 4, 6, 8, 12, 16, 24, 32, ... that is no less."""
    power = power_of_two(number, 4)
    return power * 3 // 4 if power * 3 // 4 >= max(number, 4) else power


def first_of(chosen: Tensor, room: int | None) -> tuple[Tensor, Tensor]:
    """The indices of what is chosen, and its number.

    Args:
        chosen: bool [N].
        room: for how many there is room; None for as many as there are.

    Returns:
        int64 [min(N, room)], -1 where there are no more; and int64, the number, whatever the room.
    """
    if room is None:
        index = chosen.nonzero()[:, 0]
    else:
        index = torch.nonzero_static(chosen, size=min(room, len(chosen)), fill_value=-1)[:, 0]
    return index, chosen.sum()
