"""Relatives of SAM: the same code under other names is rewritten, other arithmetic under the same names is not."""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any

import pytest
import torch
from segment_anything.modeling import image_encoder, transformer
from torch import Tensor, nn

from samopt import NoSites, Pass, Site, Skip
from samopt.passes import HoistRelPos, SDPAttention
from tests.models import random_sam, randomise_positions
from tests.numerics import assert_bit_equal, relative_error


def fork(module: types.ModuleType, *edits: tuple[str, str]) -> dict[str, Any]:
    """The names of a copy of one of Meta's files in which each edit was made, executed as a fork would be."""
    source = inspect.getsource(module)
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "fork", "__package__": module.__package__}
    exec(compile(source, "fork.py", "exec"), names)
    return names


def forked_attention(*edits: tuple[str, str]) -> Any:
    edits = (("Attention(", "MedAttention("), ("super().__init__()", "super().__init__()  # a fork's comment"), *edits)
    names = fork(image_encoder, *edits)
    attention = names["MedAttention"](64, num_heads=2, use_rel_pos=True, input_size=(4, 4))
    randomise_positions(attention)
    return attention.eval()


def forked_two_way(*edits: tuple[str, str]) -> Any:
    names = fork(transformer, ("Attention(", "CrossAttention("), *edits)
    attention = names["CrossAttention"](64, num_heads=8, downsample_rate=2)
    return attention.eval()


@pytest.mark.parametrize("pass_", [HoistRelPos(), SDPAttention()])
def test_same_code_under_another_name_is_rewritten(pass_: Pass) -> None:
    attention = forked_attention()
    ours = copy.deepcopy(attention)
    assert [site.facts["grid"] for site in pass_(ours).sites] == [(4, 4)]
    assert type(ours).__name__ == "MedAttention"
    tokens = torch.randn(2, 4, 4, 64)
    if isinstance(pass_, HoistRelPos):
        assert_bit_equal(ours(tokens), attention(tokens))
    assert relative_error(ours(tokens), attention(tokens)) < 1e-6


def test_same_two_way_code_under_another_name_is_rewritten() -> None:
    attention = forked_two_way()
    ours = copy.deepcopy(attention)
    (site,) = SDPAttention()(ours).sites
    assert site.facts["kind"] == "decoder"
    inputs = [torch.randn(2, tokens, 64) for tokens in (5, 16, 16)]
    assert relative_error(ours(*inputs), attention(*inputs)) < 1e-6


@pytest.mark.parametrize(
    "edit",
    [
        ("(q * self.scale) @", "q @"),  # no scale
        ("attn.softmax(dim=-1)", "attn.softmax(dim=-2)"),
        ("rel_h[:, :, :, :, None]", "rel_w[:, :, :, :, None]"),  # in a helper it calls
        ("(k_size - 1) *", "(k_size - 2) *"),  # in a helper's helper
    ],
)
@pytest.mark.parametrize("pass_", [HoistRelPos(), SDPAttention()])
def test_other_arithmetic_is_a_skip(pass_: Pass, edit: tuple[str, str]) -> None:
    attention = forked_attention(edit)
    with pytest.raises(NoSites, match=r"its forward is not the code of segment_anything's Attention\.forward"):
        pass_(attention)


@pytest.mark.parametrize(
    "edit", [("/ math.sqrt(c_per_head)", "/ c_per_head"), ("torch.softmax(attn, dim=-1)", "torch.sigmoid(attn)")]
)
def test_other_two_way_arithmetic_is_a_skip(edit: tuple[str, str]) -> None:
    with pytest.raises(NoSites, match=r"its forward is not the code of segment_anything's Attention\.forward"):
        SDPAttention()(forked_two_way(edit))


class BiasedAttention(nn.Module):
    """As in MobileSAM's encoder: the same attributes over a learned bias per offset."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.num_heads, self.scale = 1, width**-0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.randn(tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(1, 2)).chunk(3, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.scale + self.attention_biases
        out: Tensor = self.proj(attn.softmax(dim=-1) @ v)
        return out.view(x.shape)


@pytest.mark.parametrize("pass_", [HoistRelPos(), SDPAttention(decoder=False)])
def test_a_look_alike_among_blocks_is_left_out_with_the_reason(pass_: Pass) -> None:
    sam = random_sam(window=0)
    sam.image_encoder.blocks[0].attn = look_alike = BiasedAttention(64, 16)
    found = list(pass_.match(sam))
    assert [item.fqn for item in found if isinstance(item, Site)] == ["image_encoder.blocks.1.attn"]
    (skip,) = (item for item in found if isinstance(item, Skip))
    assert skip.fqn == "image_encoder.blocks.0.attn"
    assert "not the code of segment_anything's Attention.forward" in skip.reason
    result = pass_(sam)
    assert result.skipped == (skip,)
    assert sam.image_encoder.blocks[0].attn is look_alike


def test_a_relative_with_another_helper_method_keeps_it() -> None:
    names = fork(transformer, ("x.transpose(1, 2)  # B x N_heads", "x.transpose(1, 2).flip(1)  # B x N_heads"))
    attention = names["Attention"](64, num_heads=8).eval()
    ours = copy.deepcopy(attention)
    inputs = [torch.randn(2, tokens, 64) for tokens in (5, 16, 16)]
    SDPAttention()(ours)  # it calls the module's own methods, so what they do stays
    assert relative_error(ours(*inputs), attention(*inputs)) < 1e-6
