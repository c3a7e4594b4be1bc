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
from samopt.passes.kernels.scaled_reference import fake_linear, rounded_linear
from samopt.passes.kernels.tuning import choose

int8_linear = torch.library.custom_op("samopt::int8_linear", rounded_linear, mutates_args=(), device_types="cpu")
int8_linear.register_fake(fake_linear)


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
        return rounded_linear(x, x_scale, weight, weight_scale, bias, gelu, dtype)
    return launch(config, x, x_scale, weight, weight_scale, bias, gelu, dtype)
