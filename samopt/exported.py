"""Loads what `export` exported: a Sam whose image encoder and mask decoder are packages compiled ahead of time."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samopt.base import Pass, Phase
from samopt.compile_cache import differences
from samopt.errors import InvalidInput, SavedModelError, first_line
from samopt.export import DECODER, ENCODER, MOST_PROMPTS, MOST_TOKENS, SHARED_DECODER
from samopt.load import Saved
from samopt.optimize import apply_but_keep_dtype, as_optimised
from samopt.passes.batches import fill_up, run_as
from samopt.passes.mask_decoder import shared
from samopt.rebind import rebind, wrap
from samopt.rebuild import fill, without_weights
from samopt.report import StepReport
from samopt.save import KERNELS, WEIGHTS

if TYPE_CHECKING:
    from segment_anything.modeling import Sam


def load_exported(folder: str | Path, *, verify: bool = False, passes: Mapping[str, type[Pass]] | None = None) -> Sam:
    """Loads an exported model, which starts at once: nothing is traced, compiled or tuned.

    It runs where it was exported, on the same kind of processor or GPU and with the same versions. The folder holds
    code that is run: load only what comes from whom you trust.

    Args:
        folder: what `export` wrote.
        verify: as in `load`.
        passes: as in `load`.

    Returns:
        A Sam for SamPredictor, SamAutomaticMaskGenerator and samopt's own. Threads may share it, and copies share its
        packages. Its encoder has no blocks to look into, and takes no other weights.

    Raises:
        SavedModelError: no exported model, a changed one, or one of another machine or other versions.
        AccuracyError: it answers otherwise than the model it was exported from, with `verify`.
        InvalidInput: the device that it was exported for is not there.
    """
    saved = Saved(Path(folder), "exported", None, passes)
    if found := differences(saved.made, saved.here):
        raise SavedModelError(f"{folder}: exported for another machine or other versions: {found}; export it here")
    model: Any = without_weights(saved.geometry, saved.recipe, saved.report.steps)
    sizes = saved.manifest["batch_sizes"]
    packages = {size: Package(saved, ENCODER.format(size)) for size in sizes}
    model.image_encoder = ExportedEncoder(model.image_encoder.img_size, packages)
    with saved.checked(WEIGHTS) as weights:
        tensors = saved.tensors(weights)
    fill(model, tensors, complete=True)
    saved.offer_configurations()
    notes = list(saved.report.notes)
    if KERNELS in saved.manifest["files"] and (reason := saved.restore_kernels()):
        notes.append(f"compiled kernels in the folder ignored: {reason}")
    packaged = functools.partial(predict_masks, Package(saved, DECODER), Package(saved, SHARED_DECODER))
    wrap(model.mask_decoder, "predict_masks", packaged)
    steps = tuple(map(_ahead_of_time, saved.report.steps))
    report = dataclasses.replace(saved.report, steps=steps, notes=tuple(notes))
    if verify:
        report = saved.verified(model, report)
    as_optimised(model, saved.recipe, report)
    rebind(model, "_apply", apply_but_keep_device)
    return model


def _ahead_of_time(row: StepReport) -> StepReport:
    compiled = row.phase is Phase.COMPILE and row.status == "applied"
    return dataclasses.replace(row, status="skipped", reason="compiled ahead of time instead") if compiled else row


class Package:
    """One compiled package. Copies of a model share it, as it never changes; threads take turns.

    Args:
        saved: the folder.
        name: of the package in its manifest.
    """

    def __init__(self, saved: Saved, name: str) -> None:
        with saved.checked(name) as path:
            pass  # it is code, of which nothing runs before its checksum is known
        index = saved.device.index if saved.device.index is not None else -1
        try:
            self._run = torch._inductor.aoti_load_package(str(path), device_index=index)
        except Exception as error:
            raise SavedModelError(f"{path}: PyTorch cannot load this package: {first_line(error)}") from error
        self.device, self._lock = saved.device, threading.Lock()

    def __call__(self, *arguments: Tensor) -> Any:
        """Runs it on tensors, of which it takes the memory as it is laid out."""
        arguments = tuple(argument.contiguous() for argument in arguments)
        # One thread at a time: PyTorch makes others wait while they hold Python's lock, which the operators of samopt's
        # kernels, called from inside, wait for in turn.
        with self._lock:
            return self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Package:
        return self


class ExportedEncoder(nn.Module):
    """An image encoder of packages.

    Args:
        img_size: side of its input in pixels.
        packages: by batch size, rising.
    """

    def __init__(self, img_size: int, packages: Mapping[int, Package]) -> None:
        super().__init__()
        self.img_size, self.packages = img_size, dict(packages)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, C, h, w] of pixels float32 [B, 3, img_size, img_size], B any number."""
        if x.dim() != 4 or not len(x) or x.shape[1:] != (3, self.img_size, self.img_size):
            raise InvalidInput(
                f"the exported image encoder takes [B, 3, {self.img_size}, {self.img_size}], not {list(x.shape)}"
            )
        sizes = sorted(self.packages)
        pieces = zip(x.split(sizes[-1]), run_as(len(x), sizes), strict=True)
        features = [self._piece(piece.float(), size) for piece, size in pieces]
        return features[0] if len(features) == 1 else torch.cat(features)

    def _piece(self, piece: Tensor, size: int) -> Tensor:
        package = self.packages[size]
        _check_device(package, piece)
        features: Tensor = package(fill_up(piece, size))
        return features if size == len(piece) else features[: len(piece)].clone()


def predict_masks(
    own: Package,
    common: Package,
    inner: Callable[..., tuple[Tensor, Tensor]],
    decoder: nn.Module,
    image_embeddings: Tensor,
    image_pe: Tensor,
    sparse_prompt_embeddings: Tensor,
    dense_prompt_embeddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """A mask decoder's `predict_masks` by packages, for one image and prompts with tokens; others run in PyTorch.

    Args:
        own: the package for a mask prompt, or none, of each prompt's own.
        common: the package for prompts that share it.
        inner: the method without packages.
        decoder: whose method it is.
        image_embeddings: as in SAM, and the others likewise.
        image_pe: likewise.
        sparse_prompt_embeddings: likewise.
        dense_prompt_embeddings: likewise.
    """
    prompts, tokens = sparse_prompt_embeddings.shape[:2]
    image, dense = shared(image_embeddings), shared(dense_prompt_embeddings)
    if len(image) != 1 or not 0 < prompts <= MOST_PROMPTS or not 0 < tokens <= MOST_TOKENS:
        return inner(image_embeddings, image_pe, sparse_prompt_embeddings, dense_prompt_embeddings)
    package = common if len(dense) == 1 else own
    _check_device(package, image)
    arguments = (tensor.float() for tensor in (image, image_pe, sparse_prompt_embeddings, dense))
    masks, iou = package(*arguments)
    return masks, iou


def _check_device(package: Package, tensor: Tensor) -> None:
    if tensor.device.type != package.device.type:
        raise InvalidInput(f"this model was exported for {package.device}, and its input is on {tensor.device}")


def apply_but_keep_device(model: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, by which `.to(...)` works, for an exported model, which stays what and where it is.

    Raises:
        InvalidInput: on another dtype or device, before anything is changed.
    """
    device = next(model.parameters()).device
    becomes = function(torch.empty(0, device=device)).device
    if becomes != device:
        raise InvalidInput(
            f"an exported model stays on {device}, for which it was compiled: move the optimised model, and export it"
        )
    return apply_but_keep_dtype(model, function, recurse)
