"""What automatic mask generation needs to know of masks: numbers and run lengths on the device, regions on the host.

Run lengths are those of COCO: over the columns of a mask, a run of False first, which may be empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

Mask = NDArray[np.bool_]
EIGHT_NEIGHBOURS = np.ones((3, 3), dtype=int)


def stability_scores(logits: Tensor, threshold: float, offset: float) -> Tensor:
    """How little each mask depends on the threshold: the IoU of the masks `offset` above it and `offset` below it.

    Args:
        logits: float [N, H, W].
        threshold: where a mask begins.
        offset: how far to move it.

    Returns:
        float32 [N], NaN where both masks are empty.
    """
    inner, outer = (
        # Row by row: no sum of a row exceeds 32 bits, and no copy of 64 bits a pixel is made.
        (logits > limit).sum(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)
        for limit in (threshold + offset, threshold - offset)
    )
    return inner / outer


def boxes_of(masks: Tensor) -> Tensor:
    """The boxes (x0, y0, x1, y1) around masks, bool [N, H, W], all four inclusive: int64 [N, 4]; zeros if empty."""
    rows, columns = masks.any(-1), masks.any(-2)
    (y0, y1), (x0, x1) = _extent(rows), _extent(columns)
    return torch.stack([x0, y0, x1, y1], dim=-1) * rows.any(-1, keepdim=True)


def _extent(lines: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(lines.shape[-1], device=lines.device)
    return torch.where(lines, index, lines.shape[-1]).amin(-1), torch.where(lines, index, -1).amax(-1)


def changes_of(masks: Tensor, room: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Where masks change along their columns, from which `run_lengths` makes run lengths on the host.

    Args:
        masks: bool [N, H, W].
        room: for how many changes of all of them there is room, which spares waiting for the device; None for as many
            as there are.

    Returns:
        The first pixel of each mask, bool [N]; how often each changes, int64 [N]; and the indices of the pixels that
        differ from the one before, counted down the columns, of all masks one after the other, int32: cut off, or
        filled up with what means nothing, to `room`.
    """
    columns = masks.transpose(1, 2).flatten(1)
    changed = columns[:, 1:] ^ columns[:, :-1]
    where = changed.nonzero() if room is None else torch.nonzero_static(changed, size=room)
    return columns[:, 0], changed.sum(1), where[:, 1].int() + 1


def run_lengths(first: bool, changes: NDArray[np.integer], size: tuple[int, int]) -> dict[str, Any]:
    """The uncompressed run lengths of a mask of `size` (H, W), from its first pixel and where it changes."""
    counts = np.diff(changes, prepend=0, append=size[0] * size[1]).tolist()
    return {"size": list(size), "counts": [0, *counts] if first else counts}


def area_of(rle: dict[str, Any]) -> int:
    """The pixels of a mask, of its uncompressed run lengths."""
    return sum(rle["counts"][1::2])


def mask_of(rle: dict[str, Any]) -> Mask:
    """The mask, bool [H, W], of its uncompressed run lengths."""
    height, width = rle["size"]
    values = np.arange(len(rle["counts"])) % 2 == 1
    return np.repeat(values, rle["counts"]).reshape(width, height).T


def coco_rle(rle: dict[str, Any]) -> dict[str, Any]:
    """Compressed run lengths as pycocotools writes them, their counts as a str that JSON takes."""
    from pycocotools import mask as coco

    packed = coco.frPyObjects(rle, *rle["size"])
    return {**packed, "counts": packed["counts"].decode("utf-8")}


def fill_holes(mask: Mask, area: int) -> Mask:
    """The mask [H, W] with its holes of fewer than `area` pixels filled; the same object if there is none.

    A hole is a connected region of the background, by eight neighbours, the one around the object included.
    """
    labels, sizes = _regions(~mask)
    small = sizes < area
    return mask | np.append(False, small)[labels] if small.any() else mask


def drop_islands(mask: Mask, area: int) -> Mask:
    """The mask [H, W] without its regions of fewer than `area` pixels; the same object if there is none.

    The largest region is kept in any case; of several, the one that OpenCV, and so Meta's, counts first: it numbers
    regions by their first pair of rows, and in it by their first pair of columns.
    """
    labels, sizes = _regions(mask)
    large = sizes >= area
    if large.all():
        return mask
    if not large.any():
        y, x = np.nonzero(np.append(False, sizes == sizes.max())[labels])
        first = np.lexsort((x // 2, y // 2))[0]
        large[labels[y[first], x[first]] - 1] = True
    return np.append(False, large)[labels]


def _regions(mask: Mask) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The regions of a mask by eight neighbours: their labels [H, W], from 1, and how many pixels each has."""
    labels, count = ndimage.label(mask, EIGHT_NEIGHBOURS)
    return labels, np.bincount(labels.ravel(), minlength=count + 1)[1:]
