"""2:4 sparse weights as files hold them: two values of every four, and where they were, for any GPU or none."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of a weight: what its bits are looked at as
WEIGHTS, PAIR = 4, 8  # in a block, and in two, whose positions fill a byte

# For each set of weights that are not zero, as bits of a number: the two positions to keep, ascending, 2 bits each.
POSITIONS = [0b0100, 0b0100, 0b0100, 0b0100, 0b1000, 0b1000, 0b1001, 0, 0b1100, 0b1100, 0b1101, 0, 0b1110, 0, 0, 0]


def pack(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A 2:4 weight in a little more than half of its bytes.

    Args:
        weight: [N, K] of any dtype of 1, 2 or 4 bytes.

    Returns:
        Values [N, K / 2] of the same dtype and positions uint8 [N, K / 8], from which `unpack` makes the same bits;
        None of a weight that has no such form.
    """
    if weight.ndim != 2 or weight.shape[1] % PAIR or weight.dtype.itemsize not in BITS:
        return None
    rows, columns = weight.shape
    blocks = weight.detach().contiguous().view(BITS[weight.dtype.itemsize]).reshape(-1, WEIGHTS)
    kept = blocks != 0
    if bool((kept.sum(1) > 2).any()):
        return None
    sets = (kept * torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=weight.device)).sum(1)
    positions = torch.tensor(POSITIONS, dtype=torch.uint8, device=weight.device)[sets]
    values = blocks.gather(1, _pairs(positions)).view(weight.dtype).reshape(rows, columns // 2)
    pairs = positions.reshape(-1, 2)
    return values, (pairs[:, 0] | pairs[:, 1] << 4).reshape(rows, columns // PAIR)


def unpack(values: Tensor, positions: Tensor) -> Tensor:
    """What `pack` made these of: [N, K]."""
    rows, columns = positions.shape
    blocks = torch.stack([positions & 0b1111, positions >> 4], dim=-1).flatten()
    bits = values.contiguous().view(BITS[values.dtype.itemsize]).reshape(-1, 2)
    dense = bits.new_zeros(len(bits), WEIGHTS).scatter_(1, _pairs(blocks), bits)
    return dense.view(values.dtype).reshape(rows, columns * PAIR)


def _pairs(positions: Tensor) -> Tensor:
    """Positions of 2 bits each, [B], as indices, int64 [B, 2]."""
    return torch.stack([positions & 0b11, positions >> 2], dim=-1).long()
