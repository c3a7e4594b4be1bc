"""What is tried to find a configuration of the product of 8-bit matrices, and on what problems."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from samopt.passes.kernels.scaled_launch import launch
from samopt.passes.kernels.scaled_reference import scaled_linear
from samopt.passes.kernels.tuning import Config, Problem

SOURCES = ("scaled_matmul", "scaled_launch", "gelu")
# Blocks of 128 registers a thread for the sum, so that one or two programs fill a multiprocessor; then smaller ones,
# for few rows, and for GPUs with 99 KiB of shared memory. On Hopper Triton has two products in flight only where the
# sum is float32: in int8, two programs fill each other's gaps.
INT8_CANDIDATES = (
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=4),
    Config.of(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3),
    Config.of(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4),
    Config.of(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
    Config.of(BLOCK_M=128, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
    Config.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
)
# The same with GELU at the end, which by its instructions takes a quarter of what the sum over 1,280 inputs takes: two
# programs on a multiprocessor hide it from each other, and a persistent one loads what comes next meanwhile. PERSISTENT
# is the number of programs that fit, by registers and shared memory.
FLOAT8_CANDIDATES = (
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3, PERSISTENT=2),
    Config.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=6),
    Config.of(BLOCK_M=64, BLOCK_N=256, BLOCK_K=64, num_warps=4, num_stages=5),
    Config.of(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=4),
    Config.of(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=3, PERSISTENT=1),
    Config.of(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4),
    Config.of(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4, PERSISTENT=1),
    Config.of(BLOCK_M=128, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
)
FEWEST_ROWS, MOST_ROWS = 128, 32768


def int8_problem(M: int, N: int, K: int, gelu: bool, dtype: torch.dtype, device: torch.device) -> Problem:
    """What `choose` needs to find a configuration for an int8 weight [N, K] and about M rows: random inputs, made when
    asked for.

    Args:
        M: rows; the problem has the next power of two, so that batches of other sizes share a configuration. Below
            128 there is one block of rows at most, and above 32,768 so many that more change nothing.
        N: outputs.
        K: inputs.
        gelu: whether GELU follows.
        dtype: of the result.
        device: the GPU.
    """
    M = rows_of(M)
    inputs = _inputs(M, N, K, torch.int8, dtype, device)
    return Problem(
        kernel="int8_linear",
        shape=(("M", M), ("N", N), ("K", K), ("gelu", int(gelu))),
        dtype=dtype,
        device=device,
        sources=SOURCES,
        candidates=INT8_CANDIDATES,
        output=lambda: torch.empty((M, N), dtype=dtype, device=device),
        run=lambda config, out: launch(config, *inputs(), gelu, dtype, out),
        reference=lambda: scaled_linear(*inputs(), gelu),
    )


def float8_problem(M: int, N: int, K: int, device: torch.device) -> Problem:
    """The same for a float8 weight and the GELU of the result in float8."""
    M, dtype = rows_of(M), torch.float8_e4m3fn
    inputs = _inputs(M, N, K, dtype, torch.bfloat16, device)
    scale = torch.full((), 1 / 32, device=device)  # the largest results are about 6, which is 192 then
    return Problem(
        kernel="float8_gelu",
        shape=(("M", M), ("N", N), ("K", K)),
        dtype=dtype,
        device=device,
        sources=SOURCES,
        candidates=FLOAT8_CANDIDATES,
        output=lambda: torch.empty((M, N), dtype=dtype, device=device),
        run=lambda config, out: launch(config, *inputs(), True, dtype, out, scale),
        reference=lambda: scaled_linear(*inputs(), True) / scale,
    )


def _inputs(
    M: int, N: int, K: int, operands: torch.dtype, dtype: torch.dtype, device: torch.device
) -> Callable[[], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Makes x, x_scale, weight, weight_scale and a bias of `dtype`, once: results of about the size of 1."""

    @functools.cache
    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def quantized(rows: int) -> Tensor:  # as wide as what is quantised by its row's maximum
            normal = torch.randn(rows, K, generator=generator, device=device)
            return normal.mul_(32).clamp_(-127, 127).to(operands)

        def scale(*shape: int) -> Tensor:
            return (0.5 + torch.rand(*shape, generator=generator, device=device)) / 32

        bias = torch.randn(N, generator=generator, device=device).to(dtype)
        return quantized(M), scale(M, 1), quantized(N), scale(N) * K**-0.5, bias

    return inputs


def rows_of(M: int) -> int:
    """The rows of the problem that stands for M of them."""
    return min(max(1 << (M - 1).bit_length(), FEWEST_ROWS), MOST_ROWS)
