"""SAM's encoder block in parts, so that passes can rewrite one each, in any order.

attended = attend(norm(x))
return add(x, attended, mlp(add_norm(x, attended)))

The sum of the first two is not kept: all three are added at the end, by torch.compile in float32, and rounded once. On
an H200 in bfloat16 vit_h's embedding so errs by 1.1e-2 instead of 1.4e-2, and the bytes moved are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from samopt.rebind import rebind
from samopt.result import Skip
from samopt.structure import differs, encoders, join, token_grid

NORM, ATTEND, ADD_NORM, ADD = "_samopt_norm", "_samopt_attend", "_samopt_add_norm", "_samopt_add"


def encoder_blocks(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int] | None] | Skip]:
    """The blocks of the image encoders: name, module, and the encoder's token grid. A look-alike is a Skip."""
    from segment_anything.modeling.image_encoder import Block

    for fqn, encoder in encoders(model):
        for index, block in enumerate(encoder.blocks):
            name = join(fqn, f"blocks.{index}")
            if reason := differs(block, "forward", Block.forward):
                yield Skip(name, reason)
            else:
                yield name, block, token_grid(encoder)


def in_parts(block: nn.Module, **parts: Any) -> None:
    """Makes a block run in parts, the given ones instead of SAM's; what another pass gave before, stays.

    Args:
        block: a clone of an encoder block.
        parts: functions of block and tensors, by the names of the parts.
    """
    for name, function in {"forward": forward, NORM: norm, ATTEND: attend, ADD_NORM: add_norm, ADD: add}.items():
        if name in parts or name not in vars(block):
            rebind(block, name, parts.get(name, function))


def forward(self: Any, x: Tensor) -> Tensor:
    """The block over tokens [B, H, W, C]; returns [B, H, W, C]."""
    attended = self._samopt_attend(self._samopt_norm(x))
    out: Tensor = self._samopt_add(x, attended, self.mlp(self._samopt_add_norm(x, attended)))
    return out


def norm(self: Any, x: Tensor) -> Tensor:
    """The first norm, of x [B, H, W, C]."""
    normed: Tensor = self.norm1(x)
    return normed


def attend(self: Any, x: Tensor) -> Tensor:
    """Attention of normed tokens [B, H, W, C], in windows where the block has them; returns [B, H, W, C]."""
    from segment_anything.modeling.image_encoder import window_partition, window_unpartition

    if self.window_size == 0:
        return self.attn(x)
    H, W = x.shape[1:3]
    windows, padded = window_partition(x, self.window_size)
    return window_unpartition(self.attn(windows), self.window_size, padded, (H, W))


def add_norm(self: Any, x: Tensor, attended: Tensor) -> Tensor:
    """The second norm, of x + attended, [B, H, W, C]."""
    return self.norm2(x + attended)


def add(self: Any, x: Tensor, attended: Tensor, mlp: Tensor) -> Tensor:
    """The sum that ends the block, [B, H, W, C]."""
    return x + attended + mlp
