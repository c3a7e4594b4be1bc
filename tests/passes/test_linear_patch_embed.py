from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samopt import NoSites, Skip, clone
from samopt.passes import LinearPatchEmbed
from tests.models import random_sam
from tests.numerics import assert_rounding, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PatchEmbed(nn.Module):
    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj


class Encoder(nn.Module):
    """The outline of an image encoder around one patch-embedding layer."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.patch_embed, self.blocks, self.neck = PatchEmbed(proj), nn.ModuleList(), nn.Sequential()


def rewritten(conv: nn.Conv2d) -> nn.Module:
    encoder = Encoder(clone(conv))
    LinearPatchEmbed()(encoder)
    return encoder.patch_embed.proj


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("patch", "channels", "width", "size", "batch", "bias"),
    [
        (16, 3, 64, (64, 64), 1, True),
        (16, 3, 192, (80, 80), 4, True),
        (16, 3, 80, (336, 336), 2, False),
        (8, 4, 32, (24, 40), 3, True),
        (16, 3, 48, (70, 95), 2, True),  # the last rows and columns fill no patch
    ],
)
def test_errs_like_the_convolution(
    dtype: torch.dtype, patch: int, channels: int, width: int, size: tuple[int, int], batch: int, bias: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, width, patch, stride=patch, bias=bias).to(dtype)
    pixels = torch.randn(batch, channels, *size, dtype=dtype)
    assert_rounding(conv, rewritten(conv), [pixels])


def test_is_the_convolution_in_float64() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 24, (8, 16), stride=(8, 16)).double()  # patches that are not square
    pixels = torch.randn(2, 3, 40, 64, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    ours, theirs = rewritten(conv)(pixels), conv(pixels)
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) < 1e-14


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("img_size", "batch"), [(64, 1), (80, 4)])
def test_encoder_errs_like_the_unmodified_one(dtype: torch.dtype, img_size: int, batch: int) -> None:
    encoder = random_sam(img_size).image_encoder.to(dtype)
    ours = copy.deepcopy(encoder)
    result = LinearPatchEmbed()(ours)
    assert [str(site) for site in result.sites] == ["patch_embed.proj (patch=(16, 16))"]
    assert_rounding(encoder, ours, [torch.randn(batch, 3, img_size, img_size, dtype=dtype)])


def test_weight_keeps_key_and_shape() -> None:
    sam = random_sam()
    before = {key: value.shape for key, value in sam.state_dict().items()}
    LinearPatchEmbed()(sam)
    assert {key: value.shape for key, value in sam.state_dict().items()} == before
    assert type(sam.image_encoder.patch_embed.proj) is nn.Conv2d


def test_loaded_weights_are_used() -> None:
    other = random_sam(seed=1)
    sam = random_sam(seed=0)
    LinearPatchEmbed()(sam)
    sam.load_state_dict(other.state_dict())
    LinearPatchEmbed()(other)
    pixels = torch.randn(1, 3, 64, 64)
    assert torch.equal(sam.image_encoder(pixels), other.image_encoder(pixels))


class ScaledConv(nn.Conv2d):
    """A relative's layer with other arithmetic under the same attributes."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replaced_forward() -> nn.Conv2d:
    conv = nn.Conv2d(3, 8, 16, stride=16)
    vars(conv)["forward"] = lambda x: x
    return conv


@pytest.mark.parametrize(
    ("proj", "reason"),
    [
        (nn.Conv2d(3, 8, 16, stride=8), r"kernel \(16, 16\) is not its stride \(8, 8\)"),
        (nn.Conv2d(3, 8, 7, stride=8), "patches overlap or leave gaps"),
        (nn.Conv2d(3, 8, 16, stride=16, padding=1), r"padding \(1, 1\)"),
        (nn.Conv2d(3, 8, 16, stride=16, padding=1, padding_mode="reflect"), r"padding \(1, 1\)"),
        (nn.Conv2d(3, 8, 16, stride=16, dilation=2), r"dilation \(2, 2\)"),
        (nn.Conv2d(3, 9, 16, stride=16, groups=3), "groups 3"),
        (ScaledConv(3, 8, 16, stride=16), "forward is not the code of segment_anything's Conv2d.forward"),
        (replaced_forward(), "forward was replaced"),
    ],
)
def test_declines_what_is_no_matmul(proj: nn.Conv2d, reason: str) -> None:
    encoder = Encoder(proj)
    (skip,) = LinearPatchEmbed().match(encoder)
    assert isinstance(skip, Skip)
    with pytest.raises(NoSites, match=reason):
        LinearPatchEmbed()(encoder)
    assert encoder.patch_embed.proj is proj


@pytest.mark.parametrize("padding", ["valid", 0])
def test_takes_every_spelling_of_no_padding(padding: Any) -> None:
    assert_rounding(
        conv := nn.Conv2d(3, 8, 16, stride=16, padding=padding), rewritten(conv), [torch.randn(1, 3, 32, 32)]
    )
