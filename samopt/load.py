"""Loads a model that `save` saved: no checkpoint, no calibration, no measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from samopt.answers import check
from samopt.base import Pass
from samopt.compile_cache import differences, machine, use
from samopt.errors import InvalidInput, SavedModelError, first_line
from samopt.geometry import Geometry
from samopt.kernel_cache import restore
from samopt.optimize import as_optimised
from samopt.rebuild import compile_again, fill, for_this_device, without_weights
from samopt.recipe import Recipe
from samopt.report import Report
from samopt.save import ANSWERS, CACHE, KERNELS, WEIGHTS, converter, known_passes
from samopt.saved_folder import checked, read_file, read_manifest

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

T = TypeVar("T")

LOADERS = {"model": "samopt.load", "exported": "samopt.load_exported"}  # by the kind of folder


def load(
    folder: str | Path,
    device: str | torch.device | None = None,
    *,
    compile_cache: bool = False,
    verify: bool = False,
    passes: Mapping[str, type[Pass]] | None = None,
) -> Sam:
    """Loads a saved model, without the checkpoint that it was made of.

    Its passes are applied as they were, and their weights read; what was dropped, undone or skipped when it was made
    stays so, and accuracy is not measured again. On the machine that it was saved on, its outputs are the same bits.
    On another, passes that leave weights alone and cannot run there are left out, and `report` says so; 2:4 sparse
    weights are compressed for the GPU that is there.

    Args:
        folder: what `save` wrote. It is only read.
        device: where to; None takes "cpu" or "cuda", as it was saved from.
        compile_cache: use the compiled code in the folder, where it is of these versions and this kind of GPU, so that
            the first call need not compile. PyTorch reads parts of it with pickle: do that only where you trust whoever
            made the folder, as you would to run a program.
        verify: run it on the scene that it was run on when it was saved, and hold what it answers to what it answered
            then: the same bits, or within the recipe's budget of them. The report says which.
        passes: passes of your own, by the names that `save` was given.

    Returns:
        A Sam, as `optimize` returned it.

    Raises:
        SavedModelError: no saved model, one that was changed or damaged, one of another format, or one with weights
            that this device cannot compute with.
        AccuracyError: it answers otherwise than when it was saved, with `verify`.
        InvalidInput: a device that is not there.
        RecipeError: a pass that is not known.
        Unsupported: a required `Compile` cannot run here.
    """
    saved = Saved(Path(folder), "model", device, passes)
    recipe, report = saved.recipe, saved.report
    with saved.checked(WEIGHTS) as weights:
        model: Any = without_weights(saved.geometry, recipe, report.steps)
        tensors = saved.tensors(weights)
    fill(model, tensors, complete=True)
    made_on = saved.made.get("gpu", saved.made["device"])
    steps = for_this_device(model, recipe, report.steps, made_on)
    if steps != report.steps:
        model = without_weights(saved.geometry, recipe, steps)
        fill(model, tensors, complete=True)
    del tensors
    saved.offer_configurations()
    notes = list(saved.notes())
    if not saved.manifest["files"].keys().isdisjoint({CACHE, KERNELS}):
        notes.append(_use_cache(saved, compile_cache))
    steps = compile_again(model, recipe, steps)
    report = dataclasses.replace(report, steps=steps, notes=tuple(notes))
    if verify:
        report = saved.verified(model, report)
    as_optimised(model, recipe, report)
    return model


class Saved:
    """A folder that is being loaded from.

    Attributes:
        manifest: what it says.
        made: the machine it was made on.
        here: this machine.
        device: where to load to.
        recipe: of the model.
        report: as it was saved.
        geometry: of the unmodified model.
    """

    def __init__(
        self,
        folder: Path,
        kind: Literal["model", "exported"],
        device: str | torch.device | None,
        passes: Mapping[str, type[Pass]] | None,
    ) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        if self.manifest["kind"] != kind:
            right = LOADERS.get(self.manifest["kind"], "a newer samopt")
            raise SavedModelError(f"{folder}: {right} loads this folder, not {LOADERS[kind]}")
        self.made = self.manifest["made_with"]
        self.device = _device(device, self.made)
        self.here = machine(self.device)
        name = self.manifest["recipe_name"]
        self.recipe = Recipe.from_table(self.manifest["recipe"], str(folder), name, known_passes(passes))
        self.geometry = _structured(folder, self.manifest["geometry"], Geometry)
        self.report = _structured(folder, self.manifest["report"], Report)

    def checked(self, name: str) -> AbstractContextManager[Path]:
        """Where one of its files is, while its checksum is computed: see `saved_folder.checked`."""
        return checked(self.folder, self.manifest["files"][name])

    def tensors(self, path: Path, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The tensors in a file, in memory of their own, on a device: without another where they are loaded to."""
        from safetensors import SafetensorError, safe_open

        try:
            # On a CPU these tensors are a mapping of the file, whose content changes with it.
            with safe_open(path, framework="pt", device="cpu") as file:
                names = file.keys()
                return {name: file.get_tensor(name).to(device or self.device, copy=True) for name in names}
        except (SafetensorError, ValueError) as error:
            raise SavedModelError(f"{self.folder}: what it holds is not in the safetensors format: {error}") from error

    def offer_configurations(self) -> None:
        """Lets the kernels run with the configurations that they had there: none is sought again."""
        from samopt.passes.kernels.tuning import offer

        offer(self.manifest.get("kernels", {}))

    def restore_kernels(self) -> str | None:
        """Puts the compiled Triton kernels where Triton looks for them; why that was not possible, or None."""
        with self.checked(KERNELS) as path:
            kernels = self.tensors(path, torch.device("cpu"))
        return restore(kernels, self.device)

    def notes(self) -> Iterator[str]:
        """What to say of another machine."""
        if found := differences(self.made, self.here):
            yield f"saved elsewhere, and its figures are of there: {found}"

    def verified(self, model: nn.Module, report: Report) -> Report:
        """The report with what became of the answers; AccuracyError where they are others."""
        with self.checked(ANSWERS) as path:
            answers = self.tensors(path, torch.device("cpu"))
        return dataclasses.replace(report, notes=(*report.notes, check(model, answers, self.recipe.accuracy, report)))


def _device(device: str | torch.device | None, made: dict[str, Any]) -> torch.device:
    try:
        target = torch.empty(0, device=made["device"] if device is None else device).device  # with its index
    except (RuntimeError, AssertionError) as error:
        saved = f"the model was saved from {made.get('gpu', made['device'])}; " if device is None else ""
        raise InvalidInput(
            f"{saved}device {device or made['device']} cannot be used here ({first_line(error)}); try device='cpu'"
        ) from error
    if target.type == "meta":
        raise InvalidInput("a model on the meta device has no weights to load")
    return target


def _structured(folder: Path, value: Any, kind: type[T]) -> T:
    from cattrs import BaseValidationError

    try:
        found: T = converter().structure(value, kind)
    except BaseValidationError as error:
        raise SavedModelError(f"{folder}: its manifest holds no {kind.__name__}: {first_line(error)}") from error
    return found


def _use_cache(saved: Saved, wanted: bool) -> str:
    """Uses the compiled code in a folder, or does not; says which, and why."""
    if not wanted:
        return "compiled code in the folder not used: load(..., compile_cache=True), if you trust whoever made it"
    if reason := differences(saved.made, saved.here):
        return f"compiled code in the folder ignored: {reason}"
    files, reasons = saved.manifest["files"], []
    if CACHE in files:
        reasons.append(use(read_file(saved.folder, files[CACHE])))
    if KERNELS in files:
        reasons.append(saved.restore_kernels())
    if not (found := "; ".join(filter(None, reasons))):
        return "compiled code in the folder used"
    return f"compiled code in the folder {'used in part' if None in reasons else 'ignored'}: {found}"
