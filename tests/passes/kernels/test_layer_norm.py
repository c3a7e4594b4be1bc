"""The layer norm kernel in Triton's interpreter, and the operators on a CPU, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels.layer_norm import launch, launch_sum
from tests.attention_problems import poisoned
from tests.numerics import relative_error

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4}
EPS = 1e-6
SHAPES = [(2, 3, 5, 96), (7, 256), (3, 1280), (1, 1), (4, 5)]


def problem(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is normed, what is added to it, weight and bias. Rows differ in mean and width."""
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, *shape, generator=generator) * 3 + torch.randn(*shape[:-1], 1, generator=generator)
    weight, bias = torch.randn(2, shape[-1], generator=generator)
    return x.to(dtype), residual.to(dtype), weight.to(dtype), bias.to(dtype)


def truth(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), EPS)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, _, weight, bias = problem(shape, dtype)
    with poisoned():
        norm = launch((x,), weight, bias, EPS, x.new_empty(x.shape))
    assert (norm.shape, norm.dtype) == (x.shape, dtype)
    assert relative_error(norm, truth(x, weight, bias)) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_norms_a_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight, bias = problem(shape, dtype)
    before = x.clone()
    with poisoned():
        norm = launch((x, residual), weight, bias, EPS, x.new_empty(x.shape))
    assert (norm.shape, norm.dtype) == (x.shape, dtype)
    assert torch.equal(x, before)
    assert relative_error(norm, truth(x.double() + residual.double(), weight, bias)) < TOLERANCE[dtype]


@interpreted
def test_the_kernel_takes_tokens_in_any_order() -> None:
    x, _, weight, bias = problem((5, 3, 96), torch.float32)
    norm = launch((x.transpose(0, 1),), weight, bias, EPS, x.new_empty(3, 5, 96))
    assert norm.is_contiguous()
    assert relative_error(norm, truth(x.transpose(0, 1), weight, bias)) < 5e-7


@interpreted
def test_the_kernel_keeps_a_large_mean_apart() -> None:
    x, _, weight, bias = problem((4, 96), torch.float32)
    norm = launch((x + 1e3,), weight, bias, EPS, x.new_empty(x.shape))
    assert relative_error(norm, truth(x + 1e3, weight, bias)) < 1e-4, "the variance is that of the centred row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_operators_on_a_cpu_are_right(dtype: torch.dtype) -> None:
    x, residual, weight, bias = problem((2, 3, 96), dtype)
    tolerance = 2 * torch.finfo(dtype).eps
    assert relative_error(torch.ops.samopt.layer_norm(x, weight, bias, EPS), truth(x, weight, bias)) < tolerance
    norm = torch.ops.samopt.add_layer_norm(x, residual, weight, bias, EPS)
    assert relative_error(norm, truth(x.double() + residual.double(), weight, bias)) < tolerance


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 96), (1, 1), (3, 2048)], ids=str)
def test_the_kernel_adds_three_and_rounds_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, attended, mlp = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    attended[..., 0], mlp[..., 0] = 100, -100  # which in half precision costs the bits of what is left
    with poisoned():
        found = launch_sum(x.flip(0), attended, mlp)
    truth = (x.flip(0).double() + attended.double() + mlp.double()).to(dtype)
    assert found.is_contiguous()
    assert relative_error(found, truth) < {torch.float32: 1e-5, torch.float16: 1e-7}[dtype]
    assert torch.equal(torch.ops.samopt.residual_sum(x.flip(0), attended, mlp), found)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 96), (1, 1), (3, 1280)], ids=str)
def test_the_kernel_adds_three_gives_the_sum_and_norms_it_unrounded(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, attended, weight, bias = problem(shape, dtype)
    mlp = problem(shape, dtype)[0].flip(0) + 1
    before = [term.clone() for term in (x, attended, mlp)]
    wanted = x.double() + attended.double() + mlp.double()
    total = torch.full_like(x, torch.nan)
    with poisoned():
        norm = launch((x, attended, mlp), weight, bias, EPS, x.new_empty(x.shape), total)
    assert all(map(torch.equal, (x, attended, mlp), before))
    assert relative_error(total, wanted.to(dtype)) < {torch.float32: 1e-6, torch.float16: 1e-7}[dtype]
    assert relative_error(norm, truth(wanted, weight, bias)) < TOLERANCE[dtype]
    added, normed = torch.ops.samopt.sum_layer_norm(x, attended, mlp, weight, bias, EPS)
    assert torch.equal(added, total)
    assert relative_error(normed, truth(wanted, weight, bias)) < 2 * torch.finfo(dtype).eps
