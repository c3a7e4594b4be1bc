"""The product of two int8 or two float8 matrices, with scales, bias and GELU before the result is written.

y   = float32(sum_k x[m, k] weight[n, k]) * x_scale[m] * weight_scale[n] + bias[n]
out = y, or gelu(y) in the tanh form, and divided by `scale` where there is one

The sum of int8 is exact, in int32; that of float8 is what the matrix units keep, which on Hopper is less than float32.
The rest is float32, from left to right, where the last product and the addition may be one fused operation. `out` is
rounded once; float8 saturates. What lies past the matrices is read as zeros, which add nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels.gelu import gelu, gelu_by_hardware


@triton.jit
def scaled_matmul(
    x,  # [M, K], or with TMA a descriptor of it: blocks [BLOCK_M, BLOCK_K]
    weight,  # [N, K], likewise: blocks [BLOCK_N, BLOCK_K]
    x_scale,  # [M]
    weight_scale,  # [N]
    bias,  # [N], or None: nothing is added
    scale,  # [1], or None: the result is not divided
    out,  # [M, N]
    M,
    N,
    K,
    GELU: tl.constexpr,
    BY_HARDWARE: tl.constexpr,  # whether GELU may be coarse, which Triton's interpreter cannot compute
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of blocks that are walked together, column by column: they share weights in the cache
    PERSISTENT: tl.constexpr = 0,  # not 0: there are fewer programs than blocks, and each computes many
):
    blocks = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if PERSISTENT:  # as one loop with that over k: the next block is loaded while one is finished
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
            _compute(
                block, x, weight, x_scale, weight_scale, bias, scale, out, M, N, K,
                GELU, BY_HARDWARE, TMA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
            )  # fmt: skip
    else:
        _compute(
            tl.program_id(0), x, weight, x_scale, weight_scale, bias, scale, out, M, N, K,
            GELU, BY_HARDWARE, TMA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        )  # fmt: skip


@triton.jit
def _compute(
    block, x, weight, x_scale, weight_scale, bias, scale, out, M, N, K,
    GELU: tl.constexpr, BY_HARDWARE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One block of the result."""
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    first = block // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    place = block % (GROUP * columns)
    top = (first + place % height) * BLOCK_M
    left = place // height * BLOCK_N

    sum_type: tl.constexpr = tl.int32 if (x.dtype if TMA else x.dtype.element_ty) == tl.int8 else tl.float32
    total = tl.zeros([BLOCK_M, BLOCK_N], sum_type)
    for k in range(0, K, BLOCK_K):
        a = _block(x, top, k, M, K, BLOCK_M, BLOCK_K, TMA)
        b = _block(weight, left, k, N, K, BLOCK_N, BLOCK_K, TMA)
        total = tl.dot(a, b.T, total, out_dtype=sum_type)

    m = top + tl.arange(0, BLOCK_M)
    n = left + tl.arange(0, BLOCK_N)
    y = total.to(tl.float32) * tl.load(x_scale + m, mask=m < M, other=0.0)[:, None]
    y *= tl.load(weight_scale + n, mask=n < N, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        y = gelu_by_hardware(y) if BY_HARDWARE else gelu(y)
    if scale is not None:
        y *= 1.0 / tl.load(scale)
    pointers = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, y.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _block(matrix, top, k, size, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLUMNS] of a matrix [size, K] from row `top` and column `k` on, zeros past column K."""
    if TMA:
        block = matrix.load([top, k])
    else:  # rows past the last one are the last one again: they end in rows or columns that are not stored
        row = tl.minimum(top + tl.arange(0, ROWS), size - 1).to(tl.int64)
        column = k + tl.arange(0, COLUMNS)
        block = tl.load(matrix + row[:, None] * K + column[None, :], mask=(column < K)[None, :], other=0.0)
    return block
