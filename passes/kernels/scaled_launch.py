"""How the product of 8-bit matrices is launched: what it takes, and its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samopt.passes.kernels.devices import multiprocessors
from samopt.passes.kernels.tuning import Config

MULTIPLE = 16  # bytes: of the rows that the copy engine and 16-byte loads take
LARGEST_K = 2**31 // 128**2 - 1  # the sum of as many products of -128 and -128 fits in int32
GROUP = 8  # rows of blocks that share weights in the cache


def unfit(N: int, K: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take a weight [N, K] of int8 or float8, or None if it can."""
    if N % MULTIPLE or K % MULTIPLE:
        return f"its weight is {N}x{K}, and the kernel for 8-bit matrices takes multiples of {MULTIPLE}"
    if dtype is torch.int8 and K > LARGEST_K:
        return f"a sum over its {K} inputs can be too large for int32"
    return None


def launch(
    config: Config,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
    out: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Runs the kernel with a configuration; see `scaled_linear` for the arguments.

    Args:
        config: the configuration.
        x: [..., K], int8 or float8_e4m3fn, and so on.
        dtype: of the result.
        out: where it goes, or None for a new tensor.
        scale: what the result is divided by before it is rounded, of one element, or None.
    """
    from samopt.passes.kernels.scaled_matmul import scaled_matmul

    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    if out is None:
        out = x.new_empty((*x.shape[:-1], N), dtype=dtype)
    if out.numel() == 0:
        return out
    x, x_scale, weight, weight_scale = (t.contiguous() for t in (x, x_scale, weight, weight_scale))
    bias = None if bias is None else bias.contiguous()
    options = config.launch_options()
    block_m, block_n, block_k = (options[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    programs = -(-M // block_m) * -(-N // block_n)
    if per_multiprocessor := options.get("PERSISTENT", 0):
        programs = min(programs, per_multiprocessor * multiprocessors(x.device))
    tma = has_tma(x.device)
    matrices: list[Any] = [x, weight]
    if tma:
        matrices = [_descriptor(x, M, K, (block_m, block_k)), _descriptor(weight, N, K, (block_n, block_k))]
    with torch.cuda.device_of(x):  # Triton launches on the current GPU, wherever the tensors are
        scaled_matmul[(programs,)](
            *matrices, x_scale, weight_scale, bias, scale, out, M, N, K, gelu, x.is_cuda and scale is not None, tma,
            GROUP=GROUP, **options,
        )  # fmt: skip
    return out


def has_tma(device: torch.device) -> bool:
    """Whether a device copies blocks by descriptor: Hopper's copy engine, and Triton's interpreter.

    For older GPUs Triton turns descriptors into loads of single bytes, which wait for each other: there the kernel has
    pointers.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _descriptor(matrix: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, [rows, columns], [columns, 1], list(block))
