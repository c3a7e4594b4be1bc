"""Attention problems for the kernels' tests, and their right answers: of SAM's own modules, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from segment_anything.modeling.image_encoder import Attention, window_partition, window_unpartition
from torch import Tensor, nn

from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.tuning import Config

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # qkv, padding, rel_pos_h, rel_pos_w


def random_tensors(
    geometry: Geometry,
    batch: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 1,
    factor: float = 1,
) -> Tensors:
    """What the operator takes for a geometry, normally distributed; queries and keys `factor` times as wide."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    qkv = normal(batch, geometry.H, geometry.W, 3, geometry.heads * geometry.D)
    qkv[..., :2, :] *= factor
    padding = normal(3 * geometry.heads * geometry.D)
    rel_pos_h, rel_pos_w = (normal(2 * size - 1, geometry.D) * 0.1 for size in (geometry.rows, geometry.columns))
    return qkv.flatten(3).to(dtype), padding.to(dtype), rel_pos_h.to(dtype), rel_pos_w.to(dtype)


def scale_of(geometry: Geometry) -> float:
    """The factor of q.k that SAM has."""
    return geometry.D**-0.5


class Shift(nn.Module):
    """In place of SAM's projection to q, k and v: adds its bias, which is all that a zero token gets there too."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@torch.no_grad()
def truth(geometry: Geometry, tensors: Tensors, scale: float | None = None) -> Tensor:
    """[B, H, W, heads * D] in float64, by SAM's attention in SAM's windows, one image after the other."""
    qkv, padding, rel_pos_h, rel_pos_w = (tensor.double() for tensor in tensors)
    rows, columns = geometry.rows, geometry.columns
    attention = Attention(geometry.heads * geometry.D, geometry.heads, use_rel_pos=True, input_size=(rows, columns))
    attention.qkv, attention.proj = Shift(padding), nn.Identity()
    attention.rel_pos_h, attention.rel_pos_w = nn.Parameter(rel_pos_h), nn.Parameter(rel_pos_w)
    attention.scale = scale_of(geometry) if scale is None else scale
    return torch.cat([_in_windows(attention, image, geometry) for image in (qkv - padding).split(1)])


def _in_windows(attention: nn.Module, x: Tensor, geometry: Geometry) -> Tensor:
    H, W, rows, columns = geometry.H, geometry.W, geometry.rows, geometry.columns
    if rows == columns:
        windows, padded = window_partition(x, rows)
        return window_unpartition(attention(windows), rows, padded, (H, W))
    # SAM's windows are square. Others are cut out one by one.
    out = x.new_full((len(x), H, W, geometry.heads * geometry.D), torch.nan)
    for top in range(0, H, rows):
        for left in range(0, W, columns):
            cut = x[:, top : top + rows, left : left + columns]
            height, width = cut.shape[1:3]
            window = F.pad(cut, (0, 0, 0, columns - width, 0, rows - height))
            out[:, top : top + rows, left : left + columns] = attention(window)[:, :height, :width]
    return out


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch hands out is full of NaN meanwhile: a kernel that reads what none wrote gives itself away."""
    torch.use_deterministic_algorithms(True)  # `torch.utils.deterministic.fill_uninitialized_memory` is on by default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def launched(config: Config, geometry: Geometry, tensors: Tensors, scale: float | None = None) -> Tensor:
    """What the kernels give with a configuration, in poisoned memory."""
    with poisoned():
        return launch(config, geometry, *tensors, scale_of(geometry) if scale is None else scale)
