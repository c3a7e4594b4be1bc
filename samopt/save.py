"""Saves an optimised model to a folder: weights as the passes made them, and all that it takes to load it again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samopt.answers import record
from samopt.base import Pass
from samopt.compile_cache import artifacts, machine
from samopt.errors import SavedModelError
from samopt.geometry import Geometry
from samopt.kernel_cache import compiled
from samopt.rebuild import tensors_of
from samopt.recipe import ATTRIBUTE as RECIPE
from samopt.recipe import Recipe
from samopt.report import report
from samopt.saved_folder import Writer, check_target, write_folder

WEIGHTS, ANSWERS = "weights.safetensors", "answers.safetensors"
CACHE, KERNELS = "compile_cache.bin", "triton_kernels.safetensors"


def save(model: nn.Module, folder: str | Path, *, passes: Mapping[str, type[Pass]] | None = None) -> None:
    """Saves a model that `optimize` returned, for `load`.

    The folder holds its weights (safetensors; 2:4 sparse ones packed), the recipe and what became of its entries, the
    sizes that the unmodified model is built from, what it answers on a drawn scene, for which it is run once, versions,
    and checksums. Nothing in it is pickled by samopt; where this process has compiled, it also holds PyTorch's
    artifacts of that, and the compiled Triton kernels of samopt's operators, which `load` uses only where it is told
    to. So run the model once at each batch size that you will use, then save it. Hooks are not saved.

    Args:
        model: compiled or not, on any device.
        folder: where to. A saved model that is there is replaced, at once or not at all: after an error or a crash it
            is as it was.
        passes: passes of your own in its recipe, by names that stand for them in the folder; give them to `load`, too.

    Raises:
        SavedModelError: the folder cannot be written or holds other things, or the model cannot be saved: it was
            changed since `optimize`, or is not of segment_anything's own classes.
        RecipeError: a pass of your own that `passes` has no name for.
        SamoptError: the model did not come out of `optimize`.
    """
    folder = Path(folder)
    manifest, tensors = described(model, passes)
    check_target(folder)
    files: dict[str, Writer] = {
        WEIGHTS: functools.partial(write_tensors, tensors),
        ANSWERS: functools.partial(write_tensors, record(model)),
    }
    if (cache := artifacts(model)) is not None:
        files[CACHE] = functools.partial(_write_bytes, cache)
    if kernels := compiled(next(model.parameters()).device):
        files[KERNELS] = functools.partial(write_tensors, kernels)
    from samopt.passes.kernels.tuning import found_here

    write_folder(folder, {"kind": "model", **manifest, "kernels": found_here()}, files)


def described(model: nn.Module, passes: Mapping[str, type[Pass]] | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a manifest tells of an optimised model, and its tensors; for what is raised, see `save`."""
    found = dataclasses.replace(report(model), notes=())  # of this process
    recipe = vars(model).get(RECIPE)
    if not isinstance(recipe, Recipe):
        raise SavedModelError("this model has no recipe: it was not made by this version of samopt.optimize")
    table = recipe.to_table(known_passes(passes))
    geometry = Geometry.of(model)
    tensors = tensors_of(model, geometry, recipe, found.steps)
    manifest = {
        "made_with": machine(next(model.parameters()).device),
        "geometry": converter().unstructure(geometry),
        "recipe_name": recipe.name,
        "recipe": table,
        "report": converter().unstructure(found),
    }
    return manifest, tensors


def known_passes(own: Mapping[str, type[Pass]] | None) -> dict[str, type[Pass]]:
    """All passes by the names that a folder uses: samopt's, and those of a user's own."""
    from samopt.passes import PASSES

    return {**PASSES, **(own or {})}


@functools.cache
def converter() -> Any:
    """Turns dataclasses into what JSON holds, and back."""
    from cattrs import Converter

    from samopt.result import Site

    made = Converter()
    made.register_unstructure_hook(float, _finite_or_text)
    made.register_structure_hook(Site, lambda value, _: Site(value["fqn"], _with_tuples(value["facts"])))
    return made


def _finite_or_text(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if value - value == 0 else str(value)


def _with_tuples(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes plain tensors as safetensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)
