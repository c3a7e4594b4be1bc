"""Quantisation of one row by one program, which keeps it in registers: read once, GELU on the way.

scale = largest |value| of the row / LIMIT,      values / scale, rounded to int8 or float8

NaN and infinity go into the scale, and by it into the products: int8 has neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels import quantized_rows
from samopt.passes.kernels.gelu import gelu

LEAST = tl.constexpr(quantized_rows.LEAST)
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 up to 2^22 added to it becomes an integer, half to even


@triton.jit
def row_quantize(
    x,  # [M, C]
    out,  # [M, C], int8 or float8
    scales,  # [M]
    C: tl.constexpr,
    C1: tl.constexpr,  # the largest power of two that C has
    C2: tl.constexpr,  # the rest, padded to a power of two; 0 where there is none
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest value of out's dtype
):
    row = tl.program_id(0).to(tl.int64)
    column1 = tl.arange(0, C1)
    column2 = C1 + tl.arange(0, C2 if C2 > 0 else 1)
    part1 = tl.load(x + row * C + column1).to(tl.float32)
    part2 = tl.load(x + row * C + column2, mask=column2 < C, other=0.0).to(tl.float32)
    if GELU:
        part1 = gelu(part1)
        part2 = gelu(part2)
    scale = row_scale(part1, part2, LIMIT)
    tl.store(scales + row, scale)
    store_part(part1, scale, out + row * C, column1, C, True)
    if C2 > 0:
        store_part(part2, scale, out + row * C, column2, C, True)


@triton.jit
def row_scale(part1, part2, LIMIT: tl.constexpr):
    """The scale of a row of float32 values in two parts, zero where there is no value."""
    largest = _larger(tl.reduce(tl.abs(part1), 0, _larger), tl.reduce(tl.abs(part2), 0, _larger))
    return tl.maximum(largest, LEAST, propagate_nan=tl.PropagateNan.ALL) / LIMIT


@triton.jit
def store_part(values, scale, out, column, C: tl.constexpr, QUANTIZE: tl.constexpr):
    """Stores float32 values of a row at its columns, quantised where asked."""
    if QUANTIZE:
        values = values * (1.0 / scale)
        if out.dtype.element_ty == tl.int8:
            values = (values + ROUNDS) - ROUNDS
    tl.store(out + column, values.to(out.dtype.element_ty), mask=column < C)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
