"""A linear layer of int8 matrices, GELU included, as one operator: `torch.ops.samopt.int8_linear`.

PyTorch's int8 product writes int32, and then the scales, the bias and GELU read and write it again. On a GPU this runs
a Triton kernel that writes the result alone, on a CPU plain PyTorch; fake tensors give shapes.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels.scaled_launch import launch, unfit
from samopt.passes.kernels.scaled_problem import int8_problem
from samopt.passes.kernels.scaled_reference import scaled_linear
from samopt.passes.kernels.tuning import choose


@torch.library.custom_op("samopt::int8_linear", mutates_args=(), device_types="cpu")
def int8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """A linear layer, and GELU if wanted. The sum is exact, and the result is rounded once.

    Args:
        x: [..., K] int8, contiguous.
        x_scale: one factor per token, [..., 1] float32.
        weight: [N, K] int8.
        weight_scale: one factor per output, [N] float32.
        bias: [N] in any floating dtype, or None.
        gelu: whether GELU follows, in float32, in the tanh form (see `linear_gelu`).
        dtype: of the result.

    Returns:
        [..., N], contiguous.
    """
    return scaled_linear(x, x_scale, weight, weight_scale, bias, gelu).to(dtype)


@int8_linear.register_fake
def _fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@int8_linear.register_kernel("cuda")
def _cuda(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    try:
        if reason := unfit(N, K, torch.int8):
            raise Unsupported(reason)
        config = choose(int8_problem(M, N, K, gelu, dtype, x.device))
    except Unsupported as failure:  # a model moved to another GPU, or a graph captured before a first run
        warnings.warn(f"int8_linear runs without its kernel, slowly: {failure}", stacklevel=1)
        return scaled_linear(x, x_scale, weight, weight_scale, bias, gelu).to(dtype)
    return launch(config, x, x_scale, weight, weight_scale, bias, gelu, dtype)
