from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import InvalidInput, Pass, Skip
from samopt.passes import CastDtype, Float8Dynamic, Int8Dynamic, LinearGELU, SDPAttention
from samopt.passes.linears import linears
from samopt.rebind import rebind
from tests.models import random_sam

IN_A_BLOCK = ("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")


def names(model: nn.Module, *layers: str) -> list[str]:
    return [found if isinstance(found, str) else found[0] for found in sites(model, layers)]


def sites(model: nn.Module, layers: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = list(linears(model, layers))
    assert not any(isinstance(item, Skip) for item in found)
    return [item for item in found if not isinstance(item, Skip)]


def in_blocks(*paths: str) -> list[str]:
    return [f"image_encoder.blocks.{index}.{path}" for index in (0, 1) for path in paths]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("qkv",), in_blocks("attn.qkv")),
        (("lin2", "qkv"), in_blocks("attn.qkv", "mlp.lin2")),  # the model's order, not that of the words
        (("qkv", "proj", "lin1", "lin2"), in_blocks(*IN_A_BLOCK)),
        (("image_encoder.blocks.1.mlp.*", "lin1"), in_blocks("mlp.lin1") + in_blocks("mlp.lin2")[1:]),
        (("image_encoder.blocks.0.attn.proj",), in_blocks("attn.proj")[:1]),
        (("*.blocks.*",), in_blocks(*IN_A_BLOCK)),  # norms and activations match too, and are no linear layers
    ],
)
def test_roles_and_patterns_name_layers_once_in_model_order(
    sam: Sam, layers: tuple[str, ...], expected: list[str]
) -> None:
    found = sites(sam, layers)
    assert [name for name, _ in found] == expected
    assert all(module is sam.get_submodule(name) for name, module in found)


def test_the_decoders_layers_are_all_its_linear_ones(sam: Sam) -> None:
    expected = [name for name, module in sam.named_modules() if isinstance(module, nn.Linear)]
    assert names(sam, "decoder") == [name for name in expected if name.startswith("mask_decoder.")]
    assert len(names(sam, "decoder")) > 20


def test_a_part_of_a_sam_has_them_too(sam: Sam) -> None:
    assert names(sam.image_encoder.blocks[0], "mlp.*") == ["mlp.lin1", "mlp.lin2"]
    assert names(sam.image_encoder, "qkv") == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]


@pytest.mark.parametrize("word", ["lin3", "image_encoder.blocks.7.*", "image_encoder.neck.0", "*.norm1", ""])
def test_what_names_nothing_is_an_error_that_says_it(sam: Sam, word: str) -> None:
    message = rf"layers: '{re.escape(word)}' is no role \(qkv, proj, lin1, lin2, decoder\), nor is any linear layer"
    with pytest.raises(InvalidInput, match=message):
        list(linears(sam, ("qkv", word)))


def twice(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_that_computes_something_else_is_a_skip(sam: Sam) -> None:
    sam.image_encoder.blocks[0].attn.qkv = Scaled(64, 192)
    rebind(sam.image_encoder.blocks[1].attn.qkv, "forward", twice)
    found = list(linears(sam, ("qkv",)))
    assert [item.fqn if isinstance(item, Skip) else item[0] for item in found] == in_blocks("attn.qkv")
    first, second = (item.reason if isinstance(item, Skip) else "" for item in found)
    assert "not the code of segment_anything's Linear.forward" in first
    assert "its forward was replaced on this module" in second


@pytest.mark.filterwarnings("ignore:Deprecation. PlainLayout:UserWarning")  # torchao 0.17, of its own code
@pytest.mark.parametrize(
    ("pass_", "reason"),
    [
        (Float8Dynamic(("qkv",)), "its weights are float8 already"),
        (Int8Dynamic(("qkv",)), "its weights are int8 already"),
        (Int8Dynamic(("qkv",), kernel="torchao"), "its weights are torchao's Int8Tensor already"),
    ],
    ids=["float8", "int8", "torchao"],
)
def test_a_quantised_layer_is_a_skip_that_says_so(sam: Sam, pass_: Pass, reason: str) -> None:
    if getattr(pass_, "kernel", None) == "torchao":
        pytest.importorskip("torchao")
    pass_(sam)
    assert list(linears(sam, ("qkv",))) == [Skip(name, reason) for name in in_blocks("attn.qkv")]
    assert [found[0] for found in sites(sam, ("proj",))] == in_blocks("attn.proj")


@pytest.mark.usefixtures("kernels_anywhere")
def test_layers_that_passes_rewrote_are_found_as_before(sam: Sam) -> None:
    before = names(sam, "qkv", "lin1", "decoder")
    for pass_ in (CastDtype(), SDPAttention(), LinearGELU()):
        pass_(sam)
    assert sam.image_encoder.blocks[0].mlp.lin1.weight.dtype is torch.bfloat16
    assert names(sam, "qkv", "lin1", "decoder") == before == names(random_sam(), "qkv", "lin1", "decoder")
