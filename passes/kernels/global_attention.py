"""Attention over the whole token grid, with decomposed relative positions: one row of keys, or a part of it, a step.

With c = scale * log2(e), and the terms of `position_terms` made with the factor log2(e),

    s[q, (i, j)] = c * q.k[i, j] + row_term[q, i] + column_term[q, j]
    out[q]       = sum_k 2^(s[q, k] - m[q]) v[k] / sum_k 2^(s[q, k] - m[q])

Within a step the row's term is one number per query, which joins m, and the column's term is the same tile at every
step: the positions cost one multiply-add per logit, and no [N, N] bias is made.

Any m gives the same result, as long as nothing overflows. LAZY takes the maximum of the first keys for m, which spares
a maximum and a rescaling per step; should the sum grow past 2^100, the queries are computed again with the running
maximum of FlashAttention (arXiv:2205.14135). float16 weights would overflow at once: LAZY is for bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels import arithmetic

LOG2E = tl.constexpr(arithmetic.LOG2E)
OVERFLOW = tl.constexpr(arithmetic.OVERFLOW)


@triton.jit
def global_attention(
    qkv,  # [B, H, W, 3, heads, D]
    keys1,  # descriptors of qkv as [B * H * W, 3 * heads * D]: blocks [BLOCK_N, D1]
    keys2,  # ... and [BLOCK_N, D2]
    row_terms,  # [B, heads, H, H * W]
    column_terms,  # [B, heads, H * W, W]
    out,  # [B, H, W, heads, D]
    out_scale,  # a number in memory that the result is divided by, or None
    H,
    W,
    heads,
    scale,
    D1: tl.constexpr,  # D = D1 + D2, both powers of two, D2 may be 0
    D2: tl.constexpr,
    LAZY: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a program
    BLOCK_N: tl.constexpr,  # keys of a step: W of them at most, and no more than W padded to a power of two
    CHUNKS: tl.constexpr,  # steps in a row of keys
    STAGES: tl.constexpr,
):
    D: tl.constexpr = D1 + D2
    N = H * W
    blocks = tl.cdiv(N, BLOCK_M)
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % heads
    image = program // blocks // heads
    query = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = query < N
    token = image.to(tl.int64) * N + query
    d1 = tl.arange(0, D1)
    d2 = D1 + tl.arange(0, D2 if D2 > 0 else D1)
    q_ptrs = qkv + (token * 3 * heads + head)[:, None] * D
    q1 = tl.load(q_ptrs + d1[None, :], mask=inside[:, None], other=0.0)
    q2 = q1
    if D2 > 0:
        q2 = tl.load(q_ptrs + d2[None, :], mask=inside[:, None], other=0.0)
    pair = (image * heads + head).to(tl.int64)
    row_ptrs = row_terms + pair * H * N + tl.where(inside, query, 0)
    column_ptrs = column_terms + (pair * N + tl.where(inside, query, 0)) * W

    c = scale * LOG2E
    first = image * N
    k_column = (heads + head) * D
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if LAZY:
        s = _logits(q1, q2, keys1, keys2, first, k_column, D1, D2) * c + _columns(column_ptrs, 0, W, BLOCK_N)
        maximum = tl.max(s, axis=1) + tl.load(row_ptrs).to(tl.float32)
    total, acc1, acc2 = _attend(
        q1, q2, keys1, keys2, first, k_column, heads * D, row_ptrs, column_ptrs, maximum, H, W, c,
        D1, D2, not LAZY, BLOCK_M, BLOCK_N, CHUNKS, STAGES,
    )  # fmt: skip
    if LAZY:  # noqa: SIM102 - decided when Triton compiles, the next one when it runs
        # NaN compares false: whoever feeds NaN gets NaN, from either loop.
        if tl.max(total, axis=0) > OVERFLOW:
            maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total, acc1, acc2 = _attend(
                q1, q2, keys1, keys2, first, k_column, heads * D, row_ptrs, column_ptrs, maximum, H, W, c,
                D1, D2, True, BLOCK_M, BLOCK_N, CHUNKS, STAGES,
            )  # fmt: skip

    out_ptrs = out + (token * heads + head)[:, None] * D
    share = (1.0 / total)[:, None]
    if out_scale is not None:
        share = share / tl.load(out_scale)
    tl.store(out_ptrs + d1[None, :], (acc1 * share).to(out.dtype.element_ty), mask=inside[:, None])
    if D2 > 0:
        tl.store(out_ptrs + d2[None, :], (acc2 * share).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _columns(column_ptrs, start, W, BLOCK_N: tl.constexpr):
    j = start + tl.arange(0, BLOCK_N)
    return tl.load(column_ptrs[:, None] + j[None, :], mask=(j < W)[None, :], other=float("-inf")).to(tl.float32)


@triton.jit
def _logits(q1, q2, keys1, keys2, at, k_column, D1: tl.constexpr, D2: tl.constexpr):
    s = tl.dot(q1, keys1.load([at, k_column]).T, input_precision="ieee")
    if D2 > 0:
        s = tl.dot(q2, keys2.load([at, k_column + D1]).T, s, input_precision="ieee")
    return s


@triton.jit
def _attend(
    q1, q2, keys1, keys2, first, k_column, to_values, row_ptrs, column_ptrs, maximum, H, W, c,
    D1: tl.constexpr, D2: tl.constexpr, RUNNING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Over all keys: the sum of weights [M], and the weighted values [M, D1] and [M, D2]."""
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 16], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        # Keys past a row's end have weight 0: they are the next row's, or zeros.
        column_term = _columns(column_ptrs, chunk * BLOCK_N, W, BLOCK_N)
        row_term = tl.load(row_ptrs)
        for i in tl.range(0, H, num_stages=STAGES):
            at = first + i * W + chunk * BLOCK_N
            s = _logits(q1, q2, keys1, keys2, at, k_column, D1, D2) * c + column_term
            shift = row_term.to(tl.float32)
            row_term = tl.load(row_ptrs + tl.minimum(i + 1, H - 1) * H * W)  # a step ahead: nothing waits for it
            if RUNNING:
                new = tl.maximum(maximum, tl.max(s, axis=1) + shift)
                rescale = tl.exp2(maximum - new)
                maximum = new
                total = total * rescale
                acc1 = acc1 * rescale[:, None]
                if D2 > 0:
                    acc2 = acc2 * rescale[:, None]
            p = tl.exp2(s + (shift - maximum)[:, None])
            total += tl.sum(p, axis=1)
            weights = p.to(q1.dtype)
            acc1 = tl.dot(weights, keys1.load([at, k_column + to_values]), acc1, input_precision="ieee")
            if D2 > 0:
                values2 = keys2.load([at, k_column + to_values + D1])
                acc2 = tl.dot(weights, values2, acc2, input_precision="ieee")
    return total, acc1, acc2
