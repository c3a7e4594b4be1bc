"""The image encoder's attention through Triton kernels that work on the token grid as it is.

SAM's block copies windows out of the grid, filled up with zero tokens, attends in each, and copies them back. Here
the projections run on the grid's own tokens only, and the windows are index arithmetic in the kernels
(`samopt.passes.kernels.attention`). The result is the same: a token that SAM fills up with is zero after the norm, so
its query, key and value are the projection's bias. As keys such tokens still count; what they attend to is thrown
away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes import encoder_block
from samopt.passes.encoder_block import ATTEND, encoder_blocks, in_parts
from samopt.passes.kernels.attention import attention
from samopt.passes.kernels.attention_launch import Geometry
from samopt.passes.kernels.attention_problem import problem
from samopt.passes.kernels.devices import cannot_run, not_half
from samopt.passes.kernels.tuning import choose
from samopt.passes.quantized_linear import quantized_already
from samopt.passes.rel_pos import distances
from samopt.rebind import clone, mark, marked
from samopt.result import Site, Skip
from samopt.structure import differs, encoder_attentions, join


@dataclass(frozen=True)
class TritonAttention(Pass):
    """Rewrites the encoder's blocks to attend through Triton kernels, windows and relative positions included.

    It needs a GPU of compute capability 8.0 or above, and weights in half precision: apply it after `CastDtype`. The
    kernels' configuration for this GPU and these shapes is looked up, or sought by `match`, in a dry run too: that
    takes up to a minute, once per machine. A block that the kernels do not fit is a Skip: what attends there now, goes
    on to. So it does where another module is put in the place of a rewritten block's `attn` or `qkv` later.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where Triton cannot run: no such GPU, or no Triton."""
        if reason := cannot_run(next(model.parameters()).device):
            raise Unsupported(reason, "leave triton_attention out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the encoder's blocks; those that the kernels do not fit are Skips."""
        attentions = {found.fqn if isinstance(found, Skip) else found[0]: found for found in encoder_attentions(model)}
        for found in encoder_blocks(model):
            if isinstance(found, Skip):
                yield found
                continue
            name, block, grid = found
            attention = attentions.get(join(name, "attn"))
            if attention is None:
                yield Skip(name, "it has no attention of the known form")
            elif isinstance(attention, Skip):
                yield Skip(name, attention.reason)
            else:
                yield _site_or_skip(name, attention[1], grid, block.window_size)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        mark(new.attn, new.attn.qkv)
        in_parts(new, **{ATTEND: attend})
        return new


def _site_or_skip(name: str, attn: Any, grid: tuple[int, int] | None, window: int) -> Site | Skip:
    if not attn.use_rel_pos:
        return Skip(name, "it has no relative positions")
    if differs(attn.qkv, "forward", nn.Linear.forward):
        if reason := quantized_already(attn.qkv):
            return Skip(name, f"qkv: {reason}")
        return Skip(name, "its qkv is no plain linear layer: what it makes of a zero token cannot be told")
    if reason := not_half(attn.rel_pos_h.dtype):
        return Skip(name, reason)
    if grid is None:
        return Skip(name, "the encoder does not say its image size")
    rows, columns = (window, window) if window else grid
    geometry = Geometry(*grid, rows, columns, attn.num_heads, attn.rel_pos_h.shape[-1])
    if reason := geometry.unfit():
        return Skip(name, reason)
    device = attn.rel_pos_h.device
    if device.type == "cuda":
        try:
            choose(problem(geometry, attn.rel_pos_h.dtype, device))
        except Unsupported as failure:
            return Skip(name, failure.reason)
    return Site(name, {"grid": grid, "window": (rows, columns)})


def attend(self: Any, x: Tensor) -> Tensor:
    """The block's attention of normed tokens [B, H, W, C]; returns [B, H, W, C]."""
    attn = self.attn
    if not (marked(attn) and marked(attn.qkv)):  # another module stands in its place now
        return encoder_block.attend(self, x)
    out: Tensor = attn.proj(attended(self, x))
    return out


def attended(self: Any, x: Any, out_scale: Tensor | None = None) -> Tensor:
    """The same before the last projection: what `qkv` takes, in; see `attention` for the scale."""
    attn = self.attn
    qkv, bias = attn.qkv(x), attn.qkv.bias
    rows, columns = (self.window_size, self.window_size) if self.window_size else qkv.shape[1:3]
    padding = qkv.new_zeros(qkv.shape[-1]) if bias is None else bias.to(qkv.dtype)
    rel_pos_h, rel_pos_w = (
        distances(table, size).to(qkv.dtype) for table, size in ((attn.rel_pos_h, rows), (attn.rel_pos_w, columns))
    )
    return attention(qkv, padding, rel_pos_h, rel_pos_w, attn.num_heads, rows, columns, attn.scale, out_scale)
