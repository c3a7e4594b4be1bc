"""Models of every size are built anew from what was read off them; no other is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from segment_anything import sam_model_registry
from segment_anything.modeling import Sam
from torch import nn

from samopt import SavedModelError
from samopt.geometry import Geometry
from samopt.module_form import difference
from tests.models import random_sam


@pytest.mark.parametrize("model_type", ["vit_b", "vit_l", "vit_h"])
def test_metas_models(model_type: str) -> None:
    with torch.device("meta"):
        sam = sam_model_registry[model_type]()
    assert difference(sam, Geometry.of(sam).build()) is None


@pytest.mark.parametrize(
    "build",
    [
        random_sam,
        lambda: random_sam(qkv_bias=False, rel_pos=False),
        lambda: random_sam(img_size=128, width=128, heads=2, depth=3, window=0, global_blocks=()),
        lambda: random_sam(decoder_width=128, global_blocks=(0,), window=3),
    ],
)
def test_other_sizes(build: Callable[[], Sam]) -> None:
    sam = build()
    assert difference(sam, Geometry.of(sam).build()) is None


def test_the_embedded_model_and_what_its_user_set(tiny256: Sam) -> None:
    assert difference(tiny256, Geometry.of(tiny256).build()) is None
    sam = random_sam()
    sam.mask_threshold, sam.image_format = 0.25, "BGR"
    sam.pixel_mean += 0.1
    built = Geometry.of(sam).build()
    assert (built.mask_threshold, built.image_format) == (0.25, "BGR")
    assert torch.equal(built.pixel_mean, sam.pixel_mean)


def test_an_optimised_model_is_of_the_same_geometry(tiny256: Sam, optimised: Callable[[str], Sam]) -> None:
    assert Geometry.of(optimised("fast")) == Geometry.of(tiny256)


def test_another_class_is_refused(sam: Sam) -> None:
    class Relative(type(sam.image_encoder)):  # type: ignore[misc]
        pass

    sam.image_encoder.__class__ = Relative
    with pytest.raises(SavedModelError, match="its image encoder is a Relative, not segment_anything's ImageEncoderVi"):
        Geometry.of(sam)


def test_another_layout_is_refused(sam: Sam) -> None:
    sam.image_encoder.neck = nn.Sequential(nn.Identity())
    with pytest.raises(SavedModelError, match="not built as segment_anything builds a Sam: 'Identity' object has no"):
        Geometry.of(sam)
