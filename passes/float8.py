"""Linear layers in float8: products of twice bfloat16's rate on a GPU of compute capability 8.9 or above.

Weights are quantised once, by output channel; activations as they come, by token. e4m3 has 4 significant bits, so
that a product of many errs by a few percent of one: on trained weights masks differ in some pixels at their borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.linears import ROLES, refuse_none
from samopt.passes.quantization import quantization_sites, quantize_module
from samopt.result import Site, Skip


@dataclass(frozen=True)
class Float8Dynamic(Pass):
    """Quantises linear layers to float8 (e4m3), dynamically.

    On a CPU the arithmetic is emulated in float32, to see what it costs in accuracy.

    Attributes:
        layers: which linear layers, by role ("qkv", "proj", "lin1", "lin2" of the encoder's blocks; "decoder") or by
            patterns of dotted names, as "image_encoder.blocks.3.*".
    """

    layers: tuple[str, ...] = tuple(ROLES)

    phase: ClassVar[Phase] = Phase.QUANTIZE
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_none("Float8Dynamic", self.layers)

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported on a GPU without float8 products."""
        device = next(model.parameters()).device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            gpu = torch.cuda.get_device_name(device)
            raise Unsupported(f"float8 needs compute capability 8.9, and {gpu} has less", "use int8")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the linear layers, and the blocks around them; layers that cannot be quantised are Skips."""
        yield from quantization_sites(model, self.layers)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return quantize_module(module, site, torch.float8_e4m3fn)
