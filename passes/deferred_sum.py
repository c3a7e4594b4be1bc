"""The sum that ends an encoder block, left to the next block's first norm.

A block ends by adding up three tensors, and the next begins by reading the sum for its norm. Done in one kernel, the
sum is written once and not read again for that: one of six passes over the tokens, 1 % of the encoder's time on an
H200. That kernel is `TritonLayerNorm`'s, or that of a pass that quantises, or what torch.compile makes of the two; this
one adds the position embedding in the first block, too. Without one of these nothing is won.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.passes.encoder_block import Unsummed, encoder_blocks, in_parts, is_in_parts
from samopt.passes.parts import has_hooks
from samopt.rebind import clone, rebind_inside
from samopt.result import Site, Skip
from samopt.structure import differs, encoders, join


@dataclass(frozen=True)
class DeferredSum(Pass):
    """Rewrites the image encoder to pass what a block adds up on to the next block, which adds it in its first norm.

    A block with hooks, or next to one that has some or that somebody put in later, is given and gives sums, as in the
    unmodified model; so does every block that is called alone.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    between_blocks: ClassVar[bool] = True

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the image encoders and their blocks; those whose code is not SAM's are Skips."""
        from segment_anything.modeling import ImageEncoderViT

        blocks = list(encoder_blocks(model))
        for fqn, encoder in encoders(model):
            names = {join(fqn, f"blocks.{index}") for index in range(len(encoder.blocks))}
            inside = [Site(found[0]) for found in blocks if not isinstance(found, Skip) and found[0] in names]
            if reason := differs(encoder, "forward", ImageEncoderViT.forward):
                yield Skip(fqn, reason)
            elif len(inside) > 1:
                yield Site(fqn)
                yield from inside
            else:
                yield Skip(fqn, "it has no two blocks of SAM's code, of which one could leave its sum to the other")
        yield from (found for found in blocks if isinstance(found, Skip))

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
    """Whether a block may be given, and give, terms and not their sum: it runs in parts, and has no hooks that would
    see what it gets or gives."""
    return is_in_parts(block) and not has_hooks(block, block.norm1)
