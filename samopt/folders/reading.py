"""Images read ahead of the model, by threads: a picture, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.errors import InvalidInput, SamoptError, first_line
from samopt.images import read_file
from samopt.preprocess import resize_on_host, resized_shape


@dataclass(frozen=True, eq=False)
class Picture:
    """An image of a shard.

    Attributes:
        index: its number among all images.
        path: where it is.
        size: (H, W) in pixels; None where it could not be read.
        pixels: RGB uint8, [H, W, 3] or as small as the model sees it; None where it could not be read.
        error: why it could not be read, or not be worked on; "" otherwise.
    """

    index: int
    path: str
    size: tuple[int, int] | None = None
    pixels: Tensor | None = field(default=None, repr=False)
    error: str = ""


def read_picture(index: int, path: str, model: nn.Module, *, whole: bool) -> Picture:
    """Reads an image; never raises for one that cannot be read.

    Args:
        index: its number.
        path: where it is.
        model: the Sam that is to see it.
        whole: leave it at its size; otherwise what the host does for the model is done here.
    """
    try:
        pixels = _read(path)
        size = pixels.shape[0], pixels.shape[1]
        resized_shape(*size, model.image_encoder.img_size)  # type: ignore[union-attr, arg-type]
        tensor = torch.from_numpy(pixels)
        if not whole:
            tensor = resize_on_host(model, tensor)
        if torch.device(str(model.device)).type == "cuda":
            tensor = tensor.pin_memory()  # the copy to the GPU then waits for nothing
    except SamoptError as error:
        return Picture(index, path, error=str(error).removeprefix(f"{path}: "))
    except Exception as error:  # a file system may raise what it likes, and there may be no memory for it
        return Picture(index, path, error=first_line(error))
    return Picture(index, path, size, tensor)


def _read(path: str) -> NDArray[np.uint8]:
    from PIL import Image

    most = Image.MAX_IMAGE_PIXELS
    try:
        with Image.open(path) as image:
            pixels = image.width * image.height
    except Exception:  # to be named by what reads all of it
        pixels = 0
    if most is not None and pixels > most:
        raise InvalidInput(f"{pixels:,} pixels, more than PIL.Image.MAX_IMAGE_PIXELS, {most:,}; scale it down")
    return read_file(path)
