"""The image encoder through torch.compile, in place.

`module.compile()` keeps the module, its state_dict keys and its hooks, where `torch.compile(module)` would wrap it and
rename the keys. Compiled block by block, blocks of one kind (windowed, global) share one compilation, so that 32
blocks cost two; compiled whole, TorchInductor also fuses across blocks, and compiles each of them.

Each batch size, dtype, and grad mode compiles anew. The limit on recompilations counts for one piece of code over all
models of the process, and past it PyTorch would run uncompiled with only a warning: the pass raises that limit, and
with `fullgraph=True` hitting it, or any graph break, is an error.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from samopt.base import Numerics, Pass, Phase
from samopt.errors import InvalidInput, SamoptError, Unsupported
from samopt.rebind import bind_methods, clone
from samopt.result import Site, Skip
from samopt.structure import encoders, join


@dataclass(frozen=True)
class Compile(Pass):
    """Compiles the image encoder with TorchInductor. The compilation itself happens at the first call.

    A deep copy or an unpickled model is not compiled (PyTorch drops it): apply `Compile()` to it again.

    Attributes:
        scope: "block" compiles patch embedding, every block and the neck; "encoder" the encoder as a whole.
        mode: "default", or "max-autotune" to time kernel candidates while compiling.
        cuda_graphs: replay the encoder as a CUDA graph; scope "encoder" on a GPU only. Its outputs are copied out of
            the graph's buffers, so features kept from one image do not change when the next is encoded.
        recompile_limit: compilations allowed for one piece of code, all models of the process together.
    """

    scope: Literal["block", "encoder"] = "block"
    mode: Literal["default", "max-autotune"] = "default"
    cuda_graphs: bool = False
    recompile_limit: int = 64

    phase: ClassVar[Phase] = Phase.COMPILE
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graphs and self.scope != "encoder":
            raise InvalidInput('Compile: cuda_graphs=True needs scope="encoder": a graph per block saves nothing')
        if self.recompile_limit < 1:
            raise InvalidInput(f"Compile: recompile_limit must be at least 1, not {self.recompile_limit}")

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where TorchInductor cannot build code: no compiler, no Triton, no GPU for a graph."""
        device = next(model.parameters()).device.type
        if self.cuda_graphs and device != "cuda":
            raise Unsupported(f"CUDA graphs need a GPU and the model is on {device}", "leave cuda_graphs out")
        if device == "cpu" and not _cpp_compiler():
            raise Unsupported("TorchInductor found no C++ compiler", "install g++ or clang, or set CXX")
        if device == "cuda" and not has_triton():
            raise Unsupported("TorchInductor found no Triton for this GPU", "install triton, or leave compile out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the encoder, or its patch embedding, blocks and neck."""
        for fqn, encoder in encoders(model):
            names = ["patch_embed", *(f"blocks.{index}" for index in range(len(encoder.blocks))), "neck"]
            for name in names if self.scope == "block" else [""]:
                yield Site(join(fqn, name))

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        options: dict[str, Any] = {"triton.cudagraphs": self.cuda_graphs}
        if self.mode == "max-autotune":
            options |= torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
        new: Any = clone(module)
        bind_methods(new)
        new.compile(fullgraph=True, dynamic=False, options=options)
        call = copy_out_of_graph if self.cuda_graphs else call_compiled
        new._compiled_call_impl = functools.partial(call, new._compiled_call_impl, self.recompile_limit)
        return new


def call_compiled(compiled: Callable[..., Tensor], limit: int, *args: Any, **kwargs: Any) -> Tensor:
    """Calls a compiled module. Raises SamoptError, where PyTorch would fall back to uncompiled code, at the limit."""
    config = torch._dynamo.config
    if config.recompile_limit < limit:  # set at the call, as each thread has its own values
        config.recompile_limit = limit
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * limit)
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise SamoptError(
            f"the compiled image encoder met more kinds of input than this process may compile "
            f"({config.recompile_limit}: batch sizes, dtypes, grad modes, models); "
            "raise Compile(recompile_limit=...), or call torch._dynamo.reset() between models"
        ) from error


def copy_out_of_graph(compiled: Callable[..., Tensor], limit: int, *args: Any, **kwargs: Any) -> Tensor:
    """Calls a module compiled with CUDA graphs; returns a tensor that the next replay does not overwrite."""
    torch.compiler.cudagraph_mark_step_begin()
    return call_compiled(compiled, limit, *args, **kwargs).clone()


def _cpp_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)
