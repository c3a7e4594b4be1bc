"""Masks at the size of their image, and what is told of them, straight from the decoder's logits of low resolution.

SAM upscales a mask twice: to the model's square, cuts the padding off, and to the image's size. Both are bilinear, so
that a pixel is a sum over three rows and three columns of logits, with weights known before:

    out[y, x] = sum_i sum_j  rows[y, i] columns[x, j] logits[y0 + i, x0 + j],       y0, x0 the first of each

No square is made, and where only numbers are wanted, no mask either.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAPS = tl.constexpr(3)


@triton.jit
def upscale(
    logits,  # [N, h, w]
    rows,  # [H, 4]: the first of the three rows, and their weights
    columns,  # [W, 4]: likewise
    valid,  # bool [N], or None: masks that are not are left as they are
    out,  # [N, H, W]: logits, or bool
    threshold,  # of bool
    h,
    w: tl.constexpr,
    H,
    W,
    BINARY: tl.constexpr,  # whether `out` is bool
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    blocks_x = tl.cdiv(W, BLOCK_X)
    blocks = tl.cdiv(H, BLOCK_Y) * blocks_x
    mask = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if valid is not None:  # noqa: SIM102 - decided when Triton compiles, the next one when it runs
        if tl.load(valid + mask) == 0:
            return
    y = block // blocks_x * BLOCK_Y + tl.arange(0, BLOCK_Y)
    x = block % blocks_x * BLOCK_X + tl.arange(0, BLOCK_X)
    value = _tile(logits + mask * h * w, rows, columns, y, x, w, H, W)
    inside = (y < H)[:, None] & (x < W)[None, :]
    to = out + mask * H * W + y[:, None] * W + x[None, :]
    if BINARY:
        tl.store(to, value > threshold, mask=inside)
    else:
        tl.store(to, value, mask=inside)


@triton.jit
def measure(
    logits,  # [N, h, w]
    rows,  # [H, 4]
    columns,  # [W, 4]
    valid,  # bool [N]
    found,  # int32 [N, 6], added to, and made smaller and larger: see `upscale_masks.measure`
    threshold,
    offset,
    h,
    w: tl.constexpr,
    H,
    W,
    ROWS: tl.constexpr,  # of a program
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    parts = tl.cdiv(H, ROWS)
    mask = (tl.program_id(0) // parts).to(tl.int64)
    top = tl.program_id(0) % parts * ROWS
    if tl.load(valid + mask) == 0:
        return
    inner = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    outer = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    x0 = tl.full([BLOCK_Y, BLOCK_X], 2147483647, tl.int32)
    y0 = tl.full([BLOCK_Y, BLOCK_X], 2147483647, tl.int32)
    x1 = tl.full([BLOCK_Y, BLOCK_X], -1, tl.int32)
    y1 = tl.full([BLOCK_Y, BLOCK_X], -1, tl.int32)
    for line in range(top, tl.minimum(top + ROWS, H), BLOCK_Y):
        y = line + tl.arange(0, BLOCK_Y)
        for left in range(0, W, BLOCK_X):
            x = left + tl.arange(0, BLOCK_X)
            value = _tile(logits + mask * h * w, rows, columns, y, x, w, H, W)
            inside = (y < H)[:, None] & (x < W)[None, :]
            inner += (inside & (value > threshold + offset)).to(tl.int32)
            outer += (inside & (value > threshold - offset)).to(tl.int32)
            hit = inside & (value > threshold)
            x0 = tl.where(hit, tl.minimum(x0, x[None, :]), x0)
            y0 = tl.where(hit, tl.minimum(y0, y[:, None]), y0)
            x1 = tl.where(hit, tl.maximum(x1, x[None, :]), x1)
            y1 = tl.where(hit, tl.maximum(y1, y[:, None]), y1)
    of = found + mask * 6
    tl.atomic_add(of, tl.sum(tl.sum(inner, axis=1), axis=0))
    tl.atomic_add(of + 1, tl.sum(tl.sum(outer, axis=1), axis=0))
    tl.atomic_min(of + 2, tl.min(tl.min(x0, axis=1), axis=0))
    tl.atomic_min(of + 3, tl.min(tl.min(y0, axis=1), axis=0))
    tl.atomic_max(of + 4, tl.max(tl.max(x1, axis=1), axis=0))
    tl.atomic_max(of + 5, tl.max(tl.max(y1, axis=1), axis=0))


@triton.jit
def _tile(logits, rows, columns, y, x, w: tl.constexpr, H, W):
    """The pixels [Y, X] at y [Y] and x [X] of one mask; outside the image, anything."""
    first_y = tl.load(rows + y * 4, mask=y < H, other=0.0).to(tl.int32)
    first_x = tl.load(columns + x * 4, mask=x < W, other=0.0).to(tl.int32)
    first = logits + (
        first_y[:, None] * w + first_x[None, :]
    )  # one address a pixel: the others are known distances off
    total = tl.zeros([y.shape[0], x.shape[0]], tl.float32)
    for i in tl.static_range(TAPS):
        pixels = tl.zeros([y.shape[0], x.shape[0]], tl.float32)
        for j in tl.static_range(TAPS):
            weight = tl.load(columns + x * 4 + 1 + j, mask=x < W, other=0.0)
            pixels += tl.load(first + (i * w + j)).to(tl.float32) * weight[None, :]
        total += pixels * tl.load(rows + y * 4 + 1 + i, mask=y < H, other=0.0)[:, None]
    return total
