"""Preprocessing where the model is, held against Meta's own: PIL's resize, then Sam.preprocess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from segment_anything.utils.transforms import ResizeLongestSide
from torch import Tensor

from samopt import InvalidInput
from samopt.preprocess import ATTRIBUTE, DEVICE, encoder_input, preprocess, resize, resize_in_float32, resized_shape
from samopt.profiling.syncs import fake_cuda, record_syncs
from samopt.samples import scene_samples
from tests.models import random_sam
from tests.numerics import assert_bit_equal

Resize = Callable[[Tensor, tuple[int, int]], Tensor]
either = pytest.mark.parametrize("resize", [resize, resize_in_float32])


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_pil(image: NDArray[np.uint8], img_size: int) -> NDArray[np.uint8]:
    resized: NDArray[np.uint8] = ResizeLongestSide(img_size).apply_image(image)
    return resized


def off(resize: Resize, image: NDArray[np.uint8], img_size: int) -> tuple[float, int]:
    """The share of values that differ from Meta's, and by how many levels at most."""
    expected = by_pil(image, img_size)
    resized = resize(torch.from_numpy(image).permute(2, 0, 1)[None], expected.shape[:2])
    difference = np.abs(resized[0].permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
    return float((difference > 0).mean()), int(difference.max())


def made(model: Any, image: NDArray[np.uint8]) -> Tensor:
    """What SamPredictor gives the image encoder for a picture."""
    seen = []
    handle = model.image_encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    SamPredictor(model).set_image(image)
    handle.remove()
    (pixels,) = seen
    assert isinstance(pixels, Tensor)
    return pixels


@pytest.mark.parametrize(
    ("height", "width", "img_size", "expected"),
    [
        (1, 1, 1024, (1024, 1024)),
        (37, 2000, 1024, (19, 1024)),
        (4000, 3000, 1024, (1024, 768)),
        (1023, 1025, 1024, (1022, 1024)),
        (1200, 1800, 1024, (683, 1024)),
        (3, 4096, 1024, (1, 1024)),
        (256, 256, 256, (256, 256)),
    ],
)
def test_a_picture_becomes_as_large_as_metas(height: int, width: int, img_size: int, expected: tuple[int, int]) -> None:
    assert resized_shape(height, width, img_size) == expected
    assert by_pil(np.zeros((height, width, 3), np.uint8), img_size).shape[:2] == expected
    image = torch.zeros(height, width, 3, dtype=torch.uint8)
    pixels, size = preprocess(image, img_size, torch.ones(3, 1, 1), torch.ones(3, 1, 1))
    assert size == expected
    assert pixels.shape == (3, img_size, img_size)
    assert (pixels != 0).nonzero().amax(dim=0).tolist() == [2, expected[0] - 1, expected[1] - 1]


@either
@pytest.mark.parametrize(
    ("height", "width", "most"),
    [
        (333, 401, 0.006),
        (700, 501, 0.006),
        (255, 257, 0.006),
        (97, 131, 0.006),
        (37, 2000, 0.01),  # few values, and nearly eight taps a value
        (1, 1, 0.0),
        (512, 384, 0.0),  # an exact half: one value in eight is a tie, rounded up
        (128, 96, 0.0),
        (256, 200, 0.0),  # not resized
    ],
)
def test_noise_of_any_size_is_resized_as_by_pil(resize: Resize, height: int, width: int, most: float) -> None:
    share, level = off(resize, noise(height, width), 256)
    assert share <= most
    assert level <= 1


@either
@pytest.mark.parametrize(("size", "height"), [(400, 291), (300, 300), (190, 131)])
def test_scenes_are_resized_as_by_pil(resize: Resize, size: int, height: int) -> None:
    (scene,) = scene_samples(1, size)
    share, level = off(resize, scene.image[:height], 256)
    assert share <= 0.006
    assert level <= 1


def test_what_was_resized_is_normalised_and_padded_as_by_metas_preprocess(sam: Sam) -> None:
    image = torch.from_numpy(noise(90, 70))
    pixels, size = preprocess(image, 64, sam.pixel_mean, sam.pixel_std)
    assert size == (64, 50)
    assert_bit_equal(pixels[None], sam.preprocess(resize(image.permute(2, 0, 1)[None], size)))
    assert pixels.dtype == torch.float32
    assert not pixels.requires_grad


def test_a_picture_of_the_models_size_is_what_sam_predictor_makes_bit_for_bit(sam: Sam) -> None:
    image = noise(64, 48)
    pixels, _ = preprocess(torch.from_numpy(image), 64, sam.pixel_mean, sam.pixel_std)
    assert_bit_equal(pixels[None], made(sam, image))


def test_a_batch_is_its_pictures(sam: Sam) -> None:
    images = torch.stack([torch.from_numpy(noise(50, 91, seed)) for seed in range(3)])
    before = images.clone()
    pixels, size = preprocess(images, 64, sam.pixel_mean, sam.pixel_std)
    singly = [preprocess(image, 64, sam.pixel_mean, sam.pixel_std) for image in images]
    assert_bit_equal(pixels, torch.stack([single for single, _ in singly]))
    assert {size} == {of for _, of in singly}
    assert torch.equal(images, before)


def test_views_are_taken_as_what_they_show(sam: Sam) -> None:
    image = torch.from_numpy(noise(90, 70))
    for view in (image.permute(2, 0, 1).contiguous().permute(1, 2, 0), image[..., :1].expand(-1, -1, 3), image[::2]):
        ours, theirs = (preprocess(x, 64, sam.pixel_mean, sam.pixel_std)[0] for x in (view, view.contiguous()))
        assert_bit_equal(ours, theirs)


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
@pytest.mark.parametrize("shape", [(90, 70, 3), (2, 32, 64, 3), (64, 50, 3)])
def test_nothing_waits_for_the_gpu(sam: Sam, shape: tuple[int, ...]) -> None:
    with record_syncs() as syncs:
        mean, std = fake_cuda(sam.pixel_mean), fake_cuda(sam.pixel_std)
        pixels, _ = preprocess(fake_cuda(torch.zeros(shape, dtype=torch.uint8)), 64, mean, std)
        assert pixels.device.type == "cuda"
        assert pixels.shape == (*shape[:-3], 3, 64, 64)
    assert syncs == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(5, 7, 3), r"an image must be a uint8 tensor .*, not torch\.float32 \[5, 7, 3\]; see as_rgb"),
        (torch.zeros(3, 5, 7, dtype=torch.uint8), r"not torch\.uint8 \[3, 5, 7\]"),
        (torch.zeros(7, 3, dtype=torch.uint8), r"not torch\.uint8 \[7, 3\]"),
        (noise(5, 7), "not ndarray"),
        (torch.zeros(5, 0, 3, dtype=torch.uint8), r"the image is empty, \[5, 0, 3\]"),
        (torch.zeros(0, 5, 7, 3, dtype=torch.uint8), r"the image is empty, \[0, 5, 7, 3\]"),
        (torch.zeros(1, 500, 3, dtype=torch.uint8), "500 x 1 pixels are too narrow"),
        (torch.zeros(5, 7, 3, dtype=torch.uint8, device="meta"), "the image is on meta and the mean on cpu: move one"),
    ],
)
def test_what_cannot_be_preprocessed_is_told(sam: Sam, image: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        preprocess(image, 64, sam.pixel_mean, sam.pixel_std)


def test_a_model_takes_pictures_as_sam_predictor_gives_them_unless_told_otherwise(sam: Sam) -> None:
    image = noise(101, 77)
    expected = made(sam, image)
    pixels, size = encoder_input(sam, torch.from_numpy(image))
    assert size == (64, 49)
    assert_bit_equal(pixels, expected)

    vars(sam)[ATTRIBUTE] = DEVICE
    pixels, _ = encoder_input(sam, torch.from_numpy(image))
    assert_bit_equal(pixels[0], preprocess(torch.from_numpy(image), 64, sam.pixel_mean, sam.pixel_std)[0])
    assert not torch.equal(pixels, expected), "this picture shows who resized it"
    assert (pixels - expected).abs().max() < 1.01 / sam.pixel_std.min(), "one level"
    assert_bit_equal(made(sam, image), expected)


@pytest.mark.parametrize("where", ["", DEVICE])
def test_a_model_takes_a_batch_of_one_size(where: str) -> None:
    sam = random_sam()
    vars(sam)[ATTRIBUTE] = where
    images = torch.from_numpy(np.stack([noise(45, 80, seed) for seed in range(2)]))
    pixels, size = encoder_input(sam, images)
    assert size == (36, 64)
    assert_bit_equal(pixels, torch.cat([encoder_input(sam, image)[0] for image in images]))
    with pytest.raises(InvalidInput, match="too narrow"):
        encoder_input(sam, images[:, :1, :].expand(-1, -1, 80, -1).repeat(1, 1, 3, 1))
