"""What users pass as a picture; how PIL's modes are read is in test_samples.py, which shares the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from samopt import InvalidInput
from samopt.images import as_rgb
from tests.numerics import read_only

PICTURE: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
TENSOR = torch.from_numpy(PICTURE)
GREY = PICTURE[..., 0]
TURNED = 6  # EXIF: rotate clockwise to see it upright


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda path: path,
        str,
        Image.open,
        lambda _: Image.fromarray(PICTURE),
        lambda _: PICTURE,
        lambda _: PICTURE[..., ::-1].copy()[..., ::-1],  # BGR turned to RGB: a negative stride
        lambda _: read_only(PICTURE),
        lambda _: read_only(PICTURE[..., ::-1])[..., ::-1],
        lambda _: np.asarray(Image.fromarray(PICTURE)),
        lambda _: np.dstack([PICTURE, GREY]),
        lambda _: TENSOR,
        lambda _: TENSOR.permute(2, 0, 1),
        lambda _: TENSOR.permute(2, 0, 1).contiguous(),
    ],
)
def test_every_form_of_one_picture(tmp_path: Path, wrap: Callable[[Path], Any]) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    pixels = as_rgb(wrap(tmp_path / "picture.png"))
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, TENSOR)


def test_only_an_array_that_must_not_be_written_to_is_copied() -> None:
    assert as_rgb(PICTURE).data_ptr() == PICTURE.ctypes.data
    fixed = read_only(PICTURE)
    as_rgb(fixed).zero_()
    assert np.array_equal(fixed, PICTURE)


@pytest.mark.parametrize("grey", [GREY, torch.from_numpy(GREY), Image.fromarray(GREY)])
def test_grey_is_repeated(grey: Any) -> None:
    assert torch.equal(as_rgb(grey), TENSOR[..., :1].expand(5, 7, 3))


def test_where_colours_may_be_first_or_last_they_are_last() -> None:
    picture = torch.arange(3 * 4 * 3, dtype=torch.uint8).reshape(3, 4, 3)
    assert torch.equal(as_rgb(picture), picture)


def test_a_file_and_a_pil_image_are_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = TURNED
    Image.fromarray(PICTURE).save(tmp_path / "turned.png", exif=exif)
    for image in (tmp_path / "turned.png", Image.open(tmp_path / "turned.png")):
        assert torch.equal(as_rgb(image), torch.rot90(TENSOR, -1))


def test_of_a_phones_jpeg_the_photo_is_read_and_not_what_lies_behind_it(tmp_path: Path) -> None:
    photo, preview = Image.fromarray(np.full((16, 24, 3), 200, np.uint8)), Image.new("RGB", (8, 8))
    photo.save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[preview])
    with Image.open(tmp_path / "phone.jpg") as image:
        assert image.n_frames == 2  # type: ignore[attr-defined]
    assert torch.equal(as_rgb(tmp_path / "phone.jpg"), torch.full((16, 24, 3), 200, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (PICTURE.astype(np.float32), r"mine: an image is a path, .*, not float32 \[5, 7, 3\]; scale it to 0\.\.\.255"),
        (GREY.astype(np.uint16), r"not uint16 \[5, 7\]; scale it"),
        (TENSOR.float(), r"not Tensor float32 \[5, 7, 3\]; scale it"),
        (np.stack([PICTURE, PICTURE]), r"not uint8 \[2, 5, 7, 3\]; pass a list of images, not a stack"),
        (TENSOR[None], r"not Tensor uint8 \[1, 5, 7, 3\]; pass a list"),
        (PICTURE.transpose(2, 0, 1), r"not uint8 \[3, 5, 7\]; put the colours last: image\.transpose\(1, 2, 0\)"),
        (PICTURE[..., :2], r"not uint8 \[5, 7, 2\]$"),
        (PICTURE[0, 0], r"not uint8 \[3\]$"),
        (PICTURE[:0], r"mine: the image is empty, \[0, 7, 3\]"),
        (TENSOR[:, :0], r"mine: the image is empty, \[5, 0, 3\]"),
        (Image.new("RGB", (0, 4)), "mine: "),
        (Image.fromarray(GREY.astype(np.uint16)), "mine: its pixels have more than 8 bits"),
        (Image.fromarray(GREY.astype(np.float32)), "mine: its pixels have more than 8 bits"),
        ([PICTURE], "not list"),
        (None, "not NoneType"),
        ("no/such/picture.png", r"no/such/picture\.png: there is no such image file"),
        (Path("tests"), "tests: not a readable image"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_sentence(image: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        as_rgb(image, "mine")
    assert "\n" not in str(caught.value)


def test_several_pictures_in_one_file_are_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(PICTURE)] * 3
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(InvalidInput, match=r"stack\.tif: it holds 3 pictures; pass the one you mean"):
        as_rgb(tmp_path / "stack.tif")
