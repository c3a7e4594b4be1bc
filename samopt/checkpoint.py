"""Loads checkpoints in Meta's format: a state_dict saved by `torch.save`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samopt.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

MODEL_TYPES = {768: "vit_b", 1024: "vit_l", 1280: "vit_h"}  # by the encoder's width
WIDTH_KEY = "image_encoder.patch_embed.proj.weight"


def load_checkpoint(path: str | Path, model_type: str | None = None) -> Sam:
    """Builds a model of Meta's registry with the weights in `path`.

    Args:
        path: a checkpoint such as sam_vit_h_4b8939.pth. Only tensors are read from it (`weights_only=True`).
        model_type: "vit_b", "vit_l" or "vit_h"; None takes what the checkpoint is.

    Returns:
        The Sam, in evaluation mode, on the CPU.

    Raises:
        InvalidInput: an unknown model type.
        CheckpointError: a file that is missing, truncated, no SAM checkpoint, or one of another model type.
    """
    if model_type not in (None, *MODEL_TYPES.values()):
        raise InvalidInput(f"unknown model type {model_type!r}; known: {', '.join(MODEL_TYPES.values())}")
    state = _read(Path(path))
    if WIDTH_KEY not in state or state[WIDTH_KEY].ndim != 4:
        raise CheckpointError(f"{path}: no SAM checkpoint: it has no {WIDTH_KEY} of four dimensions")
    found = MODEL_TYPES.get(state[WIDTH_KEY].shape[0])
    if found is None:
        raise CheckpointError(f"{path}: its encoder is {state[WIDTH_KEY].shape[0]} wide, as none of Meta's models is")
    if model_type not in (None, found):
        raise CheckpointError(f"{path}: this checkpoint is {found}, not {model_type}; pass model type {found}")
    from segment_anything import sam_model_registry

    sam = sam_model_registry[found]()
    try:
        sam.load_state_dict(state)
    except RuntimeError as error:
        details = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise CheckpointError(f"{path}: its weights do not fit {found}: {details}") from error
    return sam


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such checkpoint file{', it is a folder' if path.is_dir() else ''}")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises what it likes at damaged files
        # PyTorch's own message would advise to load the file without its safeguard.
        raise CheckpointError(
            f"{path}: not a PyTorch checkpoint of tensors, or a truncated one; download it again"
        ) from error
    tensors = isinstance(state, Mapping) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    )
    if not tensors:
        raise CheckpointError(f"{path}: no SAM checkpoint: not a state_dict of tensors")
    return state
