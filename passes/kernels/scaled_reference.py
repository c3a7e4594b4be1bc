"""A linear layer of int8 or float8 matrices in plain PyTorch: what the kernel is checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, gelu: bool
) -> Tensor:
    """x W^T of 8-bit matrices, which stand for x * x_scale and W * weight_scale, plus bias, then GELU if wanted.

    The product is multiplied by `x_scale`, then by `weight_scale`, then the bias is added, all in float32, and the
    kernel computes in the same order. GELU is in the tanh form (see `linear`).

    Args:
        x: [..., K] int8 or float8_e4m3fn, contiguous.
        x_scale: one factor per token, [..., 1] float32.
        weight: [N, K], as x.
        weight_scale: one factor per output, [N] float32.
        bias: [N] in any floating dtype, or None.
        gelu: whether GELU follows.

    Returns:
        [..., N], float32, contiguous.
    """
    y = product(x, weight).float() * x_scale * weight_scale
    if bias is not None:
        y += bias.float()
    return F.gelu(y, approximate="tanh") if gelu else y


def rounded_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`scaled_linear`, which see for the arguments, rounded once to `dtype`: what the operators compute on a CPU.

    Returns:
        [..., N], contiguous.
    """
    return scaled_linear(x, x_scale, weight, weight_scale, bias, gelu).to(dtype)


def fake_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """What fake tensors see of `rounded_linear`."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: [..., N]. That of int8 is exact, int32 on a GPU, float64 elsewhere; that of float8 float32.

    On a CPU PyTorch has an int8 product too. It is exact only where the processor has instructions for it: oneDNN adds
    pairs of products in int16 elsewhere, and saturates there. float64 is exact for all sizes that fit in memory.
    """
    if x.dtype is not torch.int8 and not (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)):
        return F.linear(x.float(), weight.float())
    if not x.is_cuda:
        return F.linear(x.double(), weight.double())
    rows = x.reshape(-1, x.shape[-1])
    (M, K), N = rows.shape, len(weight)
    # cuBLASLt takes more than 16 rows, and sizes in sixteens; not every dtype can be padded, but its bytes can
    rows, weight = (
        F.pad(matrix.view(torch.int8), (0, -K % 16, 0, missing)).view(x.dtype)
        for matrix, missing in ((rows, max(0, 17 - M)), (weight, -N % 16))
    )
    if x.dtype is torch.int8:
        wide = torch._int_mm(rows, weight.t())
    else:
        one = torch.ones((), device=x.device)
        wide = torch._scaled_mm(rows, weight.t(), one, one, out_dtype=torch.float32)
    return wide[:M, :N].reshape(*x.shape[:-1], N)
