"""What users pass as a picture, as RGB with 8 bits a channel: files, PIL images, arrays, tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from PIL.Image import Image


def as_rgb(image: Any, name: str = "image") -> Tensor:
    """A picture as RGB.

    Args:
        image: a path, read as `read_file` does; a PIL image, likewise; an array or tensor, uint8: RGB [H, W, 3], RGBA
            [H, W, 4], whose transparency is dropped, or grey [H, W]. A tensor may be RGB [3, H, W] too: it is taken
            as that where its last dimension is not 3.
        name: what to call it in messages; a path is called by itself.

    Returns:
        uint8 [H, W, 3], on the device of a tensor, on the CPU otherwise. It may share the memory of `image`.

    Raises:
        InvalidInput: no picture, an empty one, one that is not of 8 bits, or several.
    """
    if isinstance(image, (str, Path)):
        return torch.from_numpy(read_file(image))
    if hasattr(image, "convert"):  # a PIL image
        return torch.from_numpy(read_pil(image, name))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        # torch knows no negative strides, such as those of image[..., ::-1]
        pixels = torch.from_numpy(writable(np.ascontiguousarray(image)))
    elif isinstance(image, Tensor) and image.dtype == torch.uint8:
        pixels = image.permute(1, 2, 0) if image.ndim == 3 and len(image) == 3 and image.shape[2] != 3 else image
    else:
        raise _no_picture(image, name)
    if pixels.ndim == 2:
        pixels = pixels[..., None].expand(-1, -1, 3)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise _no_picture(image, name)
    if 0 in pixels.shape:
        raise InvalidInput(f"{name}: the image is empty, {list(image.shape)}")
    return pixels[..., :3]


def writable(value: Any) -> Any:
    """A copy of an array that must not be written to, of which PyTorch warns; anything else as it is.

    `np.asarray` of a PIL image gives such an array.
    """
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


def read_file(path: str | Path) -> NDArray[np.uint8]:
    """Reads one picture file as RGB [H, W, 3], turned upright by its EXIF orientation, without its transparency.

    Raises:
        InvalidInput: the file is missing, is no picture that PIL reads, or one that `read_pil` refuses.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return read_pil(image, str(path))
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: there is no such image file") from error
    except InvalidInput:
        raise
    except Exception as error:  # decoders raise what they like at damaged or oversized files
        raise _unreadable(str(path), error) from error


def read_pil(image: Image, name: str = "image") -> NDArray[np.uint8]:
    """A PIL image as RGB [H, W, 3], turned upright by its EXIF orientation, without its transparency.

    Raises:
        InvalidInput: its pixels have more than 8 bits, it holds several pictures, is empty, or cannot be decoded.
    """
    try:
        pixels = _rgb(image)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error
    except Exception as error:  # PIL reads lazily, and its decoders raise all kinds of error on a damaged file
        raise _unreadable(name, error) from error
    if 0 in pixels.shape:
        raise InvalidInput(f"{name}: the image is empty, {list(pixels.shape)}")
    return pixels


def _rgb(image: Image) -> NDArray[np.uint8]:
    from PIL import ImageOps

    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a phone's JPEG: the photo, and behind it a preview or a gain map
        raise InvalidInput(f"it holds {frames} pictures; pass the one you mean")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # convert("RGB") would clip them; 12 bits kept in 16 would come out black
        raise InvalidInput(f"its pixels have more than 8 bits (PIL mode {image.mode}); scale it as you do for SAM")
    if image.mode == "P":  # by way of RGBA, as PIL warns about transparent entries of a palette otherwise
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _unreadable(name: str, error: Exception) -> InvalidInput:
    return InvalidInput(f"{name}: not a readable image ({error}); convert it to 8-bit PNG or JPEG")


def _no_picture(image: Any, name: str) -> InvalidInput:
    expected = "an image is a path, a PIL image, or uint8 RGB [H, W, 3], RGBA [H, W, 4] or grey [H, W]"
    return InvalidInput(f"{name}: {expected}, not {describe(image)}{hint(image)}")


def hint(image: Any) -> str:
    """What to do about an array or tensor that is nearly RGB [H, W, 3] with 8 bits."""
    if not isinstance(image, (np.ndarray, Tensor)):
        return ""
    shape = tuple(image.shape)
    if len(shape) == 4:
        return "; pass a list of images, not a stack"
    if len(shape) in (2, 3) and image.dtype not in (np.uint8, torch.uint8):
        return "; scale it to 0...255 and make it uint8, as you do for SAM"
    if len(shape) == 2:
        return "; repeat grey: np.stack([image] * 3, axis=-1)"
    if len(shape) == 3 and shape[2] == 4:
        return "; drop the transparency: image[..., :3]"
    if len(shape) == 3 and shape[0] == 3 and shape[2] != 3:
        return "; put the colours last: image.transpose(1, 2, 0)"
    return ""


def describe(value: Any) -> str:
    """An array or tensor by dtype and shape, anything else by its type."""
    if isinstance(value, Tensor):
        return f"Tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
