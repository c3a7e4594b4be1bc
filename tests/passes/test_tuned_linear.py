from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import NoSites, Site, Skip, Unsupported
from samopt.passes import CastDtype, LinearGELU, TritonAttention, TunedLinear
from tests.models import random_sam
from tests.numerics import assert_bit_equal

PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def cast_sam(dtype: Literal["bfloat16", "float16"] = "bfloat16", **sizes: Any) -> Sam:
    sam = random_sam(**sizes)
    CastDtype(dtype)(sam)
    return sam


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the weight of every call of the operator by this pass."""
    seen: list[tuple[int, ...]] = []

    def spied(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
        assert x.dtype is weight.dtype
        assert not gelu
        seen.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    monkeypatch.setattr("samopt.passes.tuned_linear.linear", spied)
    return seen


def test_on_a_cpu_it_refuses() -> None:
    with pytest.raises(Unsupported, match="cuBLASLt needs a GPU and the model is on cpu; leave tuned_linear out"):
        TunedLinear()(cast_sam())


def test_sites_are_the_layers_that_linear_gelu_leaves() -> None:
    layers = "attn.qkv", "attn.proj", "mlp.lin2"
    names = [f"image_encoder.blocks.{index}.{layer}" for index in (0, 1) for layer in layers]
    assert list(TunedLinear().match(cast_sam())) == [Site(name) for name in names]
    sam = cast_sam()
    sam.image_encoder.blocks[0].attn.proj.forward = lambda x: x
    assert Skip(names[1], "its forward was replaced on this module") in list(TunedLinear().match(sam))


@pytest.mark.usefixtures("kernels_anywhere")
def test_float32_is_a_skip() -> None:
    with pytest.raises(NoSites, match="its weights are float32: apply CastDtype first"):
        TunedLinear()(random_sam())


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()
def test_every_layer_goes_through_the_operator_once(
    dtype: Literal["bfloat16", "float16"], given: list[tuple[int, ...]]
) -> None:
    sam = cast_sam(dtype, qkv_bias=False)
    ours = copy.deepcopy(sam)
    TunedLinear()(ours)
    assert_bit_equal(ours.image_encoder(PIXELS), sam.image_encoder(PIXELS))
    assert given == [(192, 64), (64, 64), (64, 256)] * 2


@pytest.mark.usefixtures("kernels_anywhere", "given")
@torch.no_grad()
def test_attention_and_mlp_of_other_passes_call_it() -> None:
    sam = cast_sam()
    expected = copy.deepcopy(sam)
    for pass_ in (TritonAttention(), LinearGELU()):
        pass_(sam)
        pass_(expected)
    TunedLinear()(sam)
    assert_bit_equal(sam.image_encoder(PIXELS), expected.image_encoder(PIXELS))


@pytest.mark.usefixtures("kernels_anywhere")
@torch.no_grad()
def test_under_autocast_it_is_pytorchs_layer(given: list[tuple[int, ...]]) -> None:
    sam = cast_sam()
    ours = copy.deepcopy(sam)
    TunedLinear()(ours)
    layer, x = ours.image_encoder.blocks[0].attn.qkv, torch.randn(1, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bit_equal(layer(x), sam.image_encoder.blocks[0].attn.qkv(x))
    assert given == []


@pytest.mark.usefixtures("kernels_anywhere")
@torch.no_grad()
def test_a_weight_loaded_or_replaced_later_is_used() -> None:
    sam, other = cast_sam(), cast_sam(seed=1)
    TunedLinear()(sam)
    sam.load_state_dict(other.state_dict())
    assert_bit_equal(sam.image_encoder(PIXELS), other.image_encoder(PIXELS))
    for model in (sam, other):
        model.image_encoder.blocks[0].attn.qkv.weight = nn.Parameter(torch.ones(192, 64).bfloat16())
    assert_bit_equal(sam.image_encoder(PIXELS), other.image_encoder(PIXELS))
