"""The encoder's MLP with its activation inside the first product.

GELU as a kernel of its own reads and writes the widest tensor of the model: 6 % of the encoder's time on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.kernels.devices import no_gpu
from samopt.passes.kernels.linear import linear as linear_operator
from samopt.passes.linears import no_linear
from samopt.rebind import clone, mark, marked, rebind
from samopt.result import Site, Skip
from samopt.structure import differs, encoders, join


@dataclass(frozen=True)
class LinearGELU(Pass):
    """Fuses the encoder's `lin1` and GELU; on a GPU only, in bfloat16: apply it after `CastDtype`.

    The activation takes its tanh form. It is off by 4.8e-4 at most, more than bfloat16 rounds small values, but far
    less than it rounds the products that follow (see `samopt.passes.kernels.linear`). The first layer computes
    both, and `act` passes its input on: hooks on them see that. Where another pass puts another first layer or
    activation in their place later, the MLP runs the two as SAM's does.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported on a CPU, where nothing is won."""
        if reason := no_gpu(next(model.parameters()).device, "its kernel needs"):
            raise Unsupported(reason, "leave linear_gelu out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the blocks' MLPs; those with another activation, or no plain linear layer, are Skips."""
        from segment_anything.modeling.common import MLPBlock

        for fqn, encoder in encoders(model):
            for index, block in enumerate(encoder.blocks):
                name = join(fqn, f"blocks.{index}.mlp")
                if not isinstance(mlp := getattr(block, "mlp", None), nn.Module):
                    continue
                reason = differs(mlp, "forward", MLPBlock.forward) or _unfit(mlp)
                yield Skip(name, reason) if reason else Site(name)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        rebind(new.lin1, "forward", linear)
        rebind(new.act, "forward", activation)
        rebind(new, "forward", mlp)
        mark(new.lin1, new.act)
        return new


def _unfit(mlp: Any) -> str | None:
    if reason := no_linear(mlp.lin1):
        return f"lin1: {reason}"
    if reason := differs(mlp.act, "forward", nn.GELU.forward):
        return f"act: {reason}"
    if mlp.act.approximate != "none":
        return f"its GELU is approximated already, by {mlp.act.approximate}"
    if mlp.lin1.bias is None:
        return "its lin1 has no bias"
    if mlp.lin1.weight.dtype is not torch.bfloat16:
        dtype = str(mlp.lin1.weight.dtype).removeprefix("torch.")
        return f"its weights are {dtype}, and GELU's tanh form is lost in bfloat16's rounding only: CastDtype does that"
    return None


def mlp(self: Any, x: Tensor) -> Tensor:
    """SAM's MLP over [..., C]: `lin1` computes the activation too, as long as both are those that the pass saw."""
    if marked(self.lin1, self.act):
        return self.lin2(self.act(self.lin1(x, gelu=True), computed=True))
    return self.lin2(self.act(self.lin1(x)))


def linear(self: Any, x: Tensor, gelu: bool = False) -> Tensor:
    """x W^T + b for x [..., K], or its GELU: [..., N]."""
    if gelu and self.weight.dtype is torch.bfloat16:
        x = x.to(torch.bfloat16)  # under autocast, a norm gives float32
        return linear_operator(x, self.weight, self.bias, True)
    y = F.linear(x, self.weight, self.bias)
    return F.gelu(y) if gelu else y


def activation(self: Any, x: Tensor, computed: bool = False) -> Tensor:
    """GELU of x, or x where `lin1` has computed it already."""
    return x if computed else F.gelu(x)
