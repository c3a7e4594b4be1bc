"""Masks at the size of their image, and what is told of them, straight from the decoder's logits of low resolution.

SAM upscales a mask twice: to the model's square, cuts the padding off, and to the image's size. Both are bilinear, so
that a pixel is a sum over three rows and three columns of logits, with weights known before:

    out[y, x] = sum_i rows[y, i] line[y0 + i, x],       line[r, x] = sum_j columns[x, j] logits[r, x0 + j],

y0 and x0 the first of each. Pixels of several rows have the same y0: a program goes down the logits, interpolates each
line once, and makes all pixel rows between the last three. No square is made, and where only numbers are wanted, no
mask either.
"""

from __future__ import annotations

import triton
import triton.language as tl


# One compilation serves pictures of all heights; of widths those that vector stores fit have their own.
@triton.jit(do_not_specialize=["h", "H"])
def upscale(
    logits,  # [N, h, w]
    rows,  # [H, 4]: the first of the three lines, and their weights
    columns,  # [W, 4]: likewise of the columns
    starts,  # int32 [h - 1]: of each line the first row of pixels that it is the first line of, or would be; H
    valid,  # bool [N], or None: masks that are not are left as they are
    out,  # [N, H, W]: logits, or bool
    threshold,  # of bool
    h,
    w: tl.constexpr,
    H,
    W,
    BINARY: tl.constexpr,  # whether `out` is bool
    LINES: tl.constexpr,  # of a program
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    blocks_x = tl.cdiv(W, BLOCK_X)
    blocks = tl.cdiv(h - 2, LINES) * blocks_x
    mask = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if valid is not None:  # noqa: SIM102 - decided when Triton compiles, the next one when it runs
        if tl.load(valid + mask) == 0:
            return
    logits += mask * h * w
    out += mask * H * W
    x = block % blocks_x * BLOCK_X + tl.arange(0, BLOCK_X)
    top = block // blocks_x * LINES
    first = _line(logits, top, columns, x, w, W)
    second = _line(logits, top + 1, columns, x, w, W)
    for line in range(top, tl.minimum(top + LINES, h - 2)):
        third = _line(logits, line + 2, columns, x, w, W)
        end = tl.load(starts + line + 1)
        for start in range(tl.load(starts + line), end, BLOCK_Y):
            y = start + tl.arange(0, BLOCK_Y)
            value = _pixels(first, second, third, rows, y, end)
            inside = (y < end)[:, None] & (x < W)[None, :]
            to = out + y[:, None] * W + x[None, :]
            if BINARY:
                tl.store(to, value > threshold, mask=inside)
            else:
                tl.store(to, value, mask=inside)
        first, second = second, third


@triton.jit(do_not_specialize=["h", "W"])
def measure(
    logits,  # [N, h, w]
    rows,  # [H, 4]
    columns,  # [W, 4]
    starts,  # int32 [h - 1]
    valid,  # bool [N]
    found,  # int32 [N, 6], added to, and made smaller and larger: see `upscale_masks.measure`
    threshold,
    offset,
    h,
    w: tl.constexpr,
    W,
    LINES: tl.constexpr,  # of a program
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    parts = tl.cdiv(h - 2, LINES)
    mask = (tl.program_id(0) // parts).to(tl.int64)
    top = tl.program_id(0) % parts * LINES
    if tl.load(valid + mask) == 0:
        return
    logits += mask * h * w
    inner = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    outer = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    x0 = tl.full([BLOCK_Y, BLOCK_X], 2147483647, tl.int32)
    y0 = tl.full([BLOCK_Y, BLOCK_X], 2147483647, tl.int32)
    x1 = tl.full([BLOCK_Y, BLOCK_X], -1, tl.int32)
    y1 = tl.full([BLOCK_Y, BLOCK_X], -1, tl.int32)
    for left in range(0, W, BLOCK_X):
        x = left + tl.arange(0, BLOCK_X)
        first = _line(logits, top, columns, x, w, W)
        second = _line(logits, top + 1, columns, x, w, W)
        for line in range(top, tl.minimum(top + LINES, h - 2)):
            third = _line(logits, line + 2, columns, x, w, W)
            end = tl.load(starts + line + 1)
            for start in range(tl.load(starts + line), end, BLOCK_Y):
                y = start + tl.arange(0, BLOCK_Y)
                value = _pixels(first, second, third, rows, y, end)
                inside = (y < end)[:, None] & (x < W)[None, :]
                inner += (inside & (value > threshold + offset)).to(tl.int32)
                outer += (inside & (value > threshold - offset)).to(tl.int32)
                hit = inside & (value > threshold)
                x0 = tl.where(hit, tl.minimum(x0, x[None, :]), x0)
                y0 = tl.where(hit, tl.minimum(y0, y[:, None]), y0)
                x1 = tl.where(hit, tl.maximum(x1, x[None, :]), x1)
                y1 = tl.where(hit, tl.maximum(y1, y[:, None]), y1)
            first, second = second, third
    of = found + mask * 6
    tl.atomic_add(of, tl.sum(tl.sum(inner, axis=1), axis=0))
    tl.atomic_add(of + 1, tl.sum(tl.sum(outer, axis=1), axis=0))
    tl.atomic_min(of + 2, tl.min(tl.min(x0, axis=1), axis=0))
    tl.atomic_min(of + 3, tl.min(tl.min(y0, axis=1), axis=0))
    tl.atomic_max(of + 4, tl.max(tl.max(x1, axis=1), axis=0))
    tl.atomic_max(of + 5, tl.max(tl.max(y1, axis=1), axis=0))


@triton.jit
def _line(logits, line, columns, x, w: tl.constexpr, W):
    """A line of one mask's logits, interpolated at x [X]; past the image's right side, anything."""
    taps = columns + x * 4
    place = logits + line * w + tl.load(taps, mask=x < W, other=0.0).to(tl.int32)
    total = tl.load(place).to(tl.float32) * tl.load(taps + 1, mask=x < W, other=0.0)
    total += tl.load(place + 1).to(tl.float32) * tl.load(taps + 2, mask=x < W, other=0.0)
    return total + tl.load(place + 2).to(tl.float32) * tl.load(taps + 3, mask=x < W, other=0.0)


@triton.jit
def _pixels(first, second, third, rows, y, end):
    """The pixels [Y, X] of the rows y [Y], up to `end`, between three lines [X]."""
    taps = rows + y * 4
    total = first[None, :] * tl.load(taps + 1, mask=y < end, other=0.0)[:, None]
    total += second[None, :] * tl.load(taps + 2, mask=y < end, other=0.0)[:, None]
    return total + third[None, :] * tl.load(taps + 3, mask=y < end, other=0.0)[:, None]
