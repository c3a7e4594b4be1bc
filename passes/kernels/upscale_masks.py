"""SAM's upscaling of masks in one step, as an operator: `torch.ops.samopt.upscale_masks`; and what is told of masks
without making them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from samopt.passes.kernels.devices import upload

TAPS = 3
FARTHEST = 2**31 - 1
# Of the kernels: the lines of logits that a program goes down, and the pixels that it makes at once.
LINES, BLOCK_Y, UPSCALED_X, MEASURED_X = 16, 8, 256, 128


@dataclass(frozen=True)
class Frame:
    """From what size to what size masks are upscaled.

    Attributes:
        img_size: side of the model's square.
        input_size: (h, w) of the image in it, without padding.
        original_size: (H, W) of the image.
    """

    img_size: int
    input_size: tuple[int, int]
    original_size: tuple[int, int]


@torch.library.custom_op("samopt::upscale_masks", mutates_args=(), device_types="cpu")
def upscale_masks(logits: Tensor, img_size: int, input_size: Sequence[int], original_size: Sequence[int]) -> Tensor:
    """Masks at the size of their image, as `Sam.postprocess_masks` makes them.

    Args:
        logits: of low resolution, float [N, h, w], no less than 3 x 3.
        img_size: side of the model's square.
        input_size: (h, w) of the image in it, without padding.
        original_size: (H, W) of the image.

    Returns:
        float32 [N, H, W].
    """
    square = F.interpolate(logits[None].float(), (img_size, img_size), mode="bilinear", align_corners=False)
    seen = square[..., : input_size[0], : input_size[1]]
    return F.interpolate(seen, tuple(original_size), mode="bilinear", align_corners=False)[0]


@upscale_masks.register_fake
def _(logits: Tensor, img_size: int, input_size: Sequence[int], original_size: Sequence[int]) -> Tensor:
    return logits.new_empty((len(logits), *original_size), dtype=torch.float32)


@upscale_masks.register_kernel("cuda")
def _(logits: Tensor, img_size: int, input_size: Sequence[int], original_size: Sequence[int]) -> Tensor:
    frame = Frame(img_size, (input_size[0], input_size[1]), (original_size[0], original_size[1]))
    return launch(logits, frame)


def launch(logits: Tensor, frame: Frame, threshold: float | None = None, valid: Tensor | None = None) -> Tensor:
    """Runs the kernel.

    Args:
        logits: of low resolution, float [N, h, w].
        frame: the sizes.
        threshold: where a mask begins; None for logits.
        valid: which masks are wanted, bool [N]; the others hold anything.

    Returns:
        bool [N, H, W], or float32 where there is no threshold.
    """
    from samopt.passes.kernels.mask_upscaling import upscale

    logits = logits.contiguous()
    (N, h, w), (H, W) = logits.shape, frame.original_size
    out = logits.new_empty((N, H, W), dtype=torch.float32 if threshold is None else torch.bool)
    programs = N * -(-(h - TAPS + 1) // LINES) * -(-W // UPSCALED_X)
    if programs:
        with torch.cuda.device_of(logits):
            upscale[(programs,)](
                logits, *_taps((h, w), frame, logits.device), valid, out, threshold or 0.0, h, w, H, W,
                threshold is not None, LINES, BLOCK_Y, UPSCALED_X,
            )  # fmt: skip
    return out


def measure(logits: Tensor, frame: Frame, threshold: float, offset: float, valid: Tensor) -> Tensor:
    """What is told of masks, on a GPU, without making them.

    Args:
        logits: of low resolution, float [N, h, w].
        frame: the sizes.
        threshold: where a mask begins.
        offset: how far it is moved for the first two numbers.
        valid: which masks are wanted, bool [N]; of the others nothing is computed.

    Returns:
        int32 [N, 6]: the pixels above the threshold moved up, and moved down; and the box (x0, y0, x1, y1) around the
        mask, all four inclusive. All zeros where nothing is.
    """
    from samopt.passes.kernels import mask_upscaling

    logits = logits.contiguous()
    (N, h, w), W = logits.shape, frame.original_size[1]
    found = logits.new_zeros((N, 6), dtype=torch.int32)
    found[:, 2:4] = FARTHEST
    found[:, 4:] = -1
    programs = N * -(-(h - TAPS + 1) // LINES)
    if programs:
        with torch.cuda.device_of(logits):
            mask_upscaling.measure[(programs,)](
                logits, *_taps((h, w), frame, logits.device), valid, found, threshold, offset, h, w, W,
                LINES, BLOCK_Y, MEASURED_X,
            )  # fmt: skip
    found[:, 2:] *= found[:, 4:5] >= 0
    return found


@functools.lru_cache(maxsize=64)
def _taps(low: tuple[int, int], frame: Frame, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and the columns that pixels are made of, on the device: float32 [H, 4] and [W, 4]; and of each line of
    logits that may be the first of three, and the one after, where the rows of pixels begin that it is: int32 [h - 1].
    """
    sizes = zip(low, frame.input_size, frame.original_size, strict=True)
    both = [taps(here, frame.img_size, *size) for here, *size in sizes]
    rows, columns = upload(np.concatenate(both), device).split(frame.original_size)
    starts = np.searchsorted(both[0][:, 0], np.arange(low[0] - TAPS + 2)).astype(np.int32)
    return rows, columns, upload(starts, device)


def taps(low: int, img_size: int, seen: int, size: int) -> NDArray[np.float32]:
    """What the pixels of a line are made of, of two bilinear steps as `F.interpolate` takes them without
    `align_corners`: from `low` to `img_size`, of which `seen` are kept, to `size`.

    Returns:
        float32 [size, 4]: the first of three neighbours, and the weight of each.
    """
    assert low >= TAPS
    near, share = _neighbours(size, seen)
    result = np.zeros((size, 1 + TAPS))
    first = np.minimum(_neighbours(img_size, low)[0][near[:, 0], 0], low - TAPS)
    result[:, 0] = first
    pixels, (ends, parts) = np.arange(size), _neighbours(img_size, low)
    for step in (0, 1):
        for end in (0, 1):
            index = near[:, step]
            np.add.at(result, (pixels, 1 + ends[index, end] - first), share[:, step] * parts[index, end])
    return result.astype(np.float32)


def _neighbours(size: int, source: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The two points of `source` that each of `size` points lies between, [size, 2], and their weights."""
    place = np.maximum((np.arange(size) + 0.5) * source / size - 0.5, 0)
    lower = np.minimum(place.astype(np.int64), source - 1)
    share = place - lower
    return np.stack([lower, np.minimum(lower + 1, source - 1)], axis=1), np.stack([1 - share, share], axis=1)
