"""A linear layer of float8 matrices whose GELU comes out in float8, as one operator: `torch.ops.samopt.float8_gelu`.

What lies between two float8 products is so written and read once, one byte a value. The scale of the result has to be
known before it is computed. On a GPU this runs a Triton kernel, on a CPU plain PyTorch; fake tensors give shapes.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels.quantized_rows import saturated
from samopt.passes.kernels.scaled_launch import launch, unfit
from samopt.passes.kernels.scaled_problem import float8_problem
from samopt.passes.kernels.scaled_reference import scaled_linear
from samopt.passes.kernels.tuning import choose


@torch.library.custom_op("samopt::float8_gelu", mutates_args=(), device_types="cpu")
def float8_gelu(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, scale: Tensor
) -> Tensor:
    """The GELU of a linear layer, divided by `scale` and rounded to float8 once.

    GELU is in the tanh form (see `linear`). What is too large becomes the largest value, 448; NaN stays NaN.

    Args:
        x: [..., K], float8_e4m3fn, contiguous.
        x_scale: one factor per token, [..., 1] float32.
        weight: [N, K], float8_e4m3fn.
        weight_scale: one factor per output, [N] float32.
        bias: [N] in any floating dtype, or None.
        scale: what a value of 1 in the result stands for, float32 without dimensions, above zero.

    Returns:
        [..., N], float8_e4m3fn, contiguous.
    """
    return saturated(scaled_linear(x, x_scale, weight, weight_scale, bias, True), scale)


@float8_gelu.register_fake
def _fake(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, scale: Tensor
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@float8_gelu.register_kernel("cuda")
def _cuda(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, scale: Tensor
) -> Tensor:
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    try:
        if reason := unfit(N, K, x.dtype):
            raise Unsupported(reason)
        config = choose(float8_problem(M, N, K, x.device))
    except Unsupported as failure:  # a model moved to another GPU, or a graph captured before a first run
        warnings.warn(f"float8_gelu runs without its kernel, slowly: {failure}", stacklevel=1)
        return saturated(scaled_linear(x, x_scale, weight, weight_scale, bias, True), scale)
    return launch(config, x, x_scale, weight, weight_scale, bias, True, x.dtype, scale=scale)
