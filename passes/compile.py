"""The image encoder, and the mask decoder where asked, through torch.compile, in place.

`module.compile()` keeps the module, its state_dict keys and its hooks, where `torch.compile(module)` would wrap it and
rename the keys. Compiled block by block, blocks of one kind (windowed, global) share one compilation, so that 32
blocks cost two, or four where sums are deferred; compiled whole, TorchInductor also fuses across blocks, and compiles
each of them. Where kernels of samopt's own do all that is heavy, CUDA graphs alone leave nothing to compile.

Each batch size, dtype, and grad mode compiles anew: so batches are brought to a few sizes (`samopt.passes.batches`).
The limit on recompilations counts for one piece of code over all models of the process, and past it PyTorch would run
uncompiled with only a warning: the pass raises that limit, and with `fullgraph=True` hitting it, or any graph break,
is an error.

The decoder is compiled once for any number of prompts and points: only a single prompt, as PyTorch specialises on 1,
and none of each have code of their own. It is `forward` that is compiled; `predict_masks`, which the ONNX export calls
directly and traces, stays as it is.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._triton import has_triton

from samopt.base import Numerics, Pass, Phase
from samopt.errors import InvalidInput, SamoptError, Unsupported
from samopt.passes.batches import Batches, encode
from samopt.passes.cuda_graphs import CudaGraphs
from samopt.passes.decoding import KEPT_BYTES, FewPrompts, decode, encode_prompts
from samopt.rebind import bind_methods, clone
from samopt.result import Site, Skip
from samopt.structure import differs, encoders, is_encoder, join, mask_decoders, prompt_encoders

# What answers prompts, by the kind of site: what errors call it, and what runs it.
PROMPTED: dict[str, tuple[str, Callable[..., Any]]] = {
    "prompts": ("the prompt encoder", encode_prompts),
    "decoder": ("the mask decoder", decode),
}


@dataclass(frozen=True)
class Compile(Pass):
    """Compiles the image encoder with TorchInductor, unless `scope` leaves it, and the mask decoder where asked.

    The compilation itself happens at the first call.

    A deep copy or an unpickled model is not compiled (PyTorch drops it): apply `Compile()` to it again.

    An encoder whose own code is not SAM's takes its batches as they come, without CUDA graphs. So does one with hooks,
    in it or in its modules, as long as it has them: they are called as in the unmodified model. A decoder whose own
    code is not SAM's is left as it is.

    Attributes:
        scope: "block" compiles patch embedding, every block and the neck; "encoder" the encoder as a whole; "none"
            compiles nothing, the decoder neither: there are CUDA graphs, or, without those, batch sizes only.
        mode: "default", or "max-autotune" to time kernel candidates while compiling.
        batch_sizes: the batch sizes to compile for, rising. A larger batch runs in pieces of the last; what is left of
            it, like any other batch, is filled up with zero images to the next size, and the features are cut back.
        cuda_graphs: replay the whole encoder as a CUDA graph, one for each batch size, captured at its first call; with
            `decoder` also the mask decoder and the prompt encoder, for up to 64 prompts, one for each number of points,
            and of prompts, which are filled up to a power of two, captured when it comes again. "auto" where the model
            is on a GPU when the pass runs. Where gradients are wanted, under autocast, and inside a capture of the
            caller's own, they run without, and with a warning where a capture fails. What is returned is copied out of
            the graph's buffers: the features of one image do not change when the next is encoded. Threads and streams
            may share the model; they take turns. Weights may be loaded, moved or replaced, and modules and hooks put in
            or taken out. Other changes of a module that was captured, as a forward that is bound anew or a norm's
            `eps`, are not seen: undo Compile and apply it again.
        decoder: compile the mask decoder too: two compilations, for one prompt and for several, for each of multimask
            output and single, with mask prompts and without; and the prompt encoder, which is small kernels mostly, two
            for each of points, boxes and both. "auto" where the model is on a GPU when the pass runs: on a CPU a
            decoder takes ten seconds, and gains little.
        recompile_limit: compilations allowed for one piece of code, all models of the process together.
    """

    scope: Literal["block", "encoder", "none"] = "block"
    mode: Literal["default", "max-autotune"] = "default"
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    cuda_graphs: bool | Literal["auto"] = False
    decoder: bool | Literal["auto"] = False
    recompile_limit: int = 128

    phase: ClassVar[Phase] = Phase.COMPILE
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(later <= size for size, later in itertools.pairwise(sizes)):
            raise InvalidInput(f"Compile: batch_sizes must be positive and rise, as (1, 2, 4) do, not {sizes}")
        if self.recompile_limit < 1:
            raise InvalidInput(f"Compile: recompile_limit must be at least 1, not {self.recompile_limit}")

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where TorchInductor cannot build code: no compiler, no Triton, no GPU for a graph."""
        device = next(model.parameters()).device.type
        if self.cuda_graphs is True and device != "cuda":
            raise Unsupported(f"CUDA graphs need a GPU and the model is on {device}", "leave cuda_graphs out")
        if self.scope == "none":
            return
        if device == "cpu" and not _cpp_compiler():
            raise Unsupported("TorchInductor found no C++ compiler", "install g++ or clang, or set CXX")
        if device == "cuda" and not has_triton():
            raise Unsupported("TorchInductor found no Triton for this GPU", "install triton, or leave compile out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the encoder and, of scope "block", its patch embedding, blocks and neck.

        An encoder with other code than SAM's is a Skip too: batches and graphs are for SAM's.
        """
        for fqn, encoder in encoders(model):
            reason = _differs(encoder)
            if reason:
                yield Skip(fqn, f"it takes its batches as they come, without CUDA graphs: {reason}")
            if not reason or self.scope == "encoder":
                yield Site(fqn)
            if self.scope == "block":
                names = ["patch_embed", *(f"blocks.{index}" for index in range(len(encoder.blocks))), "neck"]
                yield from (Site(join(fqn, name)) for name in names)
        prompts = ((fqn, "prompts", module, _prompts_differ) for fqn, module in prompt_encoders(model))
        decoders = ((fqn, "decoder", module, _decoder_differs) for fqn, module in mask_decoders(model))
        for fqn, kind, module, differ in (*prompts, *decoders):
            wanted = self.decoder is True or (self.decoder == "auto" and next(module.parameters()).is_cuda)
            if wanted and (self.scope != "none" or self._captured(module)):
                reason = differ(module)
                yield Skip(fqn, f"it is not compiled: {reason}") if reason else Site(fqn, {"kind": kind})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        if site.facts:
            name, run = PROMPTED[site.facts["kind"]]
            few = FewPrompts(CudaGraphs(name, keep=KEPT_BYTES, at_once=False) if self._captured(module) else None)
            call = new._call_impl if self.scope == "none" else self.compiled(new)
            new._compiled_call_impl = functools.partial(run, few, new, call)
            return new
        whole = is_encoder(module)
        call = new._call_impl
        if self.scope == "encoder" or (self.scope == "block" and not whole):
            call = self.compiled(new)
        if whole and not _differs(module):
            batches = Batches(self.batch_sizes, CudaGraphs("the image encoder") if self._captured(module) else None)
            call = functools.partial(encode, batches, new, call)
        new._compiled_call_impl = call
        return new

    def _captured(self, module: nn.Module) -> bool:
        """Whether a module gets CUDA graphs."""
        return self.cuda_graphs is True or (self.cuda_graphs == "auto" and next(module.parameters()).is_cuda)

    def compiled(self, module: nn.Module) -> Callable[..., Any]:
        """Compiles `module`, a clone, in place, anew for each shape; returns what calls it, hooks included."""
        bind_methods(module)
        module.compile(fullgraph=True, dynamic=False, options=self._inductor_options())
        call: Any = module._compiled_call_impl
        return functools.partial(call_compiled, call, self.recompile_limit)

    def _inductor_options(self) -> dict[str, Any]:
        # Graphs of TorchInductor's own, which the environment may ask for, would overwrite features kept by the caller.
        # What would pad is the product with the 4 weights of masks: timed while compiling, for some numbers of prompts,
        # and so guarded, with a compilation more for others.
        options: dict[str, Any] = {"triton.cudagraphs": False, "shape_padding": False}
        if self.mode == "max-autotune":
            options |= torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
        return options


def _differs(encoder: nn.Module) -> str | None:
    from segment_anything.modeling import ImageEncoderViT

    return differs(encoder, "forward", ImageEncoderViT.forward)


def _decoder_differs(decoder: nn.Module) -> str | None:
    from segment_anything.modeling import MaskDecoder

    return differs(decoder, "forward", MaskDecoder.forward) or differs(
        decoder, "predict_masks", MaskDecoder.predict_masks
    )


def _prompts_differ(encoder: nn.Module) -> str | None:
    from segment_anything.modeling import PromptEncoder

    if reason := differs(encoder, "forward", PromptEncoder.forward):
        return reason
    if "_embed_points" not in vars(encoder):
        return "it reads with boolean masks, which depend on the prompts: apply where_indexing first"
    return None


def call_compiled(compiled: Callable[..., Any], limit: int, *args: Any, **kwargs: Any) -> Any:
    """Calls a compiled module. Raises SamoptError, where PyTorch would fall back to uncompiled code, at the limit."""
    config = torch._dynamo.config
    if config.recompile_limit < limit:  # set at the call, as each thread has its own values
        config.recompile_limit = limit
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * limit)
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise SamoptError(
            f"the compiled code met more kinds of input than this process may compile "
            f"({config.recompile_limit}: batch sizes, dtypes, grad modes, models); "
            "raise Compile(recompile_limit=...), or call torch._dynamo.reset() between models"
        ) from error


def _cpp_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)
