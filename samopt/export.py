"""Packages compiled ahead of time: the image encoder at a few batch sizes, the mask decoder for any number of prompts.

`torch.export` traces both as the passes left them, samopt's own kernels as the operators they are, and AOTInductor
compiles them into shared libraries with their weights. A process that loads them traces and compiles nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from samopt.answers import record
from samopt.automatic_mask_generator import AutomaticMaskGenerator
from samopt.base import Pass
from samopt.batch_predictor import BatchPredictor
from samopt.errors import SamoptError, first_line
from samopt.kernel_cache import compiled
from samopt.rebind import clone
from samopt.save import ANSWERS, KERNELS, WEIGHTS, described, write_tensors
from samopt.saved_folder import Writer, check_target, write_folder

ENCODER, DECODER, SHARED_DECODER = "encoder_{}.pt2", "decoder.pt2", "shared_decoder.pt2"
MOST_PROMPTS, MOST_TOKENS = 1 << 16, 1 << 12


def export(
    model: nn.Module,
    folder: str | Path,
    batch_sizes: Sequence[int] = (1,),
    *,
    passes: Mapping[str, type[Pass]] | None = None,
) -> None:
    """Exports a model that `optimize` or `load` returned, for `load_exported`.

    That takes minutes, and needs what `Compile` needs: a C++ compiler on a CPU, Triton on a GPU. What comes out is code
    for this kind of processor or GPU, and for these versions of PyTorch and samopt.

    Args:
        model: it is left as it is. It need not be compiled.
        folder: where to, as in `save`.
        batch_sizes: for which the encoder is compiled, rising. Other batches are filled up to the next with zero
            images, or run in pieces of the largest.
        passes: passes of your own in its recipe, as in `save`.

    Raises:
        InvalidInput: batch sizes that are not positive, or do not rise.
        SavedModelError: as `save`.
        Unsupported: there is no compiler.
        SamoptError: a part of the model cannot be exported, and the message says why.
    """
    from samopt.passes import Compile
    from samopt.passes.kernels.tuning import found_here

    folder, sizes = Path(folder), tuple(batch_sizes)
    Compile(batch_sizes=sizes).requires(model)
    manifest, tensors = described(model, passes)
    check_target(folder)
    plain: Any = clone(model)  # uncompiled, as PyTorch leaves copies
    encoder, side = plain.image_encoder, plain.image_encoder.img_size
    files: dict[str, Writer] = {
        WEIGHTS: functools.partial(
            write_tensors, {name: value for name, value in tensors.items() if not name.startswith("image_encoder.")}
        ),
        ANSWERS: functools.partial(write_tensors, record(model)),
    }
    for size in sizes:
        pixels = torch.zeros(size, 3, side, side, device=plain.device)
        files[ENCODER.format(size)] = functools.partial(_package, encoder, (pixels,), None)
    if kernels := _kernels(plain, sizes):
        files[KERNELS] = functools.partial(write_tensors, kernels)
    for name, shared in ((DECODER, False), (SHARED_DECODER, True)):
        arguments, dynamic = _decoder_arguments(plain, shared)
        files[name] = functools.partial(_package, PredictMasks(plain.mask_decoder), arguments, dynamic)
    about = {"kind": "exported", **manifest, "batch_sizes": list(sizes), "kernels": found_here()}
    write_folder(folder, about, files)


def _kernels(sam: Any, batch_sizes: Sequence[int]) -> dict[str, Tensor]:
    """The Triton kernels that the packages launch, none of which is in them, and those for masks.

    They are compiled when it runs: on blank images of each batch size, and to find every mask of one, with the many
    prompts that takes. Single prompts it was asked when its answers were recorded.
    """
    if sam.device.type != "cuda":
        return {}
    blank = np.zeros((sam.image_encoder.img_size, sam.image_encoder.img_size, 3), np.uint8)
    for size in batch_sizes:
        BatchPredictor(sam, batch_size=size).set_images([blank] * size)
    AutomaticMaskGenerator(sam, pred_iou_thresh=-math.inf, stability_score_thresh=0.0).generate(blank)
    return compiled(sam.device)


class PredictMasks(nn.Module):
    """A mask decoder's `predict_masks` as a module, to export.

    Args:
        decoder: a mask decoder.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder: Any = decoder

    def forward(self, image: Tensor, image_pe: Tensor, sparse: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        """All masks of N prompts: image [1, C, h, w], image_pe likewise, sparse [N, T, C], dense [N or 1, C, h, w]."""
        masks, iou = self.decoder.predict_masks(image, image_pe, sparse, dense)
        return masks, iou


def _decoder_arguments(sam: Any, shared: bool) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Arguments of `PredictMasks`, and which of their sizes may be any."""
    height, width = sam.prompt_encoder.image_embedding_size
    channels, prompts, tokens = sam.prompt_encoder.embed_dim, 3, 2

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=sam.device)

    count = Dim("prompts", min=1, max=MOST_PROMPTS)
    image, image_pe = zeros(1, channels, height, width), zeros(1, channels, height, width)
    dense = zeros(1 if shared else prompts, channels, height, width)
    sparse_dims = {0: count, 1: Dim("tokens", min=1, max=MOST_TOKENS)}
    dynamic = (None, None, sparse_dims, None if shared else {0: count})
    return (image, image_pe, zeros(prompts, tokens, channels), dense), dynamic


def _package(module: nn.Module, arguments: tuple[Tensor, ...], dynamic: Any, path: Path) -> None:
    """Compiles a module into a package."""
    try:
        with torch.no_grad():
            exported = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    except Exception as error:
        part = "mask decoder" if isinstance(module, PredictMasks) else f"image encoder at batch {len(arguments[0])}"
        raise SamoptError(f"the {part} cannot be exported: {first_line(error)}") from error
