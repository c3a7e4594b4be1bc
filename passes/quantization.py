"""What the quantising passes share: which modules they rewrite, and what is fused around the linear layers.

The input of a quantised product is quantised by what comes before it, while that has it in registers: the norms give
quantised rows to `qkv` and `lin1`, and GELU, moved to the entry of `lin2`, gives them to it.

In float8 the attention and `lin1` write float8 themselves. Rows then have one scale, known before they are computed. A
norm's rows have at most the length sqrt(C) before its weight gamma and bias beta, so that by Cauchy and Schwarz

    |w . norm(x) + b| <= sqrt(C) |w * gamma| + |w . beta + b|

and somewhat more with w and norm(x) rounded. What the attention gives is a mean of such values, and GELU makes none
larger. That bound is several times what occurs; but float8 has an exponent, and loses nothing until values are some ten
thousand times smaller than the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samopt.passes import encoder_block, linear_gelu, triton_attention
from samopt.passes.encoder_block import ADD, ADD_NORM, ATTEND, NORM, SUM_NORM, Unsummed, encoder_blocks, in_parts
from samopt.passes.kernels.float8_gelu import float8_gelu
from samopt.passes.kernels.quantized_rows import (
    LEAST,
    LIMITS,
    Rows,
    layer_norm_rows,
    quantize_rows,
    sum_layer_norm_rows,
)
from samopt.passes.layer_norm import add, unfit_norm
from samopt.passes.linears import linears
from samopt.passes.quantized_linear import QuantizedLinear, takes_rows, unfit, weight_of
from samopt.rebind import bound, clone, mark, marked, rebind
from samopt.result import Site, Skip
from samopt.structure import differs, join

FLOAT8 = torch.float8_e4m3fn
BLOCK = "quantized"  # the fact of a site that is a block: which of its layers are quantised
SCALE = "result_scale"  # a buffer of `attn` and `mlp`: what their float8 results are divided by
ROUNDING = (1 + 2.0**-4) ** 2 - 1  # what products of weights and inputs are off by at most, both rounded to float8
FED_BY = {"attn.qkv": "norm1", "mlp.lin1": "norm2"}


def quantization_sites(model: nn.Module, layers: tuple[str, ...]) -> Iterator[Site | Skip]:
    """The linear layers to quantise, and the encoder's blocks around them."""
    facts: Mapping[str, Any] = {} if next(model.parameters()).is_cuda else {"emulated": True}
    found = []
    for layer in linears(model, layers):
        if isinstance(layer, Skip):
            yield layer
            continue
        name, linear = layer
        if reason := unfit(linear):
            yield Skip(name, reason)
            continue
        found.append(name)
        yield Site(name, facts)
    for block in encoder_blocks(model):
        if not isinstance(block, Skip) and (inner := _inside(block[0], found)):
            yield Site(block[0], {**facts, BLOCK: ", ".join(inner)})


def _inside(block: str, found: list[str]) -> list[str]:
    names = ("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")
    return [name for name in names if join(block, name) in found]


def quantize_module(module: nn.Module, site: Site, dtype: torch.dtype) -> nn.Module:
    """The replacement of a linear layer, or of a block whose parts are to give quantised rows."""
    if BLOCK in site.facts:
        return _give_rows(module, site.facts[BLOCK].split(", "), dtype)
    new = QuantizedLinear(module, dtype)
    mark(new)
    return new


def _give_rows(block: Any, quantized: list[str], dtype: torch.dtype) -> nn.Module:
    from segment_anything.modeling.common import MLPBlock

    new: Any = clone(block)
    attn, mlp = new.attn, new.mlp
    parts: dict[str, Any] = {}
    attends = bound(new, ATTEND) is triton_attention.attend
    if attends and "attn.qkv" in quantized and not unfit_norm(new.norm1):
        parts[NORM], parts[SUM_NORM] = norm, sum_norm
        mark(new.norm1)
        if dtype is FLOAT8 and "attn.proj" in quantized:
            parts[ATTEND] = attend
    if not differs(mlp, "forward", MLPBlock.forward):
        if "mlp.lin1" in quantized and not unfit_norm(new.norm2):
            parts[ADD_NORM] = add_norm
            mark(new.norm2, mlp)
        if (
            "mlp.lin2" in quantized
            and not differs(mlp.act, "forward", nn.GELU.forward)
            and mlp.act.approximate == "none"
        ):
            fused = bound(mlp, "forward") is linear_gelu.mlp
            rebind(mlp, "forward", fused_mlp_of_rows if fused else mlp_of_rows)
            mark(mlp.act)
    in_parts(new, **parts, **{ADD: add})
    if dtype is FLOAT8:
        for part, given in ((attn, ATTEND in parts), (mlp, ADD_NORM in parts and "mlp.lin2" in quantized)):
            if given:
                part.register_buffer(SCALE, torch.ones((), device=new.norm1.weight.device), persistent=False)
        set_scales(new)
        new.register_load_state_dict_post_hook(set_scales)
    return new


@torch.no_grad()
def set_scales(block: Any, incompatible_keys: Any = None) -> None:
    """Computes the scales from a block's weights, at first and when the block, or what holds it, has loaded others.

    In place, so that compiled code and CUDA graphs see them, unless `load_state_dict(assign=True)` has brought another
    device. A layer that gives zeros only has a scale too.
    """
    for name, norm in FED_BY.items():
        part, linear = block.get_submodule(name.partition(".")[0]), block.get_submodule(name)
        if (scale := getattr(part, SCALE, None)) is None:
            continue
        new = largest(linear, block.get_submodule(norm)).clamp(min=LEAST) / LIMITS[FLOAT8]
        if scale.device == new.device:
            scale.copy_(new)
        else:
            setattr(part, SCALE, new)


def largest(linear: Any, norm: Any) -> Tensor:
    """A bound of what a linear layer gives of a norm's rows and of zeros, rounded to float8: a float32 number."""
    weight, gamma, beta = weight_of(linear), norm.weight.float(), norm.bias.float()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.float()
    of_rows = (1 + ROUNDING) * len(gamma) ** 0.5 * (weight * gamma).norm(dim=1)
    of_rows += (weight @ beta + bias).abs() + ROUNDING * (weight.abs() @ beta.abs())
    return torch.maximum(of_rows, bias.abs()).max()


def norm(self: Any, x: Tensor) -> Tensor | Rows:
    """The block's first norm, of x [B, H, W, C], as `qkv` takes it."""
    if not _gives_rows(self):
        return encoder_block.norm(self, x)
    return _norm_rows(self.norm1, x, None, self.attn.qkv)


def sum_norm(self: Any, terms: Unsummed) -> tuple[Tensor, Any]:
    """The sum of what the block before left, [B, H, W, C], and the first norm of it, as `qkv` takes it."""
    if terms.mlp is None or not _gives_rows(self):
        return encoder_block.sum_norm(self, terms)
    norm1, dtype = self.norm1, self.attn.qkv.weight.dtype
    x, values, scales = sum_layer_norm_rows(*terms, norm1.weight, norm1.bias, norm1.eps, dtype)
    return x, Rows(values, scales)


def _gives_rows(block: Any) -> bool:
    """Whether norm and attention still are those that the pass saw."""
    attn = block.attn
    return marked(block.norm1, attn) and marked(attn.qkv) and takes_rows(attn.qkv)


def attend(self: Any, x: Any) -> Tensor:
    """`triton_attention.attend`, with what it gives in float8 for `proj`."""
    attn = self.attn
    if not (isinstance(x, Rows) and marked(attn.proj) and takes_rows(attn.proj)):
        return triton_attention.attend(self, x)
    scale = getattr(attn, SCALE)
    attended = triton_attention.attended(self, x, scale)
    out: Tensor = attn.proj(Rows(attended, scale.expand(*attended.shape[:-1], 1)))
    return out


def add_norm(self: Any, x: Tensor, attended: Tensor) -> Tensor | Rows:
    """The block's second norm, of x + attended, [B, H, W, C], as `lin1` takes it."""
    if not (marked(self.norm2, self.mlp) and takes_rows(self.mlp.lin1)):
        return encoder_block.add_norm(self, x, attended)
    return _norm_rows(self.norm2, x, attended, self.mlp.lin1)


def _norm_rows(norm: Any, x: Tensor, residual: Tensor | None, consumer: Any) -> Rows:
    return Rows(*layer_norm_rows(x, residual, norm.weight, norm.bias, norm.eps, consumer.weight.dtype))


def mlp_of_rows(self: Any, x: Any) -> Tensor:
    """SAM's MLP over [..., C]: GELU quantised for `lin2`, as long as both are those that the pass saw."""
    if marked(self.act) and takes_rows(self.lin2):
        return _mlp(self, x)
    return self.lin2(self.act(self.lin1(x)))


def fused_mlp_of_rows(self: Any, x: Any) -> Tensor:
    """The same, of an MLP that LinearGELU rewrote."""
    return _mlp(self, x) if marked(self.act) and takes_rows(self.lin2) else linear_gelu.mlp(self, x)


def _mlp(self: Any, x: Tensor | Rows) -> Tensor:
    scale = getattr(self, SCALE, None)
    if scale is not None and isinstance(x, Rows) and marked(self.lin1):
        hidden = float8_gelu(*x, self.lin1.weight, self.lin1.weight_scale, self.lin1.bias, scale)
        return self.lin2(Rows(hidden, scale.expand(*hidden.shape[:-1], 1)))
    return self.lin2(Rows(*quantize_rows(self.lin1(x), self.lin2.weight.dtype, gelu=True)))
