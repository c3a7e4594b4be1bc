"""SAM's encoder attention on the token grid in plain PyTorch: what the kernels are checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.quantized_rows import saturated


def reference(
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    heads: int,
    rows: int,
    columns: int,
    scale: float,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Attention within windows of a token grid, with decomposed relative positions (MViTv2, arXiv:2112.01526, eq. 4).

    In plain PyTorch: what the operator computes on a CPU, and what its kernels are checked against.

    Windows that reach past the grid's bottom or right see the padding there: `padding` is what a token outside the
    grid has for q, k and v.

    Args:
        qkv: [B, H, W, 3 * heads * D], contiguous.
        padding: [3 * heads * D].
        rel_pos_h: one vector per distance of rows, [2 * rows - 1, D].
        rel_pos_w: likewise of columns, [2 * columns - 1, D].
        heads: number of heads.
        rows: height of a window in tokens; of the grid for global attention.
        columns: its width.
        scale: of q.k; the positions are added unscaled.
        out_scale: a float32 number on the device, by which the result is divided to be rounded to float8_e4m3fn; what
            is larger than its 448 becomes 448. None leaves the result in the dtype of `qkv`.

    Returns:
        [B, H, W, heads * D], contiguous.
    """
    B, H, W, _ = qkv.shape
    windows = partition(qkv, padding, rows, columns).unflatten(-1, (3, heads, -1))
    q, k, v = windows.permute(3, 0, 4, 1, 2, 5).unbind(0)  # each [windows, heads, rows, columns, D]
    term_h = torch.einsum("bnhwc,hkc->bnhwk", q, skewed(rel_pos_h, rows))
    term_w = torch.einsum("bnhwc,wkc->bnhwk", q, skewed(rel_pos_w, columns))
    bias = (term_h[..., :, None] + term_w[..., None, :]).flatten(4, 5).flatten(2, 3)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)  # [windows, heads, rows * columns, D]
    out = out.transpose(1, 2).reshape(-1, rows, columns, heads * q.shape[-1])
    out = unpartition(out, B, H, W).contiguous()
    return out if out_scale is None else saturated(out.float(), out_scale)


def partition(x: Tensor, padding: Tensor, rows: int, columns: int) -> Tensor:
    """Windows [B * windows, rows, columns, C] of a grid [B, H, W, C], filled up with `padding` [C]."""
    B, H, W, C = x.shape
    if (H % rows, W % columns) != (0, 0):
        full = padding.expand(B, H + -H % rows, W + -W % columns, C).clone()
        full[:, :H, :W] = x
        x = full
    windows = x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))  # [B, down, rows, across, columns, C]
    return windows.transpose(2, 3).flatten(0, 2)


def unpartition(windows: Tensor, B: int, H: int, W: int) -> Tensor:
    """The grid [B, H, W, C] of windows [B * windows, rows, columns, C], without what they were filled up with."""
    rows, columns = windows.shape[1:3]
    down, across = -(-H // rows), -(-W // columns)
    grid = windows.unflatten(0, (B, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return grid[:, :H, :W]


def skewed(rel_pos: Tensor, size: int) -> Tensor:
    """R[h, i] = rel_pos[h - i + size - 1]: [size, size, D]."""
    tokens = torch.arange(size, device=rel_pos.device)
    return rel_pos[tokens[:, None] - tokens[None, :] + (size - 1)]
