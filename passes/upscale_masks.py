"""Masks upscaled to the image's size in one step, by a Triton kernel.

SAM upscales every mask to the model's square and from there to the image, through 4 MiB of float32 a mask. Here each
pixel is computed from the decoder's logits; `samopt.AutomaticMaskGenerator` makes no logits of the image's size at
all, but boxes, scores, and masks of the few that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.kernels.devices import cannot_run
from samopt.passes.kernels.upscale_masks import upscale_masks
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip
from samopt.structure import differs


@dataclass(frozen=True)
class UpscaleMasks(Pass):
    """Upscales masks to the image's size in one step. It needs a GPU of compute capability 8.0 or above."""

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where Triton cannot run: no such GPU, or no Triton."""
        if reason := cannot_run(next(model.parameters()).device):
            raise Unsupported(reason, "leave upscale_masks out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the model itself, or a Skip where it upscales masks in another way than SAM."""
        from segment_anything.modeling import Sam

        reason = differs(model, "postprocess_masks", Sam.postprocess_masks)
        yield Skip("", reason) if reason else Site("")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        rebind(new, "postprocess_masks", postprocess_masks)
        return new


def postprocess_masks(self: Any, masks: Tensor, input_size: tuple[int, ...], original_size: tuple[int, ...]) -> Tensor:
    """`Sam.postprocess_masks`, in one step.

    Args:
        self: a Sam.
        masks: logits of low resolution, [B, C, h, w].
        input_size: (h, w) of the image in the model's square, without padding.
        original_size: (H, W) of the image.

    Returns:
        [B, C, H, W], in the dtype of `masks`.
    """
    upscaled = upscale_masks(masks.flatten(0, 1), self.image_encoder.img_size, input_size, original_size)
    return upscaled.unflatten(0, masks.shape[:2]).to(masks.dtype)


def upscales_in_one_step(model: Any) -> bool:
    """Whether the pass has been applied to a model."""
    bound = vars(model).get("postprocess_masks")
    return isinstance(bound, functools.partial) and bound.func is postprocess_masks
