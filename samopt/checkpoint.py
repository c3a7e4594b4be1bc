"""Loads checkpoints in Meta's format: a state_dict saved by `torch.save`."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samopt.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

MODEL_TYPES = {768: "vit_b", 1024: "vit_l", 1280: "vit_h"}  # by the encoder's width
WIDTH_KEY = "image_encoder.patch_embed.proj.weight"


def load_checkpoint(path: str | Path, model_type: str) -> Sam:
    """Builds the `model_type` of Meta's registry with the weights in `path`.

    Args:
        path: a checkpoint such as sam_vit_h_4b8939.pth. Only tensors are read from it (`weights_only=True`).
        model_type: "vit_b", "vit_l" or "vit_h".

    Returns:
        The Sam, in evaluation mode, on the CPU.

    Raises:
        InvalidInput: an unknown model type.
        CheckpointError: a file that is missing, truncated, no SAM checkpoint, or one of another model type.
    """
    if model_type not in MODEL_TYPES.values():
        raise InvalidInput(f"unknown model type {model_type!r}; known: {', '.join(MODEL_TYPES.values())}")
    state = _read(Path(path))
    if WIDTH_KEY not in state:
        raise CheckpointError(f"{path}: no SAM checkpoint: it has no {WIDTH_KEY}")
    found = MODEL_TYPES.get(state[WIDTH_KEY].shape[0], "of an unknown size")
    if found != model_type:
        raise CheckpointError(f"{path}: this checkpoint is {found}, not {model_type}; pass model type {found}")
    from segment_anything import sam_model_registry

    sam = sam_model_registry[model_type]()
    try:
        sam.load_state_dict(state)
    except RuntimeError as error:
        details = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise CheckpointError(f"{path}: its weights do not fit {model_type}: {details}") from error
    return sam


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such checkpoint file")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path}: not a readable PyTorch checkpoint, or a truncated one ({lines[0][:200]}); download it again"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: no SAM checkpoint: not a state_dict of tensors")
    return state
