"""What is tried to find a configuration of the attention kernels, and on what problem."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.attention_reference import reference
from samopt.passes.kernels.hopper_launch import hopper_candidates
from samopt.passes.kernels.tuning import Config, Problem

GLOBAL_SOURCES = ("arithmetic", "position_terms", "global_attention", "attention_launch")
WINDOW_SOURCES = (*GLOBAL_SOURCES, "window_attention", "hopper_launch", "hopper_turn", "hopper_window_attention")
# A pipeline of at least two stages: with one, Triton 3.6 reads windows of two-part heads from outside shared memory.
GLOBAL_CANDIDATES = (
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3, maxnreg=168),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, maxnreg=128),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=2),
    Config.of(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2),
)
WINDOW_CANDIDATES = (
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=2, maxnreg=128),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=3, maxnreg=168),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=8, num_stages=2, maxnreg=128),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(Q_ROWS=4, K_ROWS=8, num_warps=4, num_stages=2, maxnreg=168),
    Config.of(Q_ROWS=16, K_ROWS=4, num_warps=8, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=2, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=2, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=4, K_ROWS=2, num_warps=4, num_stages=3, maxnreg=96),
    Config.of(Q_ROWS=8, K_ROWS=2, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=8, K_ROWS=2, num_warps=8, num_stages=3),
)


def problem(geometry: Geometry, dtype: torch.dtype, device: torch.device, batch: int = 4) -> Problem:
    """What `choose` needs to find a configuration for this geometry: random inputs, made when asked for."""
    scale = geometry.D**-0.5

    @functools.cache
    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        channels = 3 * geometry.heads * geometry.D

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

        return (
            normal(batch, geometry.H, geometry.W, channels),
            normal(channels),
            normal(2 * geometry.rows - 1, geometry.D, std=0.1),
            normal(2 * geometry.columns - 1, geometry.D, std=0.1),
        )

    shape = (batch, geometry.H, geometry.W, geometry.heads * geometry.D)
    return Problem(
        kernel="global_attention" if geometry.is_global else "window_attention",
        shape=tuple(vars(geometry).items()),
        dtype=dtype,
        device=device,
        sources=GLOBAL_SOURCES if geometry.is_global else WINDOW_SOURCES,
        candidates=GLOBAL_CANDIDATES
        if geometry.is_global
        else (*hopper_candidates(geometry, device), *WINDOW_CANDIDATES),
        output=lambda: torch.empty(shape, dtype=dtype, device=device),
        run=lambda config, out: launch(config, geometry, *inputs(), scale, out),
        reference=lambda: by_head(geometry, *inputs(), scale),
    )


def by_head(
    geometry: Geometry, qkv: Tensor, padding: Tensor, rel_pos_h: Tensor, rel_pos_w: Tensor, scale: float
) -> Tensor:
    """`reference` in float32, image by image and head by head: the logits of one head alone take 64 MiB for 64x64
    tokens."""
    split = qkv.float().unflatten(-1, (3, geometry.heads, -1))
    pads = padding.float().unflatten(-1, (3, geometry.heads, -1))
    images = []
    for image in split.split(1):
        heads = [
            reference(
                image[..., head, :].flatten(3), pads[:, head].flatten(), rel_pos_h.float(), rel_pos_w.float(),
                1, geometry.rows, geometry.columns, scale,
            )
            for head in range(geometry.heads)
        ]  # fmt: skip
        images.append(torch.cat(heads, dim=-1))
    return torch.cat(images)
