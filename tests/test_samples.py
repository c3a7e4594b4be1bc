from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from samopt import InvalidInput, Sample
from samopt.samples import as_samples, image_folder, read_image, scene_samples, spread

PICTURE: NDArray[np.uint8] = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3) * 2
MASKS: NDArray[np.bool_] = np.ones((2, 5, 7), dtype=np.bool_)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(PICTURE).save(path)
    return path


# What may be passed


@pytest.mark.parametrize(
    "wrap",
    [
        lambda png: png,
        str,
        lambda png: png.parent,
        lambda png: [str(png)],
        lambda png: (png for _ in range(1)),
        lambda png: PICTURE,
        lambda png: [PICTURE],
        lambda png: Image.fromarray(PICTURE),
        lambda png: [Image.open(png)],
        lambda png: Sample(PICTURE),
        lambda png: (Sample(PICTURE),),
    ],
)
def test_folders_files_arrays_pil_images_samples_and_lists_of_them(png: Path, wrap: Callable[[Path], Any]) -> None:
    (sample,) = as_samples(wrap(png))
    assert sample.masks is None
    assert np.array_equal(sample.image, PICTURE)


def test_a_mixed_list_keeps_its_order_and_a_sample_its_masks(png: Path) -> None:
    masked = Sample(PICTURE[:, ::-1], MASKS, np.zeros((2, 2)), name="mine")
    first, second, third = as_samples([png, masked, PICTURE // 2])
    assert first.name == str(png)
    assert second is masked
    assert third.name == "sample 2"


def test_a_folder_is_read_in_the_order_of_names_and_only_its_pictures(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "c.webp"):
        Image.fromarray(PICTURE).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / "d").mkdir()
    assert [Path(sample.name).name for sample in image_folder(tmp_path)] == ["a.jpg", "b.PNG", "c.webp"]
    assert [Path(sample.name).name for sample in image_folder(tmp_path, limit=2)] == ["a.jpg", "c.webp"]


def test_drawn_scenes_are_always_the_same_and_have_truth() -> None:
    (scene, other), (again,) = scene_samples(2, size=96), scene_samples(1, size=96)
    assert scene.name != other.name
    assert not np.array_equal(scene.image, other.image)
    assert scene.image.shape == (96, 96, 3)
    assert np.array_equal(scene.image, again.image)
    assert scene.masks is not None
    assert again.masks is not None
    assert np.array_equal(scene.masks, again.masks)
    assert scene.points is not None
    x, y = scene.points.astype(int).T
    assert scene.masks[np.arange(len(x)), y, x].all(), "each point lies on its object"


def test_spread_takes_first_and_last_and_no_more_than_there_are() -> None:
    samples = [Sample(PICTURE, name=str(index)) for index in range(7)]
    assert [sample.name for sample in spread(samples, 3)] == ["0", "3", "6"]
    assert spread(samples, 9) == samples


# What may not


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples is empty"),
        (PICTURE.astype(np.float32), r"sample 0: an image must be a uint8 array .*, not float32 \[5, 7, 3\]"),
        ([PICTURE, PICTURE[..., 0]], r"sample 1: an image must be .*, not uint8 \[5, 7\]"),
        (PICTURE.transpose(2, 0, 1), r"not uint8 \[3, 5, 7\]"),
        (np.stack([PICTURE, PICTURE]), r"not uint8 \[2, 5, 7, 3\]"),
        (PICTURE[:0], r"sample 0: the image is empty, \[0, 7, 3\]"),
        ([torch.zeros(5, 7, 3, dtype=torch.uint8)], "sample 0: an image must be .*, not Tensor"),
        (3, "sample 0: an image must be .*, not int"),
        ("no/such/picture.png", r"no/such/picture\.png: there is no such image file"),
        ([Path("no/such/picture.png")], r"no/such/picture\.png: there is no such image file"),
    ],
)
def test_what_is_no_picture_is_named(samples: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        as_samples(samples)


@pytest.mark.parametrize(
    ("masks", "points", "message"),
    [
        (MASKS.astype(np.uint8), None, r"mine: masks must be a bool array \[N, 5, 7\], not uint8 \[2, 5, 7\]"),
        (MASKS[0], None, r"not bool \[5, 7\]"),
        (MASKS[:, :4], None, r"not bool \[2, 4, 7\]"),
        ([[True]], None, "mine: masks must be a bool array .*, not list"),
        (MASKS, np.zeros((3, 2)), r"mine: points must be one \(x, y\) per mask, not float64 \[3, 2\]"),
        (None, np.zeros((2, 2)), "points must be one"),
        (MASKS, np.array([[0.0, 0.0], [6.0, 9.0]]), "mine: points must lie in the picture, 7 x 5 pixels"),
        (MASKS, np.array([[0.0, 0.0], [-1.0, 2.0]]), "points must lie in the picture"),
        (MASKS, np.array([[0.0, 0.0], [np.nan, 2.0]]), "points must lie in the picture"),
    ],
)
def test_masks_and_points_must_fit_the_picture(masks: Any, points: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Sample(PICTURE, masks, points, name="mine")


def test_empty_and_missing_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    for read in (as_samples, image_folder):
        with pytest.raises(InvalidInput, match=rf"{tmp_path}: no image in this folder \(looked for \.bmp"):
            read(tmp_path)
    with pytest.raises(InvalidInput, match="gone: there is no such folder"):
        image_folder(tmp_path / "gone")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".webp", ".bmp"])
@pytest.mark.parametrize("damage", ["text", "empty", "truncated", "header"])
def test_a_damaged_picture_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"broken{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(
        {"text": b"hello", "empty": b"", "truncated": whole[: len(whole) // 2], "header": whole[:20]}[damage]
    )
    for samples in (path, tmp_path, [path]):
        with pytest.raises(InvalidInput, match=rf"{path}: not a readable image \(.*convert it to"):
            as_samples(samples)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"{tmp_path}: not a readable image"):
        read_image(tmp_path)


# How colours are read


def test_a_photo_is_turned_upright_by_its_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees to see it upright
    Image.fromarray(PICTURE).save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "turned.png").image, np.rot90(PICTURE, -1))


GREY: NDArray[np.uint8] = PICTURE[..., 0]
GREY_RGB = np.repeat(GREY[..., None], 3, axis=2)


@pytest.mark.parametrize(
    ("mode", "rgb"),
    [
        ("L", GREY_RGB),
        ("LA", GREY_RGB),
        ("1", np.where(GREY_RGB >= 128, 255, 0)),
        ("RGBA", PICTURE),
        ("P", PICTURE),
        ("CMYK", PICTURE),
    ],
)
@pytest.mark.parametrize("suffix", [None, ".png", ".tif"])
def test_every_common_mode_becomes_rgb(tmp_path: Path, mode: str, rgb: NDArray[Any], suffix: str | None) -> None:
    if mode == "P":
        image = Image.fromarray(PICTURE).quantize(64)  # more entries than the picture has colours
    elif mode == "1":
        image = Image.fromarray(GREY).convert("1", dither=Image.Dither.NONE)
    else:
        image = Image.fromarray(GREY if mode in ("L", "LA") else PICTURE).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(128)
    if mode == "CMYK" and suffix == ".png":  # which it cannot hold
        suffix = ".tiff"
    if suffix is not None:
        image.save(tmp_path / f"picture{suffix}")
    (sample,) = as_samples(image if suffix is None else tmp_path)
    assert np.array_equal(sample.image, rgb)


def test_a_palette_with_transparent_entries_is_read_without_a_warning(tmp_path: Path) -> None:
    palette = Image.fromarray(PICTURE).quantize(64)
    palette.save(tmp_path / "palette.png", transparency=bytes([0, 128] + [255] * 62))
    (sample,) = as_samples(tmp_path)
    assert np.array_equal(sample.image, PICTURE)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cell{suffix}"
    Image.fromarray(np.full((20, 30), 4000, np.uint16)).save(path)
    with pytest.raises(InvalidInput, match=r"more than 8 bits .*scale it as you do for SAM"):
        read_image(path)


def test_a_stack_of_pictures_is_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(PICTURE)] * 5
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(InvalidInput, match="it holds 5 pictures"):
        read_image(tmp_path / "stack.tif")


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(tmp_path: Path, dtype: type[np.generic]) -> None:
    path = tmp_path / "numbers.tif"
    Image.fromarray(GREY.astype(dtype)).save(path)
    with pytest.raises(InvalidInput, match=f"{path}: .*more than 8 bits"):
        as_samples(path)
    with pytest.raises(InvalidInput, match=r"sample 0: .*more than 8 bits"):
        as_samples([Image.open(path)])


def test_a_decompression_bomb_is_an_unreadable_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(InvalidInput, match=r"large.png: not a readable image"):
        read_image(tmp_path / "large.png")
