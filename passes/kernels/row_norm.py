"""Layer norm of one row by one program, which keeps it in registers: read once, a residual added on the way.

s = x + residual
y = (s - mean) / sqrt(variance + eps) * weight + bias,      mean and variance of the row of s, in float32

Where the next product is quantised, y is quantised before it leaves the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels.row_quantize import store_row


@triton.jit
def row_norm(
    x,  # [M, C]
    residual,  # [M, C], or None: nothing is added
    weight,  # [C]
    bias,  # [C]
    out,  # [M, C]
    scales,  # [M], or None: out is not quantised
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,  # C padded to a power of two
    LIMIT: tl.constexpr,  # the largest value of out's dtype, where it is quantised
):
    program = tl.program_id(0).to(tl.int64)
    row = program * C
    column = tl.arange(0, BLOCK)
    used = column < C
    values = tl.load(x + row + column, mask=used, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row + column, mask=used, other=0.0).to(tl.float32)
    centred = tl.where(used, values - tl.sum(values, axis=0) / C, 0.0)
    variance = tl.sum(centred * centred, axis=0) / C
    w = tl.load(weight + column, mask=used, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=used, other=0.0).to(tl.float32)
    result = centred * tl.rsqrt(variance + eps) * w + b
    if scales is not None:
        store_row(result, out + row + column, used, scales + program, LIMIT)
    else:
        tl.store(out + row + column, result.to(out.dtype.element_ty), mask=used)
