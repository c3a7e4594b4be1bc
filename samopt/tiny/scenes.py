"""Procedural pictures with exact masks, drawn from a seed: what the embedded model is trained and scored on.

A scene has large objects with parts inside them, medium and small ones, and thin bars, overlapping one another over
a textured ground. A part's pixels count to its whole too; an object lying above another does not, and unlike a part
it casts a contact shadow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import InvalidInput

from .layout import Layout, sample_layout
from .raster import draw_single

# Which objects count is decided at this size whatever the picture's, so that a seed has the same objects at all sizes.
_REFERENCE = 256
LEAST_VISIBLE = 0.0018
LEAST_OWN = 0.0012
SMALLEST_SIZE = 64


@dataclass(frozen=True)
class Scene:
    """One picture.

    Attributes:
        image: uint8 [H, W, 3], RGB.
        masks: bool [N, H, W], the visible pixels of each object; those of a whole include its parts'.
        parents: per object the index of the whole it is a part of, or None.
        points: int64 [N, 2], one prompt (x, y) per object, on pixels of the object that belong to none of its parts.
    """

    image: Tensor
    masks: Tensor
    parents: tuple[int | None, ...]
    points: Tensor


def scene_layout(seed: int) -> Layout:
    """The layout (``B`` = 1, on the CPU) that ``draw_scene`` draws."""
    return sample_layout(torch.Generator().manual_seed(seed), 1)


def draw_scene(seed: int, size: int = 1024, device: str | torch.device = "cpu") -> Scene:
    """Draws the scene of a seed.

    Args:
        seed: at least 0. The same seed gives bit-identical scenes on a CPU, and the same objects at any size.
        size: side of the square picture in pixels, at least 64.
        device: where to draw, and where the tensors lie.

    Raises:
        InvalidInput: the seed is negative or the size too small.
    """
    if seed < 0:
        raise InvalidInput(f"seed is {seed}; a scene needs a seed of at least 0")
    if size < SMALLEST_SIZE:
        raise InvalidInput(f"size is {size} pixels; a scene needs at least {SMALLEST_SIZE}")
    layout = scene_layout(seed)
    reference = draw_single(layout, _REFERENCE, colors=False)[1]
    kept = _kept(reference, layout)
    image, ids = draw_single(layout.to(torch.device(device)), size)
    assert image is not None
    parents = layout.parent[0].tolist()
    members = {index: [index] + [part for part, whole in enumerate(parents) if whole == index] for index in kept}
    own = {index: ids == index for index in kept}
    # At sizes far below the reference a thin object may have no pixel left.
    kept = [index for index in kept if bool(own[index].any())]
    masks = [torch.isin(ids, torch.tensor(members[index], dtype=ids.dtype, device=ids.device)) for index in kept]
    chances = layout.chance[0].tolist()
    points = [_snap(pick_point(reference == index, chances[index]), own[index], size / _REFERENCE) for index in kept]
    return Scene(
        image=image.permute(1, 2, 0).contiguous(),
        masks=torch.stack(masks) if masks else ids.new_zeros((0, size, size), dtype=torch.bool),
        parents=tuple(kept.index(parents[index]) if parents[index] in kept else None for index in kept),
        points=torch.tensor(points, dtype=torch.int64, device=ids.device).reshape(-1, 2),
    )


def _kept(ids: Tensor, layout: Layout) -> list[int]:
    """Objects that show enough, in all and apart from their parts."""
    count = layout.kind.shape[1]
    own = torch.bincount(ids.flatten().long() + 1, minlength=count + 1)[1:]
    visible = own.clone()
    parents = layout.parent[0].long()
    parts = parents >= 0
    visible.scatter_add_(0, parents[parts], own[parts])
    share = ids.numel()
    enough = (own >= LEAST_OWN * share) & (visible >= LEAST_VISIBLE * share)
    return [int(index) for index in enough.nonzero().flatten()]


def pick_point(mask: Tensor, chance: float) -> tuple[int, int]:
    """A pixel (x, y) of a mask [H, W] that has any, away from its edge where the mask is wide enough.

    ``chance`` in [0, 1) picks among the pixels farthest from the edge that erosion by a few pixels leaves.
    """
    outside = (~mask).to(torch.int32)
    for reach in (4, 2, 1, 0):
        side = 2 * reach + 1
        # How many pixels of each square window are outside, from sums over rectangles; beyond the picture all are.
        sums = F.pad(outside, (reach,) * 4, value=1).cumsum(0, dtype=torch.int32).cumsum(1, dtype=torch.int32)
        sums = F.pad(sums, (1, 0, 1, 0))
        count = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
        pixels = (count == 0).nonzero()
        if len(pixels):
            break
    row, column = pixels[int(chance * len(pixels))].tolist()
    return column, row


def _snap(point: tuple[int, int], own: Tensor, scale: float) -> tuple[int, int]:
    """The pixel of ``own`` nearest to a reference pixel's centre."""
    rows, columns = own.nonzero().unbind(1)
    x, y = ((point[0] + 0.5) * scale - 0.5), ((point[1] + 0.5) * scale - 0.5)
    nearest = int(((columns - x) ** 2 + (rows - y) ** 2).argmin())
    return int(columns[nearest]), int(rows[nearest])
