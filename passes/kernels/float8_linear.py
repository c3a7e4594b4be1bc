"""A linear layer of float8 matrices as one operator: `torch.ops.samopt.float8_linear`.

On a GPU it is `torch._scaled_mm` with a scale for each row of either matrix: cuBLASLt, faster than the Triton kernel of
`float8_gelu` as long as nothing but a bias follows the product. On a CPU it is plain PyTorch.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.scaled_reference import scaled_linear


@torch.library.custom_op("samopt::float8_linear", mutates_args=(), device_types="cpu")
def float8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """A linear layer, and GELU if wanted.

    Args:
        x: [..., K] float8_e4m3fn, contiguous.
        x_scale: one factor per token, [..., 1] float32.
        weight: [N, K] float8_e4m3fn.
        weight_scale: one factor per output, [N] float32.
        bias: [N] in any floating dtype, or None.
        gelu: whether GELU follows, in the tanh form (see `linear_gelu`).
        dtype: of the result. On a GPU it is rounded to bfloat16 first.

    Returns:
        [..., N], contiguous.
    """
    return scaled_linear(x, x_scale, weight, weight_scale, bias, gelu).to(dtype)


@float8_linear.register_fake
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


@float8_linear.register_kernel("cuda")
def _cuda(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> Tensor:
    if torch.cuda.get_device_capability(x.device) < (8, 9):  # a model moved to another GPU
        warnings.warn("float8_linear runs in float32, slowly: this GPU has no float8 products", stacklevel=1)
        return scaled_linear(x, x_scale, weight, weight_scale, bias, gelu).to(dtype)
    y = torch._scaled_mm(
        x.reshape(-1, x.shape[-1]),
        weight.t(),
        x_scale.reshape(-1, 1).contiguous(),  # one scale for all rows comes expanded
        weight_scale[None, :],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    y = (F.gelu(y, approximate="tanh") if gelu else y).to(dtype)
    return y.view(*x.shape[:-1], weight.shape[0])
