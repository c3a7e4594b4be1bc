"""Layer norm of one row by one program, which keeps it in registers: read once, residuals added on the way.

s = x + residual + second
y = (s - mean) / sqrt(variance + eps) * weight + bias,      mean and variance of the row of s, in float32

Where s is wanted itself, it is stored too. Where the next product is quantised, y is quantised before it leaves the
registers. A row is kept in two parts, of powers of two: 1,280 as 1,024 + 256, where one part of 2,048 would have the
warp compute on 768 values that are none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels.row_quantize import row_scale, store_part


@triton.jit
def row_norm(
    x,  # [M, C]
    residual,  # [M, C], or None: nothing is added
    second,  # likewise
    total,  # [M, C]: where s goes; or None
    weight,  # [C]
    bias,  # [C]
    out,  # [M, C]
    scales,  # [M], or None: out is not quantised
    eps,
    C: tl.constexpr,
    C1: tl.constexpr,  # the largest power of two that C has
    C2: tl.constexpr,  # the rest, padded to a power of two; 0 where there is none
    LIMIT: tl.constexpr,  # the largest value of out's dtype, where it is quantised
):
    program = tl.program_id(0).to(tl.int64)
    row = program * C
    column1 = tl.arange(0, C1)
    column2 = C1 + tl.arange(0, C2 if C2 > 0 else 1)
    part1 = _sum(x, residual, second, total, row, column1, C)
    part2 = tl.zeros([C2 if C2 > 0 else 1], tl.float32)
    if C2 > 0:
        part2 = _sum(x, residual, second, total, row, column2, C)
    mean = (tl.sum(part1, axis=0) + tl.sum(part2, axis=0)) / C
    part1 = part1 - mean
    part2 = tl.where(column2 < C, part2 - mean, 0.0)
    variance = (tl.sum(part1 * part1, axis=0) + tl.sum(part2 * part2, axis=0)) / C
    share = tl.rsqrt(variance + eps)
    part1 = _scaled(part1, share, weight, bias, column1, C)
    if C2 > 0:
        part2 = _scaled(part2, share, weight, bias, column2, C)
    scale = 1.0
    if scales is not None:
        scale = row_scale(part1, part2, LIMIT)
        tl.store(scales + program, scale)
    store_part(part1, scale, out + row, column1, C, scales is not None)
    if C2 > 0:
        store_part(part2, scale, out + row, column2, C, scales is not None)


@triton.jit
def _sum(x, residual, second, total, row, column, C: tl.constexpr):
    values = tl.load(x + row + column, mask=column < C, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row + column, mask=column < C, other=0.0).to(tl.float32)
    if second is not None:
        values += tl.load(second + row + column, mask=column < C, other=0.0).to(tl.float32)
    if total is not None:
        tl.store(total + row + column, values.to(total.dtype.element_ty), mask=column < C)
    return values


@triton.jit
def _scaled(centred, share, weight, bias, column, C: tl.constexpr):
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    return centred * share * w + b
