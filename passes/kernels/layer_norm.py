"""Layer norm over the last dimension, alone and after a sum, as operators: `torch.ops.samopt.layer_norm` and
`torch.ops.samopt.add_layer_norm`.

The norm of a sum is that of the sum before it was rounded, as TorchInductor's fused kernels have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEST = 8192  # of the rows that a program keeps in registers


@torch.library.custom_op("samopt::layer_norm", mutates_args=(), device_types="cpu")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm, computed in float32.

    Args:
        x: [..., C], contiguous, in any floating dtype.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        [..., C] in the dtype of `x`, contiguous.
    """
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype).contiguous()


@torch.library.custom_op("samopt::add_layer_norm", mutates_args=(), device_types="cpu")
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The layer norm of x + residual; see `layer_norm`.

    Args:
        x: [..., C], contiguous.
        residual: as x.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        [..., C] in the dtype of `x`, contiguous.
    """
    return layer_norm(x.float() + residual.float(), weight, bias, eps).to(x.dtype)


@layer_norm.register_fake
def _fake_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@add_layer_norm.register_fake
def _fake_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@layer_norm.register_kernel("cuda")
def _cuda_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch(x, None, weight, bias, eps)


@add_layer_norm.register_kernel("cuda")
def _cuda_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch(x, residual.contiguous(), weight, bias, eps)


def launch(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Runs the kernel: the norm of x, or of x + residual."""
    from samopt.passes.kernels.row_norm import row_norm

    x = x.contiguous()
    out = torch.empty_like(x)
    C = x.shape[-1]
    block = 1 << (C - 1).bit_length()
    with torch.cuda.device_of(x):
        row_norm[(x.numel() // C,)](x, residual, weight, bias, out, eps, C, block, num_warps=max(1, block // 1024))
    return out
