"""Norms and quantised rows as a GPU computes them, against float64 and the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import relative_error
from tests.operator_calls import on_the_cpu, operator
from tests.passes.kernels.on_gpu.configurations import TOLERANCE, needs_float8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [768, 1280, 96])
def test_layer_norm_is_right(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 2, 64, 64, width, device="cuda") * 3 + 1).to(dtype)
    weight, bias = torch.randn(2, width, device="cuda").to(dtype)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)

    assert relative_error(torch.ops.samopt.layer_norm(x, weight, bias, 1e-6), norm(x)) < TOLERANCE[dtype] / 2
    ours = torch.ops.samopt.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert relative_error(ours, norm(x.double() + residual.double())) < TOLERANCE[dtype] / 2
    total, ours = torch.ops.samopt.sum_layer_norm(x, residual, x.flip(0), weight, bias, 1e-6)
    wanted = x.double() + residual.double() + x.flip(0).double()
    assert relative_error(total, wanted) < TOLERANCE[dtype] / 2
    assert relative_error(ours, norm(wanted)) < TOLERANCE[dtype] / 2


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_float8)], ids=str)
@pytest.mark.parametrize("width", [96, 768, 1280, 3072, 5120])
def test_quantised_rows_are_those_of_a_cpu_but_for_a_few(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 777, width, device="cuda") * 3 + 1).bfloat16()
    weight, bias = torch.randn(2, width, device="cuda").bfloat16()
    x[3] = 0
    for name, given in (
        ("quantize_rows", (x, dtype, False)),
        ("quantize_rows", (x, dtype, True)),
        ("layer_norm_rows", (x, residual, weight, bias, 1e-6, dtype)),
        ("layer_norm_rows", (x, None, weight, bias, 1e-6, dtype)),
        ("sum_layer_norm_rows", (x, residual, x.flip(0), weight, bias, 1e-6, dtype)),
    ):
        *total, values, scales = operator(name)(*given)
        *added, expected, wanted = operator(name)(*on_the_cpu(given))
        assert all(relative_error(mine.cpu(), other) < 1e-3 for mine, other in zip(total, added, strict=True))
        torch.testing.assert_close(scales.cpu(), wanted, rtol=2e-6, atol=0)
        assert (values.cpu().float() != expected.float()).float().mean() < 5e-3
        assert relative_error(values.cpu().float(), expected.float()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_float8)], ids=str)
def test_rows_that_are_not_finite_are_not_lost(dtype: torch.dtype) -> None:
    x = torch.randn(4, 1280, device="cuda")
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    _, scales = torch.ops.samopt.quantize_rows(x, dtype)
    assert scales.flatten().isfinite().tolist() == [True, False, False, True]
