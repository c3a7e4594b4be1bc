"""Linear layers in int8: for GPUs without float8, as A100 and RTX 30.

Weights are quantised once, by output channel; activations as they come, by token; both symmetric.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.kernels.devices import cannot_run
from samopt.passes.linears import ROLES, refuse_none
from samopt.passes.quantization import BLOCK, quantization_sites, quantize_module
from samopt.rebind import clone, unbind
from samopt.result import Site, Skip


@dataclass(frozen=True)
class Int8Dynamic(Pass):
    """Quantises linear layers to int8, dynamically.

    On a CPU the arithmetic is emulated, to see what it costs in accuracy.

    Attributes:
        layers: which linear layers, by role ("qkv", "proj", "lin1", "lin2" of the encoder's blocks; "decoder") or by
            patterns of dotted names, as "image_encoder.blocks.3.*".
        kernel: "triton" multiplies with scales, bias and GELU in one kernel of samopt's; "torchao" gives the weights to
            torchao's `Int8DynamicActivationInt8WeightConfig`, on CPU and GPU, and leaves the rest to torch.compile.
            Layers so quantised take no checkpoint later: load it before.
    """

    layers: tuple[str, ...] = tuple(ROLES)
    kernel: Literal["triton", "torchao"] = "triton"

    phase: ClassVar[Phase] = Phase.QUANTIZE
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_none("Int8Dynamic", self.layers)

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported on a GPU where Triton cannot run, and where torchao is asked for and not installed."""
        device = next(model.parameters()).device
        if self.kernel == "torchao":
            try:
                import torchao  # noqa: F401
            except ImportError as error:
                raise Unsupported(f"torchao cannot be imported ({error})", "pip install torchao") from error
        elif device.type == "cuda" and (reason := cannot_run(device)):
            raise Unsupported(reason, 'use Int8Dynamic(kernel="torchao")')

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the linear layers, and the blocks around them; layers that cannot be quantised are Skips."""
        for found in quantization_sites(model, self.layers):
            if self.kernel == "triton" or isinstance(found, Skip):
                yield found
            elif BLOCK not in found.facts:
                yield Site(found.fqn, {"kernel": "torchao"})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        if self.kernel == "triton":
            return quantize_module(module, site, torch.int8)
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        new = clone(module)
        unbind(new, "forward")  # a kernel of another pass cannot read torchao's weights
        quantize_(new, Int8DynamicActivationInt8WeightConfig(version=2, set_inductor_config=False))
        return new
