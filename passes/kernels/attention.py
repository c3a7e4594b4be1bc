"""SAM's encoder attention, windowed or global, as one operator: `torch.ops.samopt.attention`.

It takes queries, keys and values as the projection leaves them, on the token grid, and returns the grid: windows are
index arithmetic in the kernels. On a GPU it runs Triton kernels, on a CPU plain PyTorch; fake tensors give shapes.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels.attention_launch import Geometry, empty_like, launch
from samopt.passes.kernels.attention_problem import problem
from samopt.passes.kernels.attention_reference import reference
from samopt.passes.kernels.tuning import choose

attention = torch.library.custom_op("samopt::attention", reference, mutates_args=(), device_types="cpu")


@attention.register_fake
def _fake(
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
    return empty_like(qkv, out_scale)


@attention.register_kernel("cuda")
def _cuda(
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
    _, H, W, channels = qkv.shape
    geometry = Geometry(H, W, rows, columns, heads, channels // 3 // heads)
    try:
        config = choose(problem(geometry, qkv.dtype, qkv.device))
    except Unsupported as failure:  # a model moved to another GPU, or an image of another size than the pass saw
        warnings.warn(f"attention runs without its kernels, slowly: {failure}", stacklevel=1)
        return reference(qkv, padding, rel_pos_h, rel_pos_w, heads, rows, columns, scale, out_scale)
    return launch(config, geometry, qkv, padding, rel_pos_h, rel_pos_w, scale, out_scale=out_scale)
