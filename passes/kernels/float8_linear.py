"""A linear layer of float8 matrices as one operator: `torch.ops.samopt.float8_linear`.

On a GPU it is `torch._scaled_mm` with a scale for each row of either matrix: cuBLASLt, faster than the Triton kernel of
`float8_gelu` as long as nothing but a bias follows the product. It gives bfloat16, whichever dtype that is rounded to
then. On a CPU it is plain PyTorch; fake tensors give shapes.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.scaled_reference import fake_linear, rounded_linear

float8_linear = torch.library.custom_op("samopt::float8_linear", rounded_linear, mutates_args=(), device_types="cpu")
float8_linear.register_fake(fake_linear)


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
        return rounded_linear(x, x_scale, weight, weight_scale, bias, gelu, dtype)
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
