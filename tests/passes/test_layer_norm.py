from __future__ import annotations

import copy
import re
from typing import Any, Literal

import pytest
import torch
from segment_anything.modeling import Sam
from segment_anything.modeling.common import LayerNorm2d
from torch import Tensor, nn

from samopt import AlreadyApplied, NoSites, Site, Skip, Unsupported
from samopt.passes import CastDtype, TritonLayerNorm, layer_norm
from tests.models import random_sam
from tests.numerics import assert_rounding

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rewritten(model: Any) -> Any:
    ours = copy.deepcopy(model)
    TritonLayerNorm()(ours)
    return ours


def reasons(model: nn.Module) -> dict[str, str]:
    """Why each block is left out."""
    return {found.fqn: found.reason for found in TritonLayerNorm().match(model) if isinstance(found, Skip)}


@torch.no_grad()
def randomise_norms(model: nn.Module) -> None:
    """Gives every layer norm a weight and a bias of its own; Meta's start with ones and zeros."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.3)
            nn.init.normal_(module.bias)


# Where it applies


def test_on_a_cpu_it_refuses() -> None:
    with pytest.raises(Unsupported, match="Triton kernels need a GPU and the model is on cpu; leave layer_norm out"):
        TritonLayerNorm()(random_sam())


def test_narrow_norms_are_skips() -> None:
    narrow, wide = random_sam(width=1024, depth=1, heads=16), random_sam(width=1280, depth=1, heads=16)
    reason = "its rows of 1024 are fast as they are, TorchInductor keeps them in registers"
    assert reasons(narrow) == {"image_encoder.blocks.0": reason}
    assert list(TritonLayerNorm().match(wide)) == [Site("image_encoder.blocks.0")]


@pytest.mark.usefixtures("kernels_anywhere")
def test_norms_wider_than_the_kernel_takes_are_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm, "WIDEST", 63)
    with pytest.raises(NoSites, match=re.escape("rewrite: its rows of 64 are wider than 63 (2 modules)")):
        TritonLayerNorm()(random_sam())


class RMSNorm(nn.LayerNorm):
    """A look-alike: a layer norm by its attributes."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("name", ["norm1", "norm2"])
@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (RMSNorm(64), "its forward is not the code of segment_anything's LayerNorm.forward"),
        (LayerNorm2d(64), "its forward is not the code of segment_anything's LayerNorm.forward"),
        (nn.Identity(), "its forward is not the code of segment_anything's LayerNorm.forward"),
        (nn.LayerNorm(64, elementwise_affine=False), "its norms are not over the last dimension alone, with weight"),
        (nn.LayerNorm(64, bias=False), "its norms are not over the last dimension alone, with weight and bias"),
        (nn.LayerNorm((4, 64)), "its norms are not over the last dimension alone, with weight and bias"),
    ],
)
def test_another_norm_is_a_skip(name: str, norm: nn.Module, reason: str) -> None:
    sam = random_sam()
    setattr(sam.image_encoder.blocks[0], name, norm)
    found = reasons(sam)
    assert found.keys() == {"image_encoder.blocks.0"}
    assert found["image_encoder.blocks.0"].startswith(reason)


@pytest.mark.usefixtures("kernels_anywhere")
def test_a_block_that_is_none_is_a_skip() -> None:
    sam = random_sam()
    sam.image_encoder.blocks[1].forward = lambda x: x
    assert reasons(sam) == {"image_encoder.blocks.1": "its forward was replaced on this module"}


# What it computes


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("img_size", "sizes", "batch"),
    [
        (80, {"window": 3}, 3),
        (80, {"window": 5, "qkv_bias": False}, 1),
        (64, {"window": 0, "width": 96, "heads": 3, "depth": 4}, 1),
    ],
)
def test_encoder_errs_like_the_unmodified_one(
    dtype: torch.dtype, img_size: int, sizes: dict[str, Any], batch: int
) -> None:
    sam = random_sam(img_size, **sizes)
    randomise_norms(sam)
    sam.image_encoder.to(dtype)
    torch.manual_seed(1)
    pixels = torch.randn(batch, 3, img_size, img_size, dtype=dtype)
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [pixels])


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_embedded_model(dtype: Literal["bfloat16", "float16"], batch: int, tiny256: Sam) -> None:
    sam = copy.deepcopy(tiny256)
    CastDtype(dtype)(sam)
    pixels = torch.rand(batch, 3, 8, 8).repeat_interleave(32, 2).repeat_interleave(32, 3) * 4 - 2
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [pixels])


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_image_size_than_the_encoder_was_made_for(dtype: torch.dtype) -> None:
    sam = random_sam(80, window=3)
    sam.image_encoder.pos_embed = None
    sam.image_encoder.to(dtype)
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [torch.randn(2, 3, 112, 64, dtype=dtype)])


class Normed(nn.Module):
    """A block's second norm, of a sum."""

    def __init__(self, block: Any, fused: bool) -> None:
        super().__init__()
        self.block, self.fused = block, fused

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        return layer_norm.add_norm(self.block, x, attended) if self.fused else self.block.norm2(x + attended)


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_alone_err_like_the_unmodified_ones(dtype: torch.dtype) -> None:
    sam = random_sam()
    randomise_norms(sam)
    sam.image_encoder.to(dtype)
    block, ours = sam.image_encoder.blocks[0], rewritten(sam).image_encoder.blocks[0]
    x, attended = (3 + torch.randn(2, 3, 4, 4, 64)).to(dtype)
    assert_rounding(block.norm1, ours.norm1, [x])
    assert_rounding(block.norm2, ours.norm2, [x])
    assert_rounding(Normed(block, False), Normed(ours, True), [x, attended])


# What goes on top of it


@pytest.mark.usefixtures("kernels_anywhere")
def test_twice_says_so() -> None:
    ours = rewritten(random_sam())
    with pytest.raises(AlreadyApplied, match="TritonLayerNorm was applied to this model already"):
        TritonLayerNorm()(ours)
