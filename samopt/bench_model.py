"""The model a benchmark times: a checkpoint of the user's, the embedded one, or one with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from samopt.checkpoint import MODEL_TYPES, load_checkpoint
from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

TINY = "sam_tiny"


@dataclass(frozen=True)
class BenchModel:
    """What is timed.

    Attributes:
        sam: unmodified, on the CPU.
        name: vit_b, vit_l, vit_h or sam_tiny.
        weights: "random", "sam_tiny", or the checkpoint's file.
    """

    sam: Sam
    name: str
    weights: str

    @property
    def trained(self) -> bool:
        """Whether its masks mean anything."""
        return self.weights != "random"


def bench_model(model_type: str | None = None, checkpoint: Path | None = None, seed: int = 0) -> BenchModel:
    """The model of a checkpoint; without one, of a type: sam_tiny, the default, is trained, all others are random.

    Args:
        model_type: a name in Meta's registry, or "sam_tiny"; None takes what the checkpoint is.
        checkpoint: Meta's file.
        seed: of random weights.

    Raises:
        InvalidInput: an unknown model type.
        CheckpointError: see `load_checkpoint`.
    """
    from samopt.tiny import load_tiny

    if checkpoint is not None:
        sam = load_checkpoint(checkpoint, model_type)
        return BenchModel(sam, MODEL_TYPES[sam.image_encoder.patch_embed.proj.out_channels], str(checkpoint))
    if model_type in (None, TINY):
        return BenchModel(load_tiny(), TINY, TINY)
    return BenchModel(random_model(str(model_type), seed), str(model_type), "random")


def check_model_type(model_type: str) -> None:
    """Raises InvalidInput where `bench_model` knows no such model."""
    from segment_anything import sam_model_registry

    if model_type != TINY and model_type not in sam_model_registry:
        known = ", ".join(name for name in sam_model_registry if name != "default")
        raise InvalidInput(f"unknown model type {model_type!r}; known: {known}, {TINY}")


def random_model(model_type: str, seed: int) -> Sam:
    """A Sam with random weights; positions too, which are zero when Meta's classes are built.

    Raises:
        InvalidInput: an unknown model type.
    """
    from segment_anything import sam_model_registry

    check_model_type(model_type)
    torch.manual_seed(seed)
    sam: Sam = sam_model_registry[model_type]()
    with torch.no_grad():
        for name, parameter in sam.image_encoder.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                nn.init.normal_(parameter, std=0.1)
    return sam
