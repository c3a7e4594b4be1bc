"""The compiled prompt encoder and mask decoder: one compilation for any number of prompts, CUDA graphs for few.

A decoder of few prompts is some 100 kernels of a few microseconds, which take longer to launch than to run: to a person
who places one point after another, that is the time of an answer. As CUDA graphs they are launched at once. Prompts do
not mix, so that their number is filled up to a power of two: there are few graphs, whatever numbers come. Of many
prompts the kernels are long, and a graph would only hold memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from samopt.passes.batches import fill_up
from samopt.passes.cuda_graphs import Call, CudaGraphs
from samopt.passes.mask_decoder import shared
from samopt.passes.parts import Parts, PartsOf

FEW_PROMPTS = 64
FEW_BYTES = 64 << 20  # of inputs, which a graph keeps copies of: 16 images or masks of SAM's, one of each as a rule
KEPT_BYTES = 512 << 20  # of all graphs' inputs and outputs: of 64 prompts 60 MiB, of one 9


class FewPrompts:
    """What one module remembers between calls: what is in it, and CUDA graphs for few prompts. Threads may share it.

    Attributes:
        graphs: of the module; None where it runs without.
        parts: lists what is in it.
    """

    def __init__(self, graphs: CudaGraphs | None = None) -> None:
        self.graphs, self.parts = graphs, PartsOf()

    def run(self, call: Call, inputs: Sequence[Tensor], parts: Parts, kind: Hashable) -> tuple[Tensor, ...]:
        """Returns what `call(*inputs)` does, through a graph where there is, or is to be, one.

        Args:
            call: what runs the module.
            inputs: tensors of one device, of each answer, [N, ...], or of all, [1, ...].
            parts: of the module.
            kind: what else `call` depends on.
        """
        lengths = {len(given) for given in inputs}
        count = max(lengths)
        few = 0 not in lengths and count <= FEW_PROMPTS and sum(given.nbytes for given in inputs) <= FEW_BYTES
        if self.graphs is not None and few and self.graphs.may_stand_for(inputs, parts):
            size = 1 << (count - 1).bit_length()
            filled = [fill_up(given, size) if len(given) == count != size else given for given in inputs]
            return self.graphs.replay(call, filled, parts, kind=kind, count=count)
        return call(*inputs)


def encode_prompts(
    few: FewPrompts,
    module: Any,
    call: Callable[..., tuple[Tensor, Tensor]],
    points: tuple[Tensor, Tensor] | None,
    boxes: Tensor | None,
    masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Calls a compiled prompt encoder: one compilation serves any number of prompts, and of points.

    Masks are embedded by convolutions, for which PyTorch compiles anew as their batch grows: these run as they are.
    With a hook anywhere in it nothing is compiled: hooks are called as in the unmodified model.

    Args:
        few: what it remembers.
        module: the prompt encoder.
        call: what calls the compiled one, hooks included.
        points: as in SAM, and the others likewise.
        boxes: likewise.
        masks: likewise.

    Returns:
        Sparse and dense embeddings.
    """
    parts = few.parts(module)
    if (points is None and boxes is None) or parts.hooked():
        uncompiled: tuple[Tensor, Tensor] = module._call_impl(points, boxes, masks)
        return uncompiled
    inputs = [*(points or ()), *(() if boxes is None else (boxes,))]
    given = points is not None, boxes is not None
    sparse, dense = few.run(functools.partial(_encode, call, *given), inputs, parts, given)
    return sparse, dense if masks is None else module._embed_masks(masks)


def _encode(
    call: Callable[..., tuple[Tensor, Tensor]], with_points: bool, with_boxes: bool, *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    points = (_dynamic(inputs[0], 0, 1), _dynamic(inputs[1], 0, 1)) if with_points else None
    return call(points, _dynamic(inputs[-1], 0) if with_boxes else None, None)


def decode(
    few: FewPrompts,
    module: Any,
    call: Callable[..., tuple[Tensor, Tensor]],
    image_embeddings: Tensor,
    image_pe: Tensor,
    sparse_prompt_embeddings: Tensor,
    dense_prompt_embeddings: Tensor,
    multimask_output: bool,
) -> tuple[Tensor, Tensor]:
    """Calls a compiled mask decoder: one compilation serves any number of prompts, and of points.

    The image side is cut to what differs, so that the code sees either one or as many as there are prompts. With a hook
    anywhere in it nothing is compiled: hooks are called as in the unmodified model.

    Args:
        few: what it remembers.
        module: the mask decoder.
        call: what calls the compiled one, hooks included.
        image_embeddings: as in SAM, and the others likewise.
        image_pe: likewise.
        sparse_prompt_embeddings: [N, T, C].
        dense_prompt_embeddings: [N, C, h, w].
        multimask_output: likewise.

    Returns:
        Logits and predicted IoU.
    """
    parts, sparse = few.parts(module), sparse_prompt_embeddings
    if parts.hooked():
        uncompiled: tuple[Tensor, Tensor] = module._call_impl(
            image_embeddings, image_pe, sparse, dense_prompt_embeddings, multimask_output
        )
        return uncompiled
    inputs = [shared(image_embeddings), image_pe, sparse, shared(dense_prompt_embeddings)]
    run = functools.partial(_decode, call, multimask_output)
    logits, iou = few.run(run, inputs, parts, multimask_output)
    return logits, iou


def _decode(
    call: Callable[..., tuple[Tensor, Tensor]],
    multimask_output: bool,
    image: Tensor,
    image_pe: Tensor,
    sparse: Tensor,
    dense: Tensor,
) -> tuple[Tensor, Tensor]:
    return call(_dynamic(image, 0), image_pe, _dynamic(sparse, 0, 1), _dynamic(dense, 0), multimask_output)


def _dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """A view of a tensor some of whose sizes torch.compile takes for any size; not for 0 and 1, which it never does.

    Where no gradient is wanted it is none of a parameter's either, so that all calls are alike to torch.compile. The
    caller's tensor carries no mark.
    """
    view = tensor.view(tensor.shape) if torch.is_grad_enabled() else tensor.detach()
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(view, dim)
    return view
