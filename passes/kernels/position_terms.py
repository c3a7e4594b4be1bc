"""The position terms of every query: its products with the vectors of the distances to rows and to columns of keys.

    rows of keys i:     factor * q[h, w] . rel_pos_h[h - i + rows - 1]
    columns of keys j:  factor * q[h, w] . rel_pos_w[w - j + columns - 1]

One program takes queries of one row of the grid, or of one column: they share the vectors, so that the terms are one
small product, already in the order of the keys. Reading q by rows and again by columns costs little, since both
programs run while it is in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samopt.passes.kernels import arithmetic

MASK = tl.constexpr(arithmetic.MASK)


@triton.jit
def position_terms(
    qkv,  # [B, H, W, 3, heads, D]
    padding,  # [3, heads, D]: what a token outside the grid has
    rel_pos_h,  # [2 * rows - 1, D]
    rel_pos_w,  # [2 * columns - 1, D]
    out_h,  # of image, head, token and slot at the strides that follow
    out_w,
    image_h,
    head_h,
    token_h,
    slot_h,
    image_w,
    head_w,
    token_w,
    slot_w,
    H,
    W,
    rows,  # of a window; the grid's own where it is one window
    columns,
    heads,
    factor,
    padding_factor,  # of q.k_padding
    D1: tl.constexpr,  # D = D1 + D2, both powers of two, D2 may be 0
    D2: tl.constexpr,
    MARKS: tl.constexpr,  # whether q.k_padding and MASK follow the rows' terms, and zeros fill what is left
    SLOTS_H: tl.constexpr,  # powers of two
    SLOTS_W: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a program
):
    D: tl.constexpr = D1 + D2
    blocks_h = H * tl.cdiv(W, BLOCK_M)
    blocks = blocks_h + W * tl.cdiv(H, BLOCK_M)
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % heads
    image = (program // blocks // heads).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    token = 3 * heads * D  # elements from one token's q to the next one's
    queries = qkv + image * H * W * token + head * D
    if block < blocks_h:
        y = block % H
        xs = block // H * BLOCK_M + m
        i = tl.arange(0, SLOTS_H)
        vectors_h = rel_pos_h + (y % rows - i + rows - 1) * D
        used_h = i < rows
        if MARKS:
            vectors_h = tl.where(i == rows, padding + (heads + head) * D, vectors_h)
            used_h = i <= rows
        term_h = _product(queries + (y * W + xs) * token, xs < W, vectors_h, used_h, D1, D2)
        if MARKS:
            term_h *= tl.where(i == rows, padding_factor, factor)[None, :]
            term_h = tl.where((i == rows + 1)[None, :], MASK, term_h)
            used_h = i < SLOTS_H
        else:
            term_h *= factor
        to_h = out_h + image * image_h + head * head_h + (y * W + xs)[:, None] * token_h + i[None, :] * slot_h
        tl.store(to_h, term_h.to(out_h.dtype.element_ty), mask=(xs < W)[:, None] & used_h[None, :])
    else:
        x = (block - blocks_h) % W
        ys = (block - blocks_h) // W * BLOCK_M + m
        j = tl.arange(0, SLOTS_W)
        used_w = j < columns
        vectors_w = rel_pos_w + (x % columns - j + columns - 1) * D
        term_w = _product(queries + (ys * W + x) * token, ys < H, vectors_w, used_w, D1, D2) * factor
        if MARKS:
            used_w = j < SLOTS_W
        to_w = out_w + image * image_w + head * head_w + (ys * W + x)[:, None] * token_w + j[None, :] * slot_w
        tl.store(to_w, term_w.to(out_w.dtype.element_ty), mask=(ys < H)[:, None] & used_w[None, :])


@triton.jit
def _product(q_ptrs, q_used, vectors, used, D1: tl.constexpr, D2: tl.constexpr):
    """q [M, D] . vectors [N, D], zero where not used: float32 [M, N]."""
    d1 = tl.arange(0, D1)
    q1 = tl.load(q_ptrs[:, None] + d1[None, :], mask=q_used[:, None], other=0.0)
    vectors1 = tl.load(vectors[None, :] + d1[:, None], mask=used[None, :], other=0.0)
    product = tl.dot(q1, vectors1, input_precision="ieee")
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_ptrs[:, None] + d2[None, :], mask=q_used[:, None], other=0.0)
        vectors2 = tl.load(vectors[None, :] + d2[:, None], mask=used[None, :], other=0.0)
        product = tl.dot(q2, vectors2, product, input_precision="ieee")
    return product
