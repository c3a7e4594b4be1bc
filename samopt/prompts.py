"""The prompts accuracy is measured with: every kind SAM takes, fixed for a picture, made from its masks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

KINDS = ("point", "points", "single", "box", "box+point", "mask")


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one kind for one picture, one per object, in the model's input frame.

    Attributes:
        kind: one of KINDS.
        multimask: whether three masks are asked for, or one.
        points: float32 [B, K, 2] as (x, y), or None.
        labels: int32 [B, K], 1 for a point on the object and 0 for one beside it, or None.
        boxes: float32 [B, 4] as (x0, y0, x1, y1), or None.
        masks: low-resolution logits float32 [B, 1, h, w], or None.
    """

    kind: str
    multimask: bool
    points: Tensor | None = None
    labels: Tensor | None = None
    boxes: Tensor | None = None
    masks: Tensor | None = None

    def to(self, device: torch.device) -> PromptBatch:
        """The same prompts on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def split(self, count: int) -> list[PromptBatch]:
        """The same prompts in batches of at most `count`."""
        length = next(len(t) for t in (self.points, self.boxes, self.masks) if t is not None)
        return [self._each(operator.itemgetter(slice(i, i + count))) for i in range(0, length, count)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> PromptBatch:
        points, labels, boxes, masks = (
            None if tensor is None else change(tensor) for tensor in (self.points, self.labels, self.boxes, self.masks)
        )
        return replace(self, points=points, labels=labels, boxes=boxes, masks=masks)


def choose_objects(masks: NDArray[np.bool_], count: int) -> NDArray[np.intp]:
    """Indices of at most `count` non-empty masks, evenly spread from the smallest to the largest."""
    areas = masks.sum(axis=(1, 2))
    order = np.argsort(areas, kind="stable")
    order = order[areas[order] > 0]
    return order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]


def make_prompts(
    masks: NDArray[np.bool_], points: NDArray[np.float64] | None, to_input: Callable[[NDArray[np.float64]], Tensor]
) -> list[PromptBatch]:
    """The prompts of every kind but "mask", which needs a model's logits.

    Args:
        masks: the objects, bool [B, H, W], none of them empty.
        points: a point (x, y) on each, float [B, 2]; None for each mask's innermost pixel.
        to_input: takes points [..., 2] in pixels to float32 points of the same shape in the model's input frame.
    """
    first = np.stack([innermost(mask) for mask in masks]) if points is None else points
    pairs = [_inside_and_beside(mask, seed) for seed, mask in enumerate(masks)]
    several = np.stack([np.stack([point, *pair]) for point, pair in zip(first, pairs, strict=True)])
    boxes = to_input(np.stack([box_of(mask) for mask in masks]).reshape(-1, 2, 2)).reshape(-1, 4)
    one, three = to_input(first[:, None]), to_input(several)
    positive = torch.ones(one.shape[:2], dtype=torch.int32)
    signs = torch.tensor([[1, 1, 0]], dtype=torch.int32).expand(len(masks), -1).contiguous()
    return [
        PromptBatch("point", True, points=one, labels=positive),
        PromptBatch("points", True, points=three, labels=signs),
        PromptBatch("single", False, points=one, labels=positive),
        PromptBatch("box", False, boxes=boxes),
        PromptBatch("box+point", False, points=one, labels=positive, boxes=boxes),
    ]


def point_grid(size: tuple[int, int], side: int) -> NDArray[np.float64]:
    """`side` x `side` points (x, y) in pixels, evenly over a picture of `size` (H, W), [N, 2]."""
    axis = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(axis * size[1], axis * size[0]), axis=-1).reshape(-1, 2)


def innermost(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The pixel (x, y) of a non-empty mask [H, W] that is farthest from its outside and from the picture's border."""
    x0, y0, x1, y1 = box_of(mask).astype(int)
    distance = ndimage.distance_transform_edt(np.pad(mask[y0 : y1 + 1, x0 : x1 + 1], 1))[1:-1, 1:-1]
    y, x = np.unravel_index(distance.argmax(), distance.shape)
    return np.array([x0 + x, y0 + y], dtype=np.float64)


def box_of(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The box (x0, y0, x1, y1) around a non-empty mask [H, W], in pixels, all four inclusive."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1], rows[-1]], dtype=np.float64)


def _inside_and_beside(mask: NDArray[np.bool_], seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A pixel on the object and one beside it but near, at random; where it fills its surroundings, any pixel."""
    random = np.random.default_rng(seed)
    x0, y0, x1, y1 = box_of(mask).astype(int)
    margin_x, margin_y = (x1 - x0) // 4 + 1, (y1 - y0) // 4 + 1
    left, top = max(0, x0 - margin_x), max(0, y0 - margin_y)
    around = mask[top : y1 + margin_y + 1, left : x1 + margin_x + 1]

    def pick(candidates: NDArray[np.bool_]) -> NDArray[np.float64]:
        pixels = np.argwhere(candidates if candidates.any() else np.ones_like(candidates))
        y, x = pixels[random.integers(len(pixels))]
        return np.array([left + x, top + y], dtype=np.float64)

    return pick(around), pick(~around)
