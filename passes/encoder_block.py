"""SAM's encoder block in parts, so that passes can rewrite one each, in any order.

attended = attend(norm(x))
return add(x, attended, mlp(add_norm(x, attended)))

The sum of the first two is not kept: all three are added at the end, by torch.compile in float32, and rounded once. On
an H200 in bfloat16 vit_h's embedding so errs by 1.1e-2 instead of 1.4e-2, and the bytes moved are the same. Or the
three are left to the next block, whose first norm adds them, see `samopt.passes.deferred_sum`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from samopt.rebind import bound, rebind
from samopt.result import Skip
from samopt.structure import differs, encoders, join, token_grid

NORM, ATTEND, ADD_NORM, ADD = "_samopt_norm", "_samopt_attend", "_samopt_add_norm", "_samopt_add"
SUM_NORM = "_samopt_sum_norm"


class Unsummed(NamedTuple):
    """What a block is given, or leaves to the next one, before it is added up.

    Attributes:
        x: [B, H, W, C].
        attended: as x, or [1, H, W, C]: the position embedding, before the first block.
        mlp: as x, or None: nothing.
    """

    x: Tensor
    attended: Tensor
    mlp: Tensor | None


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
    own = {"forward": forward, NORM: norm, ATTEND: attend, ADD_NORM: add_norm, ADD: add, SUM_NORM: sum_norm}
    for name, function in own.items():
        if name in parts or name not in vars(block):
            rebind(block, name, parts.get(name, function))


def is_in_parts(block: nn.Module) -> bool:
    """Whether a block runs in parts, rather than by its class's forward or one that somebody else put there."""
    return bound(block, "forward") is forward


def forward(self: Any, x: Tensor | Unsummed, deferred: bool = False) -> Tensor | Unsummed:
    """The block over tokens [B, H, W, C]; returns [B, H, W, C], or, deferred, what is to be added up to that."""
    if isinstance(x, Unsummed):
        total, normed = self._samopt_sum_norm(x)
    else:
        total, normed = x, self._samopt_norm(x)
    attended = self._samopt_attend(normed)
    mlp = self.mlp(self._samopt_add_norm(total, attended))
    if deferred:
        return Unsummed(total, attended, mlp)
    out: Tensor = self._samopt_add(total, attended, mlp)
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


def sum_norm(self: Any, terms: Unsummed) -> tuple[Tensor, Any]:
    """The sum of what the block before left, [B, H, W, C], and the first norm of it."""
    x = terms.x + terms.attended if terms.mlp is None else terms.x + terms.attended + terms.mlp
    return x, self._samopt_norm(x)
