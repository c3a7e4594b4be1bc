"""Quantisation of one row by one program, which keeps it in registers: read once, GELU on the way.

scale = largest |value| of the row / LIMIT,      values / scale, rounded to int8 or float8

NaN and infinity go into the scale, and by it into the products: int8 has neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels.gelu import gelu

LEAST = tl.constexpr(1e-30)  # of the largest |value|: a row of zeros has a scale too, and stays zero
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 up to 2^22 added to it becomes an integer, half to even


@triton.jit
def row_quantize(
    x,  # [M, C]
    out,  # [M, C], int8 or float8
    scales,  # [M]
    C: tl.constexpr,
    BLOCK: tl.constexpr,  # C padded to a power of two
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest value of out's dtype
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    used = column < C
    values = tl.load(x + row * C + column, mask=used, other=0.0).to(tl.float32)
    if GELU:
        values = gelu(values)
    store_row(values, out + row * C + column, used, scales + row, LIMIT)


@triton.jit
def store_row(values, out_ptrs, used, scale_ptr, LIMIT: tl.constexpr):
    """Quantises a row of float32 values, zero where not used, and stores it with its scale."""
    scale = tl.maximum(tl.reduce(tl.abs(values), 0, _larger), LEAST, propagate_nan=tl.PropagateNan.ALL) / LIMIT
    values = values * (1.0 / scale)
    if out_ptrs.dtype.element_ty == tl.int8:
        values = (values + ROUNDS) - ROUNDS
    tl.store(out_ptrs, values.to(out_ptrs.dtype.element_ty), mask=used)
    tl.store(scale_ptr, scale)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
