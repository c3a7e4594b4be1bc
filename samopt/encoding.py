"""Images through the image encoder, in batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.preprocess import encoder_input


def encode(
    model: nn.Module, images: Iterable[Tensor], batch_size: int, *, fill: bool = False
) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Encodes images, of any sizes, as they are asked for.

    Args:
        model: a Sam.
        images: RGB uint8 [H, W, 3] each.
        batch_size: how many to encode together.
        fill: fill the last batch up with empty images, so that all are of one size. Kernels are chosen by size, and
            another may round differently: with this, what an image gets does not depend on how many there are.

    Yields:
        Of each image its features [C, h, w], and the size (h, w) that it has in the model's input.

    Raises:
        InvalidInput: an image too narrow for the model.
    """
    encoder: Any = model.image_encoder
    waiting = iter(images)
    while inputs := [encoder_input(model, image) for image in itertools.islice(waiting, batch_size)]:
        pixels = torch.cat([batch for batch, _ in inputs])
        if fill and len(pixels) < batch_size:
            pixels = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, batch_size - len(pixels)))
        yield from zip(encoder(pixels)[: len(inputs)], (size for _, size in inputs), strict=True)
