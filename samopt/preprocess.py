"""From a picture to the pixels an image encoder takes: resized, normalised, padded.

Meta's SamPredictor resizes by PIL on the host, one picture at a time. The same can be done where the model is. PIL
resizes bilinearly with antialiasing, first along rows, then along columns, and rounds to 8 bits after each. One pass
in float32 that rounds at the end differs in 10 to 25 % of the values by one level; two passes with their rounding do in
up to 0.6 %, where a sum in another precision ends up on the other side of a half.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.errors import InvalidInput

ATTRIBUTE = "_samopt_preprocess"  # on a Sam whose pictures are to be resized on its device: DEVICE
DEVICE = "device"


def resized_shape(height: int, width: int, img_size: int) -> tuple[int, int]:
    """The size (h, w) at which a model sees a picture, its longest side `img_size`: ResizeLongestSide's own.

    Raises:
        InvalidInput: so narrow a picture that nothing of it is left.
    """
    from segment_anything.utils.transforms import ResizeLongestSide

    h, w = ResizeLongestSide.get_preprocess_shape(height, width, img_size)
    if 0 in (h, w):
        raise InvalidInput(f"{width} x {height} pixels are too narrow, the model would see nothing")
    return h, w


def encoder_input(model: nn.Module, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The pixels that the image encoder of `model` takes, made as the model is to have them made.

    Args:
        model: a Sam; where the pass `DevicePreprocess` was applied, its device resizes, elsewhere PIL on the host, as
            SamPredictor does.
        image: RGB uint8 [H, W, 3] or [B, H, W, 3], on any device.

    Returns:
        float32 [B, 3, img_size, img_size] on the model's device, and the size (h, w) of what is not padding.

    Raises:
        InvalidInput: not such an image, or too narrow a one.
    """
    sam: Any = model
    batch = _batch(image)
    if resizes_on_device(model):
        return preprocess(batch.to(sam.device), sam.image_encoder.img_size, sam.pixel_mean, sam.pixel_std)
    resized = torch.stack([resize_on_host(model, picture) for picture in batch.cpu()])
    size = resized.shape[1], resized.shape[2]
    return sam.preprocess(resized.to(sam.device).permute(0, 3, 1, 2).contiguous()), size


def resizes_on_device(model: nn.Module) -> bool:
    """Whether `DevicePreprocess` was applied to a model."""
    return bool(vars(model).get(ATTRIBUTE) == DEVICE)


def resize_on_host(model: nn.Module, image: Tensor) -> Tensor:
    """What the host does of `encoder_input`, ahead of it; `encoder_input` takes the result like the image.

    Args:
        model: a Sam.
        image: RGB uint8 [H, W, 3], on the CPU.

    Returns:
        The image, its longest side as long as the model takes it; as it is where the model's device is to resize it.

    Raises:
        InvalidInput: too narrow an image.
    """
    from segment_anything.utils.transforms import ResizeLongestSide

    encoder: Any = model.image_encoder
    size = image.shape[0], image.shape[1]
    if resizes_on_device(model) or size == resized_shape(*size, encoder.img_size):
        return image
    return torch.from_numpy(ResizeLongestSide(encoder.img_size).apply_image(image.numpy()))


@torch.no_grad()
def preprocess(image: Tensor, img_size: int, pixel_mean: Tensor, pixel_std: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Resizes, normalises and pads a picture where it is, without waiting for the device.

    Args:
        image: RGB uint8 [H, W, 3], or a batch of one size [B, H, W, 3], on the device of the mean.
        img_size: side of the encoder's square input; the picture's longest side becomes as long.
        pixel_mean: float32 [3, 1, 1], as a Sam has it.
        pixel_std: likewise.

    Returns:
        (resized - mean) / std, zero to the right of it and below: float32 [3, img_size, img_size], or
        [B, 3, img_size, img_size]; and the size (h, w) of what is not padding.

    Raises:
        InvalidInput: not such an image, or too narrow a one; an image on another device than the mean.
    """
    batch = _batch(image)
    if image.device != pixel_mean.device:
        raise InvalidInput(
            f"the image is on {image.device} and the mean on {pixel_mean.device}: move one by .to(device)"
        )
    _, height, width, _ = batch.shape
    h, w = resized_shape(height, width, img_size)
    resized = resize(batch.permute(0, 3, 1, 2), (h, w))
    pixels = torch.zeros(len(batch), 3, img_size, img_size, dtype=torch.float32, device=image.device)
    seen = pixels[..., :h, :w]
    torch.sub(resized, pixel_mean, out=seen).div_(pixel_std)
    return pixels.reshape(*image.shape[:-3], *pixels.shape[1:]), (h, w)


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes as PIL's bilinear filter does, within one level.

    Args:
        image: uint8 [B, C, H, W].
        size: (h, w) to make of it.

    Returns:
        [B, C, h, w] of whole numbers from 0 to 255: uint8 on a CPU, whose kernel for uint8 computes in integers as PIL
        does, several times faster than PIL; elsewhere, where there is none, float32.
    """
    if image.shape[2:] == size:
        return image
    if image.device.type == "cpu":
        return F.interpolate(image, size, mode="bilinear", antialias=True)
    return resize_in_float32(image, size)


def resize_in_float32(image: Tensor, size: tuple[int, int]) -> Tensor:
    """`resize` on any device, in float32 throughout."""
    pixels = image.to(torch.float32, memory_format=torch.contiguous_format)
    for step in ((image.shape[2], size[1]), size):  # along rows, then along columns
        if pixels.shape[2:] != step:
            pixels = F.interpolate(pixels, step, mode="bilinear", antialias=True)
            pixels.add_(0.5).floor_()  # halves up, as PIL; round() would make halves even
    return pixels


def _batch(image: Tensor) -> Tensor:
    """The image as a batch of one, or the batch that it is."""
    if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
        found = f"{image.dtype} {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise InvalidInput(f"an image must be a uint8 tensor [H, W, 3] or [B, H, W, 3], not {found}; see as_rgb")
    if 0 in image.shape:
        raise InvalidInput(f"the image is empty, {list(image.shape)}")
    return image if image.ndim == 4 else image[None]
