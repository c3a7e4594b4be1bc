"""Rows quantised each by its own scale, to int8 or float8 (e4m3), as operators: `torch.ops.samopt.quantize_rows`, and
`layer_norm_rows`, which norms them first, and `sum_layer_norm_rows`, which adds, gives the sum, and norms that.

A row is divided by its scale, the largest |value| / 127 or / 448, and rounded to the nearest value of the dtype, half
to even: symmetric, so that zero stays zero. Rows of zeros stay zeros and have a scale above zero; the scale of a row
that holds NaN or infinity is not finite, nor are its products. Kernel and PyTorch differ where float32 rounds
differently just at the middle of two values: by one step, in one value of a thousand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.arithmetic import power_of_two
from samopt.passes.kernels.layer_norm import launch as launch_norm
from samopt.passes.kernels.layer_norm import two_parts

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest values that are used
LEAST = 1e-30  # of the largest |value| of a row: one of zeros has a scale too, and stays zero


class Rows(NamedTuple):
    """Quantised rows: the product of both is what they stand for.

    Attributes:
        values: [..., C], int8 or float8_e4m3fn.
        scales: [..., 1], float32.
    """

    values: Tensor
    scales: Tensor


def quantized(x: Tensor, dtype: torch.dtype) -> Rows:
    """x [..., C] in float32, quantised, in plain PyTorch."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMITS[dtype]
    values = x * (1 / scales)
    if dtype is torch.int8:
        values = values.round().nan_to_num(0)
    return Rows(values.to(dtype).contiguous(), scales.contiguous())


def saturated(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in float8_e4m3fn; what is too large for it becomes the largest value, and NaN stays NaN."""
    limit = LIMITS[torch.float8_e4m3fn]
    return (x * (1 / scale)).clamp(-limit, limit).to(torch.float8_e4m3fn)


@torch.library.custom_op("samopt::quantize_rows", mutates_args=(), device_types="cpu")
def quantize_rows(x: Tensor, dtype: torch.dtype, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises rows, or the GELU of them.

    Args:
        x: [..., C], in any floating dtype.
        dtype: int8 or float8_e4m3fn.
        gelu: whether to take their GELU first, in float32, in the tanh form (see `linear`).

    Returns:
        What `Rows` holds.
    """
    rows = quantized(F.gelu(x.float(), approximate="tanh") if gelu else x.float(), dtype)
    return rows.values, rows.scales


@torch.library.custom_op("samopt::layer_norm_rows", mutates_args=(), device_types="cpu")
def layer_norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantises the layer norm of x, or of x + residual; neither sum nor norm is rounded before.

    Args:
        x: [..., C], in any floating dtype.
        residual: as x, or None.
        weight: [C].
        bias: [C].
        eps: added to the variance.
        dtype: int8 or float8_e4m3fn.

    Returns:
        What `Rows` holds.
    """
    total = x.float() if residual is None else x.float() + residual.float()
    rows = quantized(F.layer_norm(total, weight.shape, weight.float(), bias.float(), eps), dtype)
    return rows.values, rows.scales


@torch.library.custom_op("samopt::sum_layer_norm_rows", mutates_args=(), device_types="cpu")
def sum_layer_norm_rows(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + attended + mlp, rounded once, and its layer norm quantised; the norm is that of the sum before rounding.

    Args:
        x: [..., C], in any floating dtype.
        attended: as x.
        mlp: as x.
        weight: [C].
        bias: [C].
        eps: added to the variance.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The sum in the dtype of `x`, [..., C], contiguous; and what `Rows` holds.
    """
    total = x.float() + attended.float() + mlp.float()
    return total.to(x.dtype).contiguous(), *layer_norm_rows(total, None, weight, bias, eps, dtype)


def _empty(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@quantize_rows.register_fake
def _fake(x: Tensor, dtype: torch.dtype, gelu: bool = False) -> tuple[Tensor, Tensor]:
    return _empty(x, dtype)


@layer_norm_rows.register_fake
def _fake_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _empty(x, dtype)


@sum_layer_norm_rows.register_fake
def _fake_sum_norm(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_empty(x, dtype)


@quantize_rows.register_kernel("cuda")
def launch(x: Tensor, dtype: torch.dtype, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Runs the kernel of `quantize_rows`."""
    from samopt.passes.kernels.row_quantize import row_quantize

    x = x.contiguous()
    values, scales = _empty(x, dtype)
    C = x.shape[-1]
    with torch.cuda.device_of(x):
        row_quantize[(x.numel() // C,)](
            x, values, scales, C, *two_parts(C), gelu, LIMITS[dtype], num_warps=max(1, power_of_two(C) // 2048)
        )
    return values, scales


@layer_norm_rows.register_kernel("cuda")
def _cuda_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    values, scales = _empty(x, dtype)
    terms = (x,) if residual is None else (x, residual)
    launch_norm(terms, weight, bias, eps, values, None, scales, LIMITS[dtype])
    return values, scales


@sum_layer_norm_rows.register_kernel("cuda")
def _cuda_sum_norm(
    x: Tensor, attended: Tensor, mlp: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape)
    values, scales = _empty(x, dtype)
    launch_norm((x, attended, mlp), weight, bias, eps, values, total, scales, LIMITS[dtype])
    return total, values, scales
