"""The crops that automatic mask generation looks at one by one, and the points it prompts with on each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, the last two exclusive

NEAR = 20  # pixels: a mask whose box ends so close to the edge of a crop is taken to be cut off by it


def unit_grid(side: int) -> NDArray[np.float64]:
    """`side` x `side` points (x, y), evenly over the unit square, row by row, [N, 2].

    They are Meta's to the last bit, so that prompts are the same.
    """
    axis = np.linspace(1 / (2 * side), 1 - 1 / (2 * side), side)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def crop_boxes(size: tuple[int, int], layers: int, overlap_ratio: float) -> Iterator[tuple[int, Box]]:
    """Layers and boxes of the crops of an image: first the whole of it, layer 0, then 4**i crops of layer i.

    Args:
        size: of the image (H, W). Where it has fewer pixels than a layer has crops, crops without a pixel are left out.
        layers: how many layers to make besides the whole image.
        overlap_ratio: 0 to 1, of the image's short side, by which crops of layer 1 overlap; half of it in layer 2, ….
    """
    height, width = size
    yield 0, (0, 0, width, height)
    for layer in range(1, layers + 1):
        side = 2**layer
        overlap = int(overlap_ratio * min(size) * (2 / side))
        across, down = (math.ceil((overlap * (side - 1) + length) / side) for length in (width, height))
        for column, row in itertools.product(range(side), repeat=2):
            x0, y0 = column * (across - overlap), row * (down - overlap)
            box = (x0, y0, min(x0 + across, width), min(y0 + down, height))
            if box[2] > x0 and box[3] > y0:
                yield layer, box


def cut_off(boxes: Tensor, crop: Box, size: tuple[int, int]) -> Tensor:
    """Which masks of a crop its edge may have cut off: their boxes end near it, and not near the image's edge.

    Args:
        boxes: [N, 4] in the image's frame.
        crop: the crop.
        size: the image's (H, W).

    Returns:
        bool [N].
    """
    height, width = size
    near = [
        (abs(boxes[:, side] - edge) <= NEAR) & (abs(boxes[:, side] - border) > NEAR)
        for side, (edge, border) in enumerate(zip(crop, (0, 0, width, height), strict=True))
    ]
    return torch.stack(near).any(0)
