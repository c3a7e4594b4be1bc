from __future__ import annotations

from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam

from samopt import AutomaticMaskGenerator, Sample
from samopt.encoding import encode
from samopt.preprocess import encoder_input


@pytest.fixture
def sizes(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that the encoder gets."""
    seen: list[int] = []
    original = sam.image_encoder.forward

    def counted(x: torch.Tensor) -> Any:
        seen.append(len(x))
        return original(x)

    monkeypatch.setattr(sam.image_encoder, "forward", counted)
    return seen


@pytest.mark.parametrize(("fill", "expected"), [(False, [2, 1]), (True, [2, 2])])
def test_batches_are_filled_up_where_asked(
    sam: Sam, pictures: list[Sample], sizes: list[int], fill: bool, expected: list[int]
) -> None:
    images = [torch.from_numpy(picture.image) for picture in [*pictures, pictures[0]]]
    with torch.no_grad():
        found = list(encode(sam, images, 2, fill=fill))
        assert sizes == expected
        for image, (features, size) in zip(images, found, strict=True):
            pixels, seen = encoder_input(sam, image)
            assert size == seen
            torch.testing.assert_close(features[None], sam.image_encoder(pixels))


def test_images_are_encoded_as_they_are_asked_for(sam: Sam, pictures: list[Sample], sizes: list[int]) -> None:
    images = (torch.from_numpy(pictures[index % 2].image) for index in range(1_000_000))
    with torch.no_grad():
        next(encode(sam, images, 3))
    assert sizes == [3]


def test_the_mask_generator_fills_batches_of_views(sam: Sam, pictures: list[Sample], sizes: list[int]) -> None:
    generator = AutomaticMaskGenerator(sam, points_per_side=2, crop_n_layers=1, views_per_batch=4)
    generator.generate_batch([picture.image for picture in pictures])
    assert sizes == [4, 4, 4], "two images and eight crops"
