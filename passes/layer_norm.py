"""The layer norms of wide encoders through a kernel that reads its input once.

TorchInductor keeps rows of up to 1,024 in registers and reads wider ones again and again: on an H200 the norms of
vit_h, 1,280 wide, take three times what their bytes take. Up to 1,024 its own kernels are as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes import encoder_block
from samopt.passes.encoder_block import ADD, ADD_NORM, SUM_NORM, Unsummed, encoder_blocks, in_parts
from samopt.passes.kernels.devices import cannot_run
from samopt.passes.kernels.layer_norm import WIDEST, add_layer_norm, layer_norm, residual_sum, sum_layer_norm
from samopt.rebind import clone, mark, marked, rebind
from samopt.result import Site, Skip
from samopt.structure import differs


@dataclass(frozen=True)
class TritonLayerNorm(Pass):
    """Rewrites the layer norms of the encoder's blocks, where rows are wide, to a Triton kernel.

    The second norm adds the residual on the way, and the sum that ends a block is a kernel too, or, where it is left to
    the next block (see `DeferredSum`), inside that one's first norm. It needs a GPU of compute capability 8.0 or above.

    Attributes:
        wider_than: narrower rows are left to TorchInductor, which keeps up to 1,024 in registers.
    """

    wider_than: int = 1024

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where Triton cannot run: no such GPU, or no Triton."""
        if reason := cannot_run(next(model.parameters()).device):
            raise Unsupported(reason, "leave layer_norm out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the encoder's blocks; those with narrow norms, or norms of another form, are Skips."""
        for found in encoder_blocks(model):
            if isinstance(found, Skip):
                yield found
                continue
            name, block, _ = found
            reason = unfit_norm(block.norm1, self.wider_than) or unfit_norm(block.norm2, self.wider_than)
            yield Skip(name, reason) if reason else Site(name)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        rebind(new.norm1, "forward", norm)
        rebind(new.norm2, "forward", norm)
        mark(new.norm1, new.norm2)
        in_parts(new, **{ADD_NORM: add_norm, ADD: add, SUM_NORM: sum_norm})
        return new


def unfit_norm(module: nn.Module, wider_than: int = 0) -> str | None:
    """Why the kernel does not take a module's place, or None if it does."""
    if reason := differs(module, "forward", nn.LayerNorm.forward):
        return reason
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or weight.dim() != 1:
        return "its norms are not over the last dimension alone, with weight and bias"
    if len(weight) <= wider_than:
        return f"its rows of {len(weight)} are fast as they are, TorchInductor keeps them in registers"
    return f"its rows of {len(weight)} are wider than {WIDEST}" if len(weight) > WIDEST else None


def norm(self: Any, x: Tensor) -> Tensor:
    """Layer norm of x [..., C]."""
    return layer_norm(x, self.weight, self.bias, self.eps)


def add_norm(self: Any, x: Tensor, attended: Tensor) -> Tensor:
    """The block's second norm, of x + attended, [B, H, W, C]."""
    if not marked(self.norm2):  # another module stands in its place now
        return encoder_block.add_norm(self, x, attended)
    return add_layer_norm(x, attended, self.norm2.weight, self.norm2.bias, self.norm2.eps)


def add(self: Any, x: Tensor, attended: Tensor, mlp: Tensor) -> Tensor:
    """The sum that ends the block, [B, H, W, C]."""
    return residual_sum(x, attended, mlp)


def sum_norm(self: Any, terms: Unsummed) -> tuple[Tensor, Any]:
    """The sum of what the block before left, [B, H, W, C], and the first norm of it."""
    if not marked(self.norm1) or terms.mlp is None:
        return encoder_block.sum_norm(self, terms)
    return sum_layer_norm(*terms, self.norm1.weight, self.norm1.bias, self.norm1.eps)
