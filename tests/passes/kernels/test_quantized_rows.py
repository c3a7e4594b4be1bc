"""Rows quantised by the kernels in Triton's interpreter, and by the operators on a CPU, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels import layer_norm
from samopt.passes.kernels.quantized_rows import (
    LIMITS,
    Rows,
    launch,
    layer_norm_rows,
    quantize_rows,
    sum_layer_norm_rows,
)
from tests.attention_problems import poisoned
from tests.numerics import relative_error

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)
ROUNDING = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4}  # of the largest value, and of each value itself
SHAPES = [(2, 3, 96), (5, 1280), (1, 16), (3, 80)]
EPS = 1e-6


def rows(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different widths, one of them zeros."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randn(*shape[:-1], 1, generator=generator).mul(3)
    if x.numel() > shape[-1]:
        x.view(-1, shape[-1])[1] = 0
    return x.to(dtype)


def assert_nearest(found: Rows, truth: Tensor, dtype: torch.dtype, within: float = 1.0) -> None:
    """Asserts that the rows stand for `truth`, float64, each value off by the dtype's rounding at most."""
    assert found.values.dtype is dtype
    assert found.scales.dtype is torch.float32
    assert found.scales.shape == (*truth.shape[:-1], 1)
    largest = truth.abs().amax(-1, keepdim=True)
    assert torch.allclose(found.scales.double() * LIMITS[dtype], largest.clamp(min=1e-30), rtol=2e-6)
    error = (found.values.double() * found.scales.double() - truth).abs()
    bound = ROUNDING[dtype] * (largest if dtype is torch.int8 else truth.abs()) * within + 1e-5 * largest
    smallest = 0.0 if dtype is torch.int8 else 2.0**-10 * largest / LIMITS[dtype]  # half of the least subnormal
    assert (error <= bound + smallest).all()


def gelu(x: Tensor) -> Tensor:
    """The exact form, in float64."""
    return torch.from_numpy(np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x.double().numpy()))


# The interpreter's float8 loses a carry of the mantissa into the exponent: 15.9 becomes 8. A GPU's does not.
CARRY = {torch.int8: 1.0, torch.float8_e4m3fn: 8.5}


@interpreted
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_quantises_to_the_nearest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = rows(shape)
    with poisoned():
        found = Rows(*launch(x, dtype))
    assert_nearest(found, x.double(), dtype, CARRY[dtype])
    expected = Rows(*quantize_rows(x, dtype))
    assert torch.equal(found.scales, expected.scales)
    assert (found.values.float() != expected.values.float()).float().mean() < (0.01 if dtype is torch.int8 else 0.1)


@interpreted
@dtypes
def test_the_kernel_takes_gelu_on_the_way(dtype: torch.dtype) -> None:
    x = rows((7, 320), torch.float16)
    truth = F.gelu(x.double(), approximate="tanh")
    with poisoned(), np.errstate(over="ignore"):  # the exponential of what GELU makes zero
        found = Rows(*launch(x, dtype, gelu=True))
    assert_nearest(found, truth, dtype, CARRY[dtype])
    assert (truth - gelu(x)).abs().max() < 5e-4, "the tanh form is off by this at most"


@interpreted
@dtypes
@pytest.mark.parametrize("count", [1, 2, 3], ids=["norm", "norm of a sum", "norm of three, and their sum"])
def test_the_kernel_norms_on_the_way(dtype: torch.dtype, count: int) -> None:
    terms = (rows((4, 3, 80)), rows((4, 3, 80)).flip(0), rows((4, 3, 80)).flip(1))[:count]
    weight, bias = torch.randn(2, 80, generator=torch.Generator().manual_seed(0))
    wanted = sum(term.double() for term in terms)
    assert isinstance(wanted, Tensor)
    truth = F.layer_norm(wanted, (80,), weight.double(), bias.double(), EPS)
    found = Rows(wanted.new_empty(wanted.shape, dtype=dtype), terms[0].new_empty(4, 3, 1))
    total = torch.full_like(terms[0], torch.nan) if count == 3 else None
    with poisoned():
        layer_norm.launch(terms, weight, bias, EPS, found.values, total, found.scales, LIMITS[dtype])
    assert_nearest(found, truth, dtype, CARRY[dtype])
    if total is None:
        rows_found = layer_norm_rows(terms[0], terms[1] if count == 2 else None, weight, bias, EPS, dtype)
    else:
        assert (total - wanted).abs().max() < 1e-5
        added, *rows_found = sum_layer_norm_rows(*terms, weight, bias, EPS, dtype)
        assert torch.equal(added, total)
    assert_nearest(Rows(*rows_found), truth, dtype)


@dtypes
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_operator_on_a_cpu_quantises_to_the_nearest(dtype: torch.dtype, given: torch.dtype) -> None:
    x = rows((3, 5, 96), given)
    assert_nearest(Rows(*quantize_rows(x, dtype)), x.double(), dtype)
    assert_nearest(Rows(*quantize_rows(x, dtype, True)), F.gelu(x.double(), approximate="tanh"), dtype)


@dtypes
def test_zeros_stay_zeros_and_halves_go_to_even(dtype: torch.dtype) -> None:
    values, scales = quantize_rows(torch.zeros(2, 16), dtype)
    assert not values.float().any()
    assert (scales > 0).all()
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


@interpreted
@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(dtype: torch.dtype, bad: float) -> None:
    x = rows((3, 32))
    x[2, 7] = bad
    computed: list[Any] = [quantize_rows(x, dtype)]
    with np.errstate(invalid="ignore"):
        computed.append(launch(x, dtype))
    for values, scales in computed:
        assert scales.isfinite().flatten().tolist() == [True, True, False]
        products = (values.float() @ torch.ones(32)) * scales[:, 0]
        assert products.isnan().tolist()[2] or products.isinf().tolist()[2]
        assert products[:2].isfinite().all()


@interpreted
@dtypes
def test_rows_in_any_order_give_contiguous_ones(dtype: torch.dtype) -> None:
    x = rows((4, 6, 32)).transpose(0, 1)
    for values, scales in (launch(x, dtype), quantize_rows(x, dtype)):
        assert values.is_contiguous()
        assert scales.is_contiguous()
        assert relative_error(values.double() * scales, x.double()) < 0.05
