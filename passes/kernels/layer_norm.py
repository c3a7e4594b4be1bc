"""Layer norm over the last dimension, alone and after a sum, and the sum that ends a block, alone and with the norm
that begins the next, as operators: `torch.ops.samopt.layer_norm`, `add_layer_norm`, `residual_sum`, `sum_layer_norm`.

The norm of a sum is that of the sum before it was rounded, as TorchInductor's fused kernels have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.arithmetic import power_of_two

WIDEST = 8192  # of the rows that a program keeps in registers
SUM_BLOCK = 2048  # 16 values a thread: two loads of 16 bytes from each tensor


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


@torch.library.custom_op("samopt::residual_sum", mutates_args=(), device_types="cpu")
def residual_sum(x: Tensor, attended: Tensor, mlp: Tensor) -> Tensor:
    """x + attended + mlp, in float32 and rounded once.

    TorchInductor fuses it as well, and picks one of two block sizes by a short measurement: on an H200 every second
    time the slower one, by a fifth.

    Args:
        x: [..., C], contiguous, in any floating dtype.
        attended: as x.
        mlp: as x.

    Returns:
        [..., C] in the dtype of `x`, contiguous.
    """
    return (x.float() + attended.float() + mlp.float()).to(x.dtype).contiguous()


@torch.library.custom_op("samopt::sum_layer_norm", mutates_args=(), device_types="cpu")
def sum_layer_norm(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + attended + mlp, in float32 and rounded once, and the layer norm of it, see `layer_norm`.

    Args:
        x: [..., C], contiguous.
        attended: as x.
        mlp: as x.
        weight: [C].
        bias: [C].
        eps: added to the variance.

    Returns:
        The sum and its norm, both [..., C] in the dtype of `x`, contiguous.
    """
    total = x.float() + attended.float() + mlp.float()
    return total.to(x.dtype).contiguous(), layer_norm(total, weight, bias, eps).to(x.dtype)


@layer_norm.register_fake
def _fake_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@add_layer_norm.register_fake
def _fake_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@residual_sum.register_fake
def _fake_sum(x: Tensor, attended: Tensor, mlp: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@sum_layer_norm.register_fake
def _fake_sum_norm(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@layer_norm.register_kernel("cuda")
def _cuda_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch((x,), weight, bias, eps, x.new_empty(x.shape))


@add_layer_norm.register_kernel("cuda")
def _cuda_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch((x, residual), weight, bias, eps, x.new_empty(x.shape))


@sum_layer_norm.register_kernel("cuda")
def _cuda_sum_norm(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x.new_empty(x.shape)
    return total, launch((x, attended, mlp), weight, bias, eps, x.new_empty(x.shape), total)


@residual_sum.register_kernel("cuda")
def launch_sum(x: Tensor, attended: Tensor, mlp: Tensor) -> Tensor:
    """Runs the kernel of `residual_sum`."""
    from samopt.passes.kernels import residual_sum as kernel

    x, attended, mlp = x.contiguous(), attended.contiguous(), mlp.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        with torch.cuda.device_of(x):
            kernel.residual_sum[(-(-x.numel() // SUM_BLOCK),)](x, attended, mlp, out, x.numel(), SUM_BLOCK)
    return out


def launch(
    terms: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None = None,
    scales: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Runs the kernel: the norm of the sum of one to three terms, into `out`, and the sum itself into `total`; the norm
    quantised up to `limit`, where there are scales to fill."""
    from samopt.passes.kernels.row_norm import row_norm

    x, residual, second = (*(term.contiguous() for term in terms), None, None)[:3]
    assert x is not None
    C = x.shape[-1]
    with torch.cuda.device_of(x):
        row_norm[(x.numel() // C,)](
            x,
            residual,
            second,
            total,
            weight,
            bias,
            out,
            scales,
            eps,
            C,
            *two_parts(C),
            limit,
            num_warps=max(1, power_of_two(C) // (1024 if scales is None else 2048)),
        )
    return out


def two_parts(C: int) -> tuple[int, int]:
    """The largest power of two in C, and the rest, padded to one; 0 where there is none."""
    first = 1 << (C.bit_length() - 1)
    return first, power_of_two(C - first) if first < C else 0
