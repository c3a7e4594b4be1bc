from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samopt import Skip, clone
from samopt.passes.encoder_block import ADD_NORM, ATTEND, add_norm, attend, encoder_blocks, in_parts
from tests.models import random_sam
from tests.numerics import assert_bit_equal


def random_block(window: int) -> Any:
    return random_sam(80, depth=1, window=window, global_blocks=()).image_encoder.blocks[0]


def attend_twice_as_much(self: Any, x: Tensor) -> Tensor:
    return 2 * attend(self, x)


def add_norm_of_the_negative(self: Any, x: Tensor, attended: Tensor) -> Tensor:
    return -add_norm(self, x, attended)


@pytest.mark.parametrize("window", [0, 2, 5, 14], ids=["global", "padded", "dividing", "larger than the grid"])
def test_a_block_in_parts_is_the_block(window: int) -> None:
    block = random_block(window)
    ours = clone(block)
    in_parts(ours)
    tokens = torch.randn(2, 5, 5, 64)
    assert_bit_equal(ours(tokens), block(tokens))
    assert_bit_equal(ours(tokens[:, :3]), block(tokens[:, :3]))


@torch.no_grad()
def test_parts_are_given_in_any_order_and_those_given_before_stay() -> None:
    block = random_block(2)
    parts: dict[str, Any] = {ATTEND: attend_twice_as_much, ADD_NORM: add_norm_of_the_negative}
    tokens = torch.randn(2, 5, 5, 64)
    total = tokens + 2 * attend(block, block.norm1(tokens))
    expected = total + block.mlp(-block.norm2(total))
    for names in ([ATTEND, ADD_NORM], [ADD_NORM, ATTEND]):
        ours = clone(block)
        for name in names:
            in_parts(ours, **{name: parts[name]})
        assert_bit_equal(ours(tokens), expected)
        in_parts(ours)
        assert_bit_equal(ours(tokens), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, clone, lambda block: pickle.loads(pickle.dumps(block))])
@torch.no_grad()
def test_a_copy_runs_its_own_weights(copied: Any) -> None:
    ours = random_block(2)
    in_parts(ours, **{ATTEND: attend_twice_as_much})
    tokens = torch.randn(1, 5, 5, 64)
    expected = ours(tokens)
    again = copied(ours)
    assert_bit_equal(again(tokens), expected)
    again.attn.proj = nn.Identity()
    assert not torch.equal(again(tokens), expected)
    assert_bit_equal(ours(tokens), expected)


def test_blocks_come_with_name_and_grid() -> None:
    sam = random_sam(80)
    encoder = sam.image_encoder
    found = [(f"image_encoder.blocks.{index}", block, (5, 5)) for index, block in enumerate(encoder.blocks)]
    assert list(encoder_blocks(sam)) == found
    assert [item[0] for item in encoder_blocks(encoder) if not isinstance(item, Skip)] == ["blocks.0", "blocks.1"]
    encoder.pos_embed = None
    assert list(encoder_blocks(sam)) == found, "the image size tells it too"
    del encoder.img_size
    assert list(encoder_blocks(sam)) == [(name, block, None) for name, block, _ in found]


class ScaledBlock(nn.Module):
    """As in other vision transformers: the same parts, and a learned scale of each branch."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.window_size = 0
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attn(self.norm1(x))
        scaled: Tensor = x + self.scale * self.mlp(self.norm2(x))
        return scaled


def test_a_look_alike_is_a_skip() -> None:
    sam = random_sam()
    sam.image_encoder.blocks[0] = ScaledBlock(sam.image_encoder.blocks[0])
    skip, block = encoder_blocks(sam)
    assert skip == Skip("image_encoder.blocks.0", "its forward is not the code of segment_anything's Block.forward")
    assert block == ("image_encoder.blocks.1", sam.image_encoder.blocks[1], (4, 4))


def test_a_block_that_somebody_patched_is_a_skip() -> None:
    sam = random_sam()
    sam.image_encoder.blocks[1].forward = lambda x: x
    _, skip = encoder_blocks(sam)
    assert skip == Skip("image_encoder.blocks.1", "its forward was replaced on this module")
