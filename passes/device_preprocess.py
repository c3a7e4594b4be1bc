"""Pictures resized where the model is, not by PIL on the host.

The model computes what it did: what changes is how its pictures get to it. The pass leaves word on the model, and
`samopt.preprocess.encoder_input`, through which samopt's own predictors and its verification feed it, goes by that.
Meta's SamPredictor has its own PIL resize, which no pass on the model reaches: with it everything stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.preprocess import ATTRIBUTE, DEVICE
from samopt.rebind import clone
from samopt.result import Site, Skip
from samopt.structure import differs


@dataclass(frozen=True)
class DevicePreprocess(Pass):
    """Resizes, normalises and pads pictures on the model's device, in samopt's own predictors.

    LOSSY, as resized pixels differ from PIL's: up to 6 in 1,000 values, by one of 255 levels.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the model itself, or a Skip where it does not preprocess pictures as a Sam does."""
        sam: Any = model
        reason = _why_not(sam)
        yield Skip("", reason) if reason else Site("", {"size": sam.image_encoder.img_size})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        vars(new)[ATTRIBUTE] = DEVICE
        return new


def _why_not(model: Any) -> str | None:
    from segment_anything.modeling import Sam

    if not isinstance(getattr(getattr(model, "image_encoder", None), "img_size", None), int):
        return "it has no image encoder that says its img_size"
    for name in ("pixel_mean", "pixel_std"):
        value = getattr(model, name, None)
        if not isinstance(value, Tensor) or value.shape != (3, 1, 1):
            return f"its {name} is no tensor [3, 1, 1]"
    return differs(model, "preprocess", Sam.preprocess)
