"""Two models are alike where they are, and every difference that a file would lose is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import nn

from samopt.module_form import difference, same_bits
from samopt.passes import CastDtype, LinearPatchEmbed, WhereIndexing
from samopt.rebind import rebind
from tests.models import random_sam


def other_forward(module: nn.Module, x: Any) -> Any:
    return x


def test_copies_and_other_weights_are_alike(sam: Sam) -> None:
    assert difference(sam, copy.deepcopy(sam)) is None
    assert difference(sam, random_sam(seed=1)) is None
    for pass_ in (LinearPatchEmbed(), WhereIndexing(), CastDtype()):
        pass_(sam)
    assert difference(sam, copy.deepcopy(sam)) is None


def change_eps(sam: Any) -> None:
    sam.image_encoder.blocks[1].norm1.eps = 1e-5


def change_class(sam: Any) -> None:
    sam.image_encoder.blocks[1].mlp.act = nn.ReLU()


def change_forward(sam: Any) -> None:
    rebind(sam.image_encoder.neck[1], "forward", other_forward)


def change_dtype(sam: Any) -> None:
    sam.mask_decoder.iou_token.bfloat16()


def add_child(sam: Any) -> None:
    sam.image_encoder.blocks[0].extra = nn.Identity()


def drop_bias(sam: Any) -> None:
    sam.image_encoder.blocks[0].attn.qkv.bias = None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_eps, "image_encoder.blocks.1.norm1: eps is 1e-05 and was 1e-06"),
        (change_class, "image_encoder.blocks.1.mlp.act: "),
        (change_forward, "image_encoder.neck.1: forward is other code and was absent"),
        (change_dtype, "mask_decoder.iou_token: weight is a parameter [1, 64] of torch.bfloat16 and was"),
        (add_child, "image_encoder.blocks.0.extra was not there"),
        (drop_bias, "image_encoder.blocks.0.attn.qkv: bias is absent and was a parameter [192] of torch.float32"),
    ],
)
def test_changes_are_found(sam: Sam, change: Callable[[Any], None], found: str) -> None:
    unchanged = copy.deepcopy(sam)
    change(sam)
    assert (difference(sam, unchanged) or "").startswith(found)
    assert difference(unchanged, sam) is not None


def test_same_bits() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.bfloat16())
    assert not same_bits(zero, torch.zeros(2, device="meta"))
    assert same_bits(zero / 0, zero / 0)
