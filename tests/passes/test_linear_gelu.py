from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import AlreadyApplied, NoSites, Site, Skip, Unsupported
from samopt.passes import CastDtype, LinearGELU
from samopt.passes.quantized_linear import QuantizedLinear
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding


def cast_sam(img_size: int = 64, **sizes: Any) -> Sam:
    sam = random_sam(img_size, **sizes)
    CastDtype()(sam)
    return sam


def rewritten(model: Any) -> Any:
    ours = copy.deepcopy(model)
    LinearGELU()(ours)
    return ours


def found(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The sites' names, and why the others are left out."""
    items = list(LinearGELU().match(model))
    sites = [item.fqn for item in items if isinstance(item, Site)]
    return sites, {item.fqn: item.reason for item in items if isinstance(item, Skip)}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What every call of the operator was given."""
    seen: list[Tensor] = []

    def tanh_form(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        assert gelu
        assert x.dtype == weight.dtype == bias.dtype == torch.bfloat16
        seen.append(x)
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    monkeypatch.setattr("samopt.passes.linear_gelu.linear_operator", tanh_form)
    return seen


# Where it applies


def test_on_a_cpu_it_refuses() -> None:
    with pytest.raises(Unsupported, match="its kernel needs a GPU and the model is on cpu; leave linear_gelu out"):
        LinearGELU()(cast_sam())


def test_the_encoders_mlps_are_the_sites() -> None:
    assert found(cast_sam()) == (["image_encoder.blocks.0.mlp", "image_encoder.blocks.1.mlp"], {})


@pytest.mark.usefixtures("kernels_anywhere")
def test_float32_and_float16_are_told_to_cast_to_bfloat16() -> None:
    sam = random_sam()
    with pytest.raises(NoSites, match=r"its weights are float32, .* lost in bfloat16's rounding only: CastDtype does"):
        LinearGELU()(sam)
    CastDtype("float16")(sam)
    with pytest.raises(NoSites, match=r"its weights are float16, .* lost in bfloat16's rounding only: CastDtype does"):
        LinearGELU()(sam)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OtherMLP(nn.Module):
    """A look-alike: the layers of SAM's MLP, in another order."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.lin1, self.lin2, self.act = mlp.lin1, mlp.lin2, mlp.act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.lin2(self.lin1(x)))
        return out


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("act", nn.ReLU(), "act: its forward is not the code of segment_anything's GELU.forward"),
        ("act", nn.GELU(approximate="tanh"), "its GELU is approximated already, by tanh"),
        ("lin1", nn.Linear(64, 256, bias=False).bfloat16(), "its lin1 has no bias"),
        ("lin1", nn.Linear(64, 256), "its weights are float32, and"),
        ("lin1", Scaled(64, 256).bfloat16(), "lin1: its forward is not the code of segment_anything's Linear.forward"),
        ("lin1", QuantizedLinear(nn.Linear(64, 256).bfloat16(), torch.int8), "lin1: its weights are int8 already"),
    ],
)
def test_another_part_is_a_skip(part: str, value: nn.Module, reason: str) -> None:
    sam = cast_sam()
    setattr(sam.image_encoder.blocks[0].mlp, part, value)
    sites, skips = found(sam)
    assert sites == ["image_encoder.blocks.1.mlp"]
    assert skips.keys() == {"image_encoder.blocks.0.mlp"}
    assert skips["image_encoder.blocks.0.mlp"].startswith(reason)


def test_look_alikes_are_skips_and_a_block_without_an_mlp_is_nothing() -> None:
    sam = cast_sam(depth=4)
    blocks = sam.image_encoder.blocks
    blocks[0].mlp = OtherMLP(blocks[0].mlp)
    blocks[1].mlp.act.forward = F.relu
    blocks[2] = nn.Identity()
    assert found(sam) == (
        ["image_encoder.blocks.3.mlp"],
        {
            "image_encoder.blocks.0.mlp": "its forward is not the code of segment_anything's MLPBlock.forward",
            "image_encoder.blocks.1.mlp": "act: its forward was replaced on this module",
        },
    )


# What it computes


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("form", ["exact", "tanh"])
@pytest.mark.parametrize(
    ("img_size", "sizes", "batch"),
    [
        (80, {"window": 3}, 3),
        (80, {"window": 5, "qkv_bias": False}, 1),
        (64, {"window": 0, "width": 96, "heads": 3, "depth": 4}, 1),
    ],
)
def test_encoder_errs_like_the_unmodified_one(
    form: str, img_size: int, sizes: dict[str, Any], batch: int, request: pytest.FixtureRequest
) -> None:
    if form == "tanh":  # what the GPU computes
        request.getfixturevalue("fused")
    sam = cast_sam(img_size, **sizes)
    torch.manual_seed(1)
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [torch.randn(batch, 3, img_size, img_size)])


@pytest.mark.usefixtures("kernels_anywhere", "fused")
@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_the_tanh_form_in_an_mlp_errs_like_the_unmodified_one(std: float) -> None:
    sam = cast_sam()
    mlp = sam.image_encoder.blocks[0].mlp
    assert_rounding(mlp, rewritten(sam).image_encoder.blocks[0].mlp, [(std * torch.randn(2, 4, 4, 64)).bfloat16()])


@pytest.mark.usefixtures("kernels_anywhere", "fused")
@pytest.mark.parametrize("batch", [1, 3])
def test_the_embedded_model(batch: int, tiny256: Sam) -> None:
    sam = copy.deepcopy(tiny256)
    CastDtype()(sam)
    pixels = torch.rand(batch, 3, 8, 8).repeat_interleave(32, 2).repeat_interleave(32, 3) * 4 - 2
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [pixels])


@pytest.mark.usefixtures("kernels_anywhere")
@torch.no_grad()
def test_every_mlp_goes_through_the_operator_once(fused: list[Tensor]) -> None:
    sam = rewritten(cast_sam(depth=3))
    sam.image_encoder(torch.randn(2, 3, 64, 64))
    assert [tuple(x.shape) for x in fused] == [(2, 4, 4, 64)] * 3


# What goes on top of it


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("lin1", nn.Linear(64, 256).bfloat16()),
        ("act", nn.GELU(approximate="tanh")),
        ("lin2", nn.Linear(256, 64).bfloat16()),
    ],
)
@torch.no_grad()
def test_a_layer_replaced_later_is_used_and_the_activation_runs_once(
    part: str, other: nn.Module, fused: list[Tensor]
) -> None:
    sam = cast_sam()
    ours, plain = rewritten(sam).image_encoder.blocks[0].mlp, copy.deepcopy(sam.image_encoder.blocks[0].mlp)
    for mlp in (ours, plain):
        setattr(mlp, part, other)
    tokens = torch.randn(2, 4, 4, 64).bfloat16()
    if part == "lin2":
        assert_rounding(plain, ours, [tokens])
        assert len(fused) == 1
    else:
        assert_bit_equal(ours(tokens), plain(tokens))
        assert fused == []


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_cast_later_it_is_the_exact_form(dtype: torch.dtype, fused: list[Tensor]) -> None:
    sam = cast_sam()
    ours, plain = rewritten(sam).image_encoder.to(dtype), sam.image_encoder.to(dtype)
    pixels = torch.randn(1, 3, 64, 64)
    assert_bit_equal(ours(pixels), plain(pixels))
    assert fused == []


@pytest.mark.usefixtures("kernels_anywhere")
def test_under_autocast_it_is_fused_too(fused: list[Tensor]) -> None:
    mlp = rewritten(cast_sam()).image_encoder.blocks[0].mlp
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(torch.randn(1, 4, 4, 64))  # float32, as a norm under autocast gives on a GPU
    assert out.dtype == torch.bfloat16
    assert len(fused) == 1


@pytest.mark.usefixtures("kernels_anywhere")
def test_twice_says_so() -> None:
    ours = rewritten(cast_sam())
    with pytest.raises(AlreadyApplied, match="LinearGELU was applied to this model already"):
        LinearGELU()(ours)
