"""A saved model built anew: the unmodified Sam of its geometry, without weights; the passes that were applied; the
weights.

What calibration, timing and accuracy decided is not decided again: the sites of the passes are recorded, and weights
are stored as the passes made them. What a pass derives from weights is derived again where that gives the same bits,
and stored where it does not: the scales that `float8` reads off weights before they are quantised, for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from samopt.base import APPLIED, Numerics, Phase
from samopt.errors import SamoptError, SavedModelError, Unsupported, first_line
from samopt.geometry import Geometry
from samopt.module_form import device_made, difference, same_bits
from samopt.packing import pack, unpack
from samopt.recipe import Recipe, Step
from samopt.report import StepReport

VALUES, POSITIONS = ":values", ":positions"  # after the name of a weight that is stored as `pack` makes it


def without_weights(geometry: Geometry, recipe: Recipe, rows: Sequence[StepReport]) -> nn.Module:
    """The optimised model on the meta device, not compiled.

    Args:
        geometry: of the unmodified model.
        recipe: its recipe.
        rows: what became of each entry; those that were applied, are.

    Raises:
        SavedModelError: a pass that cannot be applied to a model without weights.
    """
    model: nn.Module = geometry.build()
    for step, row in zip(recipe.steps, rows, strict=True):
        if row.status != "applied" or row.phase is Phase.COMPILE:
            continue
        try:
            step.pass_.reapply(model, row.sites)
        except Exception as error:
            raise SavedModelError(
                f"{step.pass_!r} cannot be applied to a model without weights, as loading does: {first_line(error)}"
            ) from error
    return model


def tensors_of(model: nn.Module, geometry: Geometry, recipe: Recipe, rows: Sequence[StepReport]) -> dict[str, Tensor]:
    """What has to be stored of a model to build it anew, by name; 2:4 sparse weights packed.

    Raises:
        SavedModelError: the model is not what its recipe made of a Sam of segment_anything's, or holds tensors of a
            library's own.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if type(tensor) is not Tensor:
            raise SavedModelError(
                f"{name} is a {type(tensor).__name__}, which a file of plain tensors cannot hold: use "
                'Int8Dynamic(kernel="triton") instead of torchao\'s'
            )
    rebuilt = without_weights(geometry, recipe, rows)
    if found := difference(model, rebuilt):
        raise SavedModelError(f"the model was changed since samopt.optimize made it, which cannot be saved: {found}")
    fill(rebuilt, state)
    derived = _buffers_aside(rebuilt)
    stored = {name: buffer for name, buffer in _buffers_aside(model).items() if not same_bits(buffer, derived[name])}
    for name, tensor in state.items():
        owner, _, attribute = name.rpartition(".")
        packed = pack(tensor) if attribute == "weight" and _is_sparse(model.get_submodule(owner)) else None
        stored |= {name: tensor} if packed is None else {name + VALUES: packed[0], name + POSITIONS: packed[1]}
    return stored


def fill(model: nn.Module, tensors: Mapping[str, Tensor], *, complete: bool = False) -> None:
    """Puts weights into a model without, and what passes derive from them.

    Args:
        model: from `without_weights`. Afterwards it shares its tensors with the caller.
        tensors: its state_dict, and buffers that are none of it, all on one device; packed or not.
        complete: whether every tensor of the model must then have values.

    Raises:
        SavedModelError: tensors that are missing, or are none of the model's.
    """
    tensors = unpacked(tensors)
    names = model.state_dict().keys()
    aside = {name: tensor for name, tensor in tensors.items() if name not in names}
    try:
        model.load_state_dict({name: tensors[name] for name in names if name in tensors}, assign=True)
    except RuntimeError as error:
        details = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise SavedModelError(f"the stored weights do not fit the model: {details}") from error
    device = next(iter(tensors.values())).device
    known = dict(model.named_buffers())
    for name, buffer in known.items():
        if not buffer.is_meta and buffer.device != device:  # the mean and deviation of pixels: of the geometry
            _put(model, name, buffer.to(device))
    for name, tensor in aside.items():
        if name in known:
            _put(model, name, tensor)
    if complete:
        empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if empty:
            raise SavedModelError(f"there are no stored values of {empty[0]}")


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored tensors with packed ones as they were."""
    dense = {}
    for name, tensor in tensors.items():
        if name.endswith(VALUES):
            weight = name.removesuffix(VALUES)
            dense[weight] = unpack(tensor, tensors[weight + POSITIONS])
        elif not name.endswith(POSITIONS):
            dense[name] = tensor
    return dense


def for_this_device(
    model: nn.Module, recipe: Recipe, rows: Sequence[StepReport], made_on: str
) -> tuple[StepReport, ...]:
    """What becomes of the entries where the model is now: those that left the weights alone and cannot run here, are
    skipped.

    Raises:
        SavedModelError: a pass that changed the weights cannot run here.
    """
    found = []
    for step, row in zip(recipe.steps, rows, strict=True):
        reason = _cannot_run(step, model) if row.status == "applied" and row.phase is not Phase.COMPILE else None
        if reason is not None and step.pass_.numerics is Numerics.LOSSY:
            raise SavedModelError(
                f"this model was made on {made_on}, and what {step.pass_!r} made there cannot run here: {reason}; "
                "optimise the original model on this machine, with this folder as the recipe"
            )
        if reason is not None:
            row = dataclasses.replace(row, status="skipped", reason=f"it ran on {made_on}, but here: {reason}")
        found.append(row)
    return tuple(found)


def compile_again(model: nn.Module, recipe: Recipe, rows: Sequence[StepReport]) -> tuple[StepReport, ...]:
    """Applies the passes that compile, to a model with weights; an optional one that cannot run here is skipped.

    Raises:
        Unsupported: a required one cannot.
    """
    found = []
    for step, row in zip(recipe.steps, rows, strict=True):
        if row.status == "applied" and row.phase is Phase.COMPILE:
            try:
                step.pass_(model)
            except Unsupported as error:
                if step.required:
                    raise
                row = dataclasses.replace(row, status="skipped", reason=error.why)
        found.append(row)
    return tuple(found)


def _cannot_run(step: Step, model: nn.Module) -> str | None:
    try:
        step.pass_.requires(model)
    except Unsupported as error:
        return error.reason
    except SamoptError as error:
        return str(error)
    return None


def _buffers_aside(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that no state_dict holds, those aside that are made anew for each device."""
    names = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name not in names and name.rpartition(".")[2] not in device_made()
    }


def _is_sparse(module: Any) -> bool:
    return getattr(module, "two_four", False) or "SemiSparse" in vars(module).get(APPLIED, ())


def _put(model: nn.Module, name: str, buffer: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._buffers[attribute] = buffer
