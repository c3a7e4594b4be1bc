"""Products with 2:4 sparse weights on a GPU: which library's kernel computes them, and whether it is worth it.

Sparse tensor cores skip the zeros, at most twice as fast as dense ones. What is left of that depends on the GPU and the
shape: on an H200 in bfloat16 cuSPARSELt is slower than the dense product more often than not, and CUTLASS raises. So
each is checked and timed on this GPU, and the dense product is among what is chosen from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import first_line
from samopt.passes.kernels.devices import HALVES, no_gpu
from samopt.passes.kernels.linear import linear
from samopt.passes.kernels.tuning import TOLERANCE, gpu_seconds, relative_error

MULTIPLES = {"cusparselt": 32, "cutlass": 64}  # of what both dimensions of the weight must be multiples
ROWS = 4 * 4096  # tokens of four pictures: how many rows a product is timed with
PADDED = 16  # rows are filled up to a multiple of this


def cannot_multiply(device: torch.device) -> str | None:
    """Why a device has no 2:4 products, or None if it has."""
    if reason := no_gpu(device, "2:4 products need"):
        return reason
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"2:4 products need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def unfit(weight: Tensor, kernel: str) -> str | None:
    """Why a kernel cannot take a weight [N, K], or None if it can."""
    if weight.dtype not in HALVES:
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
    if any(size % MULTIPLES[kernel] for size in weight.shape):
        return f"{kernel} takes dimensions that are multiples of {MULTIPLES[kernel]}, not {list(weight.shape)}"
    return None


def compress(weight: Tensor, kernel: str) -> tuple[Tensor, ...]:
    """A 2:4 weight [N, K] as the kernel takes it: one tensor for cuSPARSELt; values and positions for CUTLASS."""
    if kernel == "cusparselt":
        return (torch._cslt_compress(weight.contiguous()),)
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    values, positions = sparse_semi_structured_from_dense_cutlass(weight.contiguous())
    return values, positions


def product(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x W^T + b for x [..., K], of the weight's dtype, with W [N, K] given by `compress`: contiguous [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    columns = F.pad(rows, (0, 0, 0, -len(rows) % PADDED)).t()
    if len(parts) == 1:
        y = torch._cslt_sparse_mm(parts[0], columns, bias=bias, transpose_result=True)
    elif bias is None:
        y = torch._sparse_semi_structured_mm(parts[0], parts[1], columns).t().contiguous()
    else:
        y = torch._sparse_semi_structured_addmm(bias, parts[0], parts[1], columns).t().contiguous()
    return y[: len(rows)].reshape(*x.shape[:-1], y.shape[-1])


@functools.cache
def seconds(kernel: str, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> float | str:
    """How long a kernel takes for `ROWS` rows, or why it cannot be used: its result is checked first."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    weight, x, bias = draw(out_features, in_features), draw(ROWS, in_features), draw(out_features)
    weight.view(-1, 4)[:, ::2] = 0
    try:
        with torch.no_grad(), torch.cuda.device(device):
            if kernel == "dense":
                return gpu_seconds(lambda: linear(x, weight, bias, False))
            parts = compress(weight, kernel)
            error = relative_error(product(x, parts, bias), F.linear(x.float(), weight.float(), bias.float()))
            if not error <= TOLERANCE[dtype]:
                return f"{kernel} gives a wrong result, relative error {error:.1e}"
            return gpu_seconds(lambda: product(x, parts, bias))
    except Exception as failure:  # a library may be missing, or refuse this GPU in ways of its own
        return f"{kernel}: {first_line(failure)}"


def fastest(weight: Tensor, kernels: Sequence[str]) -> tuple[str, str]:
    """The kernel for a weight, of those given and the dense product, and why it is that one."""
    times: dict[str, float] = {}
    reasons = []
    for kernel in kernels:
        found = unfit(weight, kernel) or seconds(kernel, *weight.shape, weight.dtype, weight.device)
        if isinstance(found, str):
            reasons.append(found)
        else:
            times[kernel] = found
    if not times:
        return "dense", "; ".join(reasons)
    dense = seconds("dense", *weight.shape, weight.dtype, weight.device)
    best = min(times, key=times.__getitem__)
    if isinstance(dense, float) and dense <= times[best]:
        return "dense", f"{times[best] / dense:.2f} times as fast as {best}"
    return best, f"{dense / times[best]:.2f} times as fast as dense" if isinstance(dense, float) else ""
