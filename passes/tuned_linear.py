"""The linear layers of the encoder's blocks by the fastest of cuBLASLt's algorithms, found by measurement.

PyTorch takes the algorithm that cuBLASLt ranks first. It ranks by a model of the GPU, which on an H200 misses the best
by up to a tenth for some of SAM's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.kernels.devices import no_gpu, not_half
from samopt.passes.kernels.linear import linear
from samopt.passes.linears import linears
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip

ROLES = ("qkv", "proj", "lin2")  # lin1 is LinearGELU's


@dataclass(frozen=True)
class TunedLinear(Pass):
    """Rewrites `qkv`, `proj` and `lin2` of the encoder's blocks to products by a measured algorithm; on a GPU only, in
    half precision: apply it after `CastDtype`. (`LinearGELU` does so with `lin1`.)

    What is fastest is looked up, or sought at the first call of a shape: in a second, once per machine.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported on a CPU."""
        if reason := no_gpu(next(model.parameters()).device, "cuBLASLt needs"):
            raise Unsupported(reason, "leave tuned_linear out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the linear layers; those of another form, or not in half precision, are Skips."""
        for found in linears(model, ROLES):
            if isinstance(found, Skip):
                yield found
            elif reason := not_half(found[1].weight.dtype):
                yield Skip(found[0], reason)
            else:
                yield Site(found[0])

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        rebind(new, "forward", forward)
        return new


def forward(self: Any, x: Tensor) -> Tensor:
    """x W^T + b for x [..., K]: [..., N]."""
    if x.dtype is not self.weight.dtype:  # under autocast
        return F.linear(x, self.weight, self.bias)
    return linear(x, self.weight, self.bias, False)
