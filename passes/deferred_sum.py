"""The sum that ends an encoder block, left to the next block's first norm.

A block ends by adding up three tensors, and the next begins by reading the sum for its norm. Done in one kernel, the
sum is written once and not read again for that: one of six passes over the tokens, 1 % of the encoder's time on an
H200. The position embedding is added by the first block's norm in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from samopt.base import Numerics, Pass, Phase
from samopt.passes.encoder_block import Unsummed, encoder_blocks, in_parts, is_in_parts
from samopt.rebind import clone, rebind_inside
from samopt.result import Site, Skip
from samopt.structure import differs, encoders


@dataclass(frozen=True)
class DeferredSum(Pass):
    """Rewrites the image encoder to pass what a block adds up on to the next block, which adds it in its first norm.

    A block with hooks, or next to one that has some or that somebody put in later, is given and gives sums, as in the
    unmodified model; so does every block that is called alone.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the image encoders and their blocks; those whose code is not SAM's are Skips."""
        from segment_anything.modeling import ImageEncoderViT

        left_alone = set()
        for fqn, encoder in encoders(model):
            if reason := differs(encoder, "forward", ImageEncoderViT.forward):
                left_alone.add(fqn)
                yield Skip(fqn, reason)
            else:
                yield Site(fqn)
        for found in encoder_blocks(model):
            if isinstance(found, Skip):
                yield found
            elif found[0].rpartition(".blocks.")[0] not in left_alone:
                yield Site(found[0])

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        if hasattr(new, "blocks"):
            rebind_inside(new, "forward", forward)
        else:
            in_parts(new)
        return new


def forward(self: Any, x: Tensor) -> Tensor:
    """SAM's image encoder over pixels [B, 3, H, W]; returns features [B, C, h, w]."""
    x = self.patch_embed(x)
    blocks = list(self.blocks)
    takes = [*map(takes_unsummed, blocks), False]
    held: Any = x
    if self.pos_embed is not None:
        held = Unsummed(x, self.pos_embed, None) if takes[0] else x + self.pos_embed
    for block, this, following in zip(blocks, takes, takes[1:], strict=False):
        held = block(held, deferred=True) if this and following else block(held)
    out: Tensor = self.neck(held.permute(0, 3, 1, 2))
    return out


def takes_unsummed(block: nn.Module) -> bool:
    """Whether a block may be given, and give, terms and not their sum: it runs in parts, and no hook sees what it gets
    or gives."""
    if not is_in_parts(block) or _has_any_global_hook():
        return False
    seen: tuple[Any, ...] = (block, block.norm1)
    return not any(module._forward_hooks or module._forward_pre_hooks for module in seen)
