"""A call of every operator of samopt, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import samopt.passes.kernels.attention
import samopt.passes.kernels.layer_norm
import samopt.passes.kernels.linear_gelu  # noqa: F401 - each registers its operators
from samopt.passes.kernels.attention_launch import Geometry
from tests.attention_problems import random_tensors, scale_of

OPERATORS = ("attention", "layer_norm", "add_layer_norm", "linear_gelu")


def operator(name: str) -> Any:
    """torch.ops.samopt.<name>"""
    return getattr(torch.ops.samopt, name).default


def arguments(name: str, dtype: torch.dtype, device: str = "cpu", rearranged: bool = False) -> tuple[Any, ...]:
    """Arguments for an operator: random tensors, the first of which lies in memory in another order if wanted."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def attention() -> tuple[Any, ...]:
        geometry = Geometry(8, 9, 5, 4, 2, 32)
        tensors = random_tensors(geometry, 2, dtype, device)
        return (*tensors, geometry.heads, geometry.rows, geometry.columns, scale_of(geometry))

    calls: dict[str, Callable[[], tuple[Any, ...]]] = {
        "attention": attention,
        "layer_norm": lambda: (normal(2, 3, 5, 96), normal(96), normal(96), 1e-6),
        "add_layer_norm": lambda: (normal(2, 3, 5, 96), normal(2, 3, 5, 96), normal(96), normal(96), 1e-6),
        "linear_gelu": lambda: (normal(2, 3, 5, 96), normal(64, 96), normal(64)),
    }
    first, *others = calls[name]()
    if rearranged:
        first = first.transpose(1, 2).contiguous().transpose(1, 2)
    return (first, *others)
