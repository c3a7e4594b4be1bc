"""Attention inside windows, with decomposed relative positions, on the grid as it is: no window is copied.

With a row e of the row i and the column j of each key, zeros but for two slots that hold `one`, and the terms of
`position_terms` made with the factor 1 / (scale * one), the positions are one more product on the matrix units:

    s[q, (i, j)] = q.k[i, j] + terms[q] . e[i, j],      out[q] = softmax(scale * s[q]) v

`one` is a power of two near 1 / scale, so that the terms stay in float16's range as long as the positions do.

A program loads keys as boxes of whole rows, with columns padded to a power of two; a further slot of e marks what is
no key of this window. Tokens outside the grid arrive as zeros, but stand for the padding's key and value: a slot of
their own adds q.k_padding, and their weights together multiply v_padding at the end.

LAZY as in `global_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels.global_attention import LOG2E, OVERFLOW


@triton.jit
def window_attention(
    qkv,  # [B, H, W, 3, heads, D]
    keys1,  # descriptors of qkv as [B, H, W, 3 * heads * D]: blocks [1, K_ROWS, BOX_W, D1]
    keys2,  # ... and [1, K_ROWS, BOX_W, D2]
    padding,  # [3, heads, D]: what a token outside the grid has
    terms,  # [B, H, W, heads, SLOTS]
    one_hot,  # [2, 2, BOX_H * BOX_W, SLOTS]: of a window at the bottom border or not, at the right border or not
    out,  # [B, H, W, heads, D]
    out_scale,  # a number in memory that the result is divided by, or None
    H,
    W,
    windows_x,
    windows,  # of one image
    heads,
    scale,
    rows: tl.constexpr,  # of a window
    columns: tl.constexpr,
    BOX_H: tl.constexpr,  # rows and columns, padded to powers of two
    BOX_W: tl.constexpr,
    SLOTS: tl.constexpr,
    D1: tl.constexpr,  # D = D1 + D2, both powers of two, D2 may be 0
    D2: tl.constexpr,
    LAZY: tl.constexpr,
    Q_ROWS: tl.constexpr,  # rows of queries of a program
    K_ROWS: tl.constexpr,  # rows of keys of a step
    STAGES: tl.constexpr,
):
    D: tl.constexpr = D1 + D2
    BLOCK_M: tl.constexpr = Q_ROWS * BOX_W
    PARTS: tl.constexpr = (rows + Q_ROWS - 1) // Q_ROWS
    program = tl.program_id(0)
    part = program % PARTS
    head = program // PARTS % heads
    image = program // PARTS // heads // windows
    window = program // PARTS // heads % windows
    top = window // windows_x * rows
    left = window % windows_x * columns

    m = tl.arange(0, BLOCK_M)
    h = part * Q_ROWS + m // BOX_W
    w = m % BOX_W
    inside = (h < rows) & (w < columns) & (top + h < H) & (left + w < W)
    # 64-bit offsets for the image, 32-bit ones, which are cheaper, within it.
    first = image.to(tl.int64) * H * W * heads + head
    token = (((top + h) * W + left + w) * heads)[:, None]
    d1 = tl.arange(0, D1)
    d2 = D1 + tl.arange(0, D2 if D2 > 0 else D1)
    q_ptrs = qkv + (image.to(tl.int64) * H * W * 3 * heads + head) * D + token * (3 * D)
    q1 = tl.load(q_ptrs + d1[None, :], mask=inside[:, None], other=0.0)
    q2 = q1
    if D2 > 0:
        q2 = tl.load(q_ptrs + d2[None, :], mask=inside[:, None], other=0.0)
    slot = tl.arange(0, SLOTS)
    term = tl.load(terms + first * SLOTS + token * SLOTS + slot[None, :], mask=inside[:, None], other=0.0)

    end = tl.minimum(rows, H - top)  # of the rows and columns of this window inside the grid
    edge = tl.minimum(columns, W - left)
    one_hot += ((end < rows).to(tl.int32) * 2 + (edge < columns).to(tl.int32)) * BOX_H * BOX_W * SLOTS
    k_column = (heads + head) * D
    border = (end < rows) | (edge < columns)
    total, beyond, acc1, acc2 = _attend(
        q1, q2, term, keys1, keys2, one_hot, image, top, left, end, edge, border, k_column, heads * D, scale * LOG2E,
        rows, BOX_W, SLOTS, D1, D2, LAZY, BLOCK_M, K_ROWS, STAGES,
    )  # fmt: skip
    if LAZY:  # noqa: SIM102 - decided when Triton compiles, the next one when it runs
        # NaN compares false: whoever feeds NaN gets NaN, from either loop.
        if tl.max(total, axis=0) > OVERFLOW:
            total, beyond, acc1, acc2 = _attend(
                q1, q2, term, keys1, keys2, one_hot, image, top, left, end, edge, border, k_column, heads * D,
                scale * LOG2E, rows, BOX_W, SLOTS, D1, D2, False, BLOCK_M, K_ROWS, STAGES,
            )  # fmt: skip
    if border:
        v_padding = padding + (2 * heads + head) * D
        acc1 += beyond[:, None] * tl.load(v_padding + d1)[None, :].to(tl.float32)
        if D2 > 0:
            acc2 += beyond[:, None] * tl.load(v_padding + d2)[None, :].to(tl.float32)
    out_ptrs = out + first * D + token * D
    share = (1.0 / total)[:, None]
    if out_scale is not None:
        share = share / tl.load(out_scale)
    tl.store(out_ptrs + d1[None, :], (acc1 * share).to(out.dtype.element_ty), mask=inside[:, None])
    if D2 > 0:
        tl.store(out_ptrs + d2[None, :], (acc2 * share).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _attend(
    q1, q2, term, keys1, keys2, one_hot, image, top, left, end, edge, border, k_column, to_values, c,
    rows: tl.constexpr, BOX_W: tl.constexpr, SLOTS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    LAZY: tl.constexpr, BLOCK_M: tl.constexpr, K_ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Over all keys: the sum of weights [M], of those outside the grid, and the weighted values [M, D1], [M, D2]."""
    BLOCK_N: tl.constexpr = K_ROWS * BOX_W
    key = tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    beyond = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 16], tl.float32)
    for start in tl.range(0, rows, K_ROWS, num_stages=STAGES):
        hot = tl.load(one_hot + (start * BOX_W + key)[None, :] * SLOTS + slot[:, None])
        k1 = keys1.load([image, top + start, left, k_column]).reshape(BLOCK_N, D1)
        s = tl.dot(q1, k1.T, input_precision="ieee")
        if D2 > 0:
            k2 = keys2.load([image, top + start, left, k_column + D1]).reshape(BLOCK_N, D2)
            s = tl.dot(q2, k2.T, s, input_precision="ieee")
        s = tl.dot(term, hot, s, input_precision="ieee")
        if LAZY:
            if start == 0:
                maximum = tl.max(s, axis=1) * c
        else:
            new = tl.maximum(maximum, tl.max(s, axis=1) * c)
            rescale = tl.exp2(maximum - new)
            maximum = new
            total = total * rescale
            beyond = beyond * rescale
            acc1 = acc1 * rescale[:, None]
            if D2 > 0:
                acc2 = acc2 * rescale[:, None]
        p = tl.exp2(s * c - maximum[:, None])
        total += tl.sum(p, axis=1)
        if border:
            # What is no key has weight 0, and so needs no mask of its own here.
            outside = (start + key // BOX_W >= end) | (key % BOX_W >= edge)
            beyond += tl.sum(tl.where(outside[None, :], p, 0.0), axis=1)
        weights = p.to(q1.dtype)
        v1 = keys1.load([image, top + start, left, k_column + to_values]).reshape(BLOCK_N, D1)
        acc1 = tl.dot(weights, v1, acc1, input_precision="ieee")
        if D2 > 0:
            v2 = keys2.load([image, top + start, left, k_column + to_values + D1]).reshape(BLOCK_N, D2)
            acc2 = tl.dot(weights, v2, acc2, input_precision="ieee")
    return total, beyond, acc1, acc2
