"""A call of every operator of samopt, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import samopt.passes.kernels.attention
import samopt.passes.kernels.float8_gelu
import samopt.passes.kernels.float8_linear
import samopt.passes.kernels.image_to_token
import samopt.passes.kernels.int8_linear
import samopt.passes.kernels.layer_norm
import samopt.passes.kernels.linear
import samopt.passes.kernels.quantized_rows  # noqa: F401 - each registers its operators
from samopt.passes.kernels.attention_launch import Geometry
from tests.attention_problems import random_tensors, scale_of

OPERATORS = (
    "attention",
    "layer_norm",
    "add_layer_norm",
    "residual_sum",
    "sum_layer_norm",
    "linear",
    "quantize_rows",
    "layer_norm_rows",
    "sum_layer_norm_rows",
    "int8_linear",
    "float8_linear",
    "float8_gelu",
    "image_to_token",
)


def operator(name: str) -> Any:
    """torch.ops.samopt.<name>"""
    return getattr(torch.ops.samopt, name).default


def checks(name: str) -> tuple[str, ...]:
    """What `opcheck` is to check of an operator. Its check of the schema multiplies results, which PyTorch cannot do in
    float8."""
    schema = () if name.startswith("float8") else ("test_schema",)
    return (*schema, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def arguments(name: str, dtype: torch.dtype, device: str = "cpu", rearranged: bool = False) -> tuple[Any, ...]:
    """Arguments for an operator: random tensors, the first of which lies in memory in another order if wanted."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def attention() -> tuple[Any, ...]:
        geometry = Geometry(8, 9, 5, 4, 2, 32)
        tensors = random_tensors(geometry, 2, dtype, device)
        return (*tensors, geometry.heads, geometry.rows, geometry.columns, scale_of(geometry))

    def layer(operands: torch.dtype) -> tuple[Any, ...]:
        x, weight = (
            normal(*shape).float().mul(40).clamp(-128, 127).to(operands) for shape in ((2, 3, 5, 96), (64, 96))
        )
        x_scale, weight_scale = (normal(*shape).float().abs() / 40 for shape in ((2, 3, 5, 1), (64,)))
        return x, x_scale, weight, weight_scale, normal(64)

    calls: dict[str, Callable[[], tuple[Any, ...]]] = {
        "attention": attention,
        "layer_norm": lambda: (normal(2, 3, 5, 96), normal(96), normal(96), 1e-6),
        "add_layer_norm": lambda: (normal(2, 3, 5, 96), normal(2, 3, 5, 96), normal(96), normal(96), 1e-6),
        "residual_sum": lambda: (normal(2, 3, 5, 96), normal(2, 3, 5, 96), normal(2, 3, 5, 96)),
        "sum_layer_norm": lambda: (*(normal(2, 3, 5, 96) for _ in range(3)), normal(96), normal(96), 1e-6),
        "quantize_rows": lambda: (normal(2, 3, 5, 96), torch.int8, True),
        "layer_norm_rows": lambda: (normal(2, 3, 5, 96), normal(2, 3, 5, 96), normal(96), normal(96), 1e-6, torch.int8),
        "sum_layer_norm_rows": lambda: (
            *(normal(2, 3, 5, 96) for _ in range(3)),
            normal(96),
            normal(96),
            1e-6,
            torch.int8,
        ),
        "float8_linear": lambda: (*layer(torch.float8_e4m3fn), True, dtype),
        "int8_linear": lambda: (*layer(torch.int8), True, dtype),
        "float8_gelu": lambda: (*layer(torch.float8_e4m3fn), torch.tensor(0.25, device=device)),
        "linear": lambda: (normal(2, 3, 5, 96), normal(64, 96), normal(64), True),
        "image_to_token": lambda: (
            *(normal(2, 37, 64), normal(1, 37, 64), normal(2, 7, 32), normal(2, 7, 32)),
            *(normal(32, 64) / 8, normal(32), normal(64, 32) / 6, normal(64), normal(64), normal(64)),
            *(8, 1e-5),
        ),
    }
    first, *others = calls[name]()
    if rearranged:
        first = first.transpose(1, 2).contiguous().transpose(1, 2)
    return (first, *others)


def on_the_cpu(given: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments with their tensors on the CPU."""
    return tuple(x.cpu() if isinstance(x, Tensor) else x for x in given)
