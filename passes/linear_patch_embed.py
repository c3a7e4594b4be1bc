"""The patch embedding as a matrix product.

A convolution whose kernel is its stride reads every pixel once, so it is a linear layer over flattened patches:

    y[b, :, i, j] = W.reshape(E, C*P*P) @ x[b, :, i*P:(i+1)*P, j*P:(j+1)*P].flatten() + bias

cuDNN runs the convolution in bfloat16 as a slow generic kernel; the product runs at matmul speed. The weight keeps
its key and its shape [E, C, P, P], so Meta's checkpoints still load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip
from samopt.structure import differs, encoders, join


@dataclass(frozen=True)
class LinearPatchEmbed(Pass):
    """Rewrites the patch-embedding convolution of the image encoder as reshape + matmul."""

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the patch-embedding convolutions; one that pads, overlaps, dilates or groups is a Skip."""
        for fqn, encoder in encoders(model):
            for name, conv in encoder.patch_embed.named_modules():
                if isinstance(conv, nn.Conv2d):
                    site = join(fqn, "patch_embed", name)
                    reason = _why_no_matmul(conv)
                    yield Skip(site, reason) if reason else Site(site, {"patch": conv.kernel_size})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        rebind(new, "forward", patchify_and_project)
        return new


def _why_no_matmul(conv: nn.Conv2d) -> str | None:
    if conv.kernel_size != conv.stride:
        return f"its kernel {conv.kernel_size} is not its stride {conv.stride}: patches overlap or leave gaps"
    if conv.padding not in ((0, 0), "valid") or conv.dilation != (1, 1) or conv.groups != 1:
        return f"it has padding {conv.padding}, dilation {conv.dilation}, groups {conv.groups}"
    return differs(conv, "forward", nn.Conv2d.forward)


def patchify_and_project(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution `conv` with kernel = stride, as one matmul.

    Args:
        conv: its weight is [E, C, P, Q].
        x: pixels [B, C, H, W] in the weight's dtype; rows and columns that fill no patch are dropped, as by the
            convolution.

    Returns:
        [B, E, H // P, W // Q], a view of a [B, H // P, W // Q, E] tensor, the layout the blocks read.
    """
    p, q = conv.kernel_size
    b, c, height, width = x.shape
    h, w = height // p, width // q
    patches = x[:, :, : h * p, : w * q].reshape(b, c, h, p, w, q).permute(0, 2, 4, 1, 3, 5)
    tokens = F.linear(patches.reshape(b, h, w, c * p * q), torch.flatten(conv.weight, 1), conv.bias)
    return tokens.permute(0, 3, 1, 2)
