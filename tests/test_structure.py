from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from segment_anything.modeling.image_encoder import Attention, window_partition
from torch import Tensor, nn

from samopt import InvalidInput, NoSites, Skip, rebind
from samopt.passes import HoistRelPos, SDPAttention
from samopt.structure import (
    check_sam,
    decoder_attentions,
    differs,
    encoder_attentions,
    encoders,
    mask_decoders,
    same_code,
)
from tests.models import random_sam
from tests.toys import Exact


def make(source: str, name: str = "f", **names: Any) -> Callable[..., Any]:
    """The function `name` that `source` defines, in a namespace of its own."""
    exec(source, names)
    found: Callable[..., Any] = names[name]
    return found


# What is a Sam


def test_a_sam_and_a_relative_pass(sam: Sam) -> None:
    check_sam(sam)
    relative = nn.Module()
    for part in ("image_encoder", "prompt_encoder", "mask_decoder"):
        relative.add_module(part, nn.Identity())
    check_sam(relative)


@pytest.mark.parametrize(
    ("make_model", "found"),
    [
        (lambda sam: None, "NoneType is no Sam"),
        (lambda sam: nn.Linear(1, 1), "Linear is no Sam: it has no image_encoder, no prompt_encoder, no mask_decoder"),
        (lambda sam: sam.image_encoder, "ImageEncoderViT is no Sam"),
        (lambda sam: SamPredictor(sam), "SamPredictor is no Sam"),
        (lambda sam: sam.state_dict(), "OrderedDict is no Sam"),
        (lambda sam: types.SimpleNamespace(**dict(sam.named_children())), "SimpleNamespace is no Sam"),
    ],
)
def test_what_is_no_sam_is_named(sam: Sam, make_model: Callable[[Sam], Any], found: str) -> None:
    with pytest.raises(InvalidInput, match=f"{found}.*; pass (a model from|its .model)"):
        check_sam(make_model(sam))


# Where its parts are


def test_the_parts_are_found_by_name_in_a_sam_and_in_its_parts(sam: Sam) -> None:
    assert list(encoders(sam)) == [("image_encoder", sam.image_encoder)]
    assert list(encoders(sam.image_encoder)) == [("", sam.image_encoder)]
    assert list(mask_decoders(sam)) == [("mask_decoder", sam.mask_decoder)]
    assert list(mask_decoders(sam.mask_decoder)) == [("", sam.mask_decoder)]
    decoder = [found for found in decoder_attentions(sam) if not isinstance(found, Skip)]
    layers = sam.mask_decoder.transformer.layers
    assert len(decoder) == 3 * len(layers) + 1
    assert all(sam.get_submodule(fqn) is module for fqn, module in decoder)


@pytest.mark.parametrize("inside", ["", "image_encoder"])
def test_encoder_attentions_come_with_their_token_grid(inside: str) -> None:
    sam = random_sam(img_size=96, window=4, depth=3, global_blocks=(1,))
    found = list(encoder_attentions(sam.get_submodule(inside)))
    prefix = "" if inside else "image_encoder."
    names = [f"{prefix}blocks.{index}.attn" for index in range(3)]
    modules = [block.attn for block in sam.image_encoder.blocks]
    assert found == list(zip(names, modules, [(4, 4), (6, 6), (4, 4)], strict=True))


def test_the_grid_without_absolute_positions_or_without_an_encoder() -> None:
    sam = random_sam(img_size=96, window=0, depth=1, global_blocks=())
    sam.image_encoder.pos_embed = None
    (found,) = encoder_attentions(sam)
    assert not isinstance(found, Skip)
    assert found[2] == (6, 6)
    (alone,) = encoder_attentions(Attention(32, num_heads=1, use_rel_pos=True, input_size=(3, 5)))
    assert not isinstance(alone, Skip)
    assert alone[::2] == ("", (3, 5))


def test_an_attention_of_other_code_is_a_skip_with_the_reason(sam: Sam) -> None:
    class Other(Attention):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    sam.image_encoder.blocks[1].attn.__class__ = Other
    sam.mask_decoder.transformer.layers[0].self_attn.forward = lambda q, k, v: q
    skips = [found for found in (*encoder_attentions(sam), *decoder_attentions(sam)) if isinstance(found, Skip)]
    assert [skip.fqn for skip in skips] == [
        "image_encoder.blocks.1.attn",
        "mask_decoder.transformer.layers.0.self_attn",
    ]
    assert "its forward is not the code of segment_anything's Attention.forward" in skips[0].reason
    assert "its forward was replaced on this module" in skips[1].reason


# Code compared with code


def test_copied_code_is_the_same_whatever_its_name_and_comments() -> None:
    one = make("def f(x):\n    return [x + 1 for _ in range(2)]")
    two = make("def g(x):\n    # the same\n\n    return [x + 1 for _ in range(2)]", "g")
    assert same_code(one, two)
    assert same_code(window_partition, window_partition)


@pytest.mark.parametrize(
    "other",
    [
        "def f(x):\n    return [x + 2 for _ in range(2)]",
        "def f(x):\n    return [x - 1 for _ in range(2)]",
        "def f(x):\n    return [x + 1 for _ in range(2)] * 1",
        "def f(x):\n    return [x + 1 for _ in reversed(2)]",
    ],
)
def test_other_constants_operators_lengths_and_names_are_other_code(other: str) -> None:
    assert not same_code(make("def f(x):\n    return [x + 1 for _ in range(2)]"), make(other))


def test_helpers_are_compared_too_and_modules_by_identity() -> None:
    calls = "def f(x):\n    return helper(x)"
    one, two = make("def helper(x):\n    return x", "helper"), make("def helper(x):\n    return -x", "helper")
    again = make("def helper(y):\n    return y", "helper")
    assert same_code(make(calls, helper=one), make(calls, helper=make("def helper(x):\n    return x", "helper")))
    assert not same_code(make(calls, helper=one), make(calls, helper=two))
    assert not same_code(make(calls, helper=one), make(calls, helper=torch))
    assert not same_code(make(calls, helper=one), make(calls, helper=again)), "names count: they bind keywords"


def test_helpers_in_comprehensions_defaults_and_closures_are_compared_too() -> None:
    calls = "def f(x):\n    return [helper(i) for i in x]"
    one, two = make("def helper(x):\n    return x", "helper"), make("def helper(x):\n    return -x", "helper")
    assert not same_code(make(calls, helper=one), make(calls, helper=two))
    assert not same_code(make("def f(x=1):\n    return x"), make("def f(x=2):\n    return x"))
    assert not same_code(make("def f(*, x=1):\n    return x"), make("def f(*, x=2):\n    return x"))
    closure = "def outer(n):\n    return lambda x: x * n"
    assert not same_code(make(closure, "outer")(2), make(closure, "outer")(3))


def test_recursive_functions_are_compared() -> None:
    recursive = "def f(x):\n    return f(x - {}) if x else 0"
    assert same_code(make(recursive.format(1)), make(recursive.format(1)))
    assert not same_code(make(recursive.format(1)), make(recursive.format(2)))


def test_differs_trusts_what_samopts_own_passes_bound_and_nothing_else(sam: Sam) -> None:
    neck, attention = sam.image_encoder.neck, sam.image_encoder.blocks[0].attn
    assert differs(neck, "forward", nn.Sequential.forward) is None
    assert differs(attention, "forward", Attention.forward) is None
    HoistRelPos()(sam)
    rewritten = sam.image_encoder.blocks[0].attn
    assert differs(rewritten, "forward", Attention.forward) is None
    assert "is not the code" in str(differs(rewritten, "forward", nn.LayerNorm.forward)), "another class's was bound"
    Exact()(sam)
    rebind(neck, "forward", nn.Sequential.forward)
    assert differs(neck, "forward", nn.Sequential.forward) == "its forward was replaced on this module"
    assert "is not the code" in str(differs(sam.mask_decoder, "forward", nn.Sequential.forward))


def test_a_patched_segment_anything_is_not_taken_for_itself(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "forward", lambda self, x: x * 0)
    with pytest.raises(NoSites, match="segment_anything's own forward was replaced in this process"):
        SDPAttention(decoder=False)(sam)
