"""A linear layer of float8 factors on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from samopt.passes.kernels.float8_linear import float8_linear
from samopt.passes.kernels.quantized_rows import quantize_rows
from tests.numerics import relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product_of_what_the_factors_stand_for(dtype: torch.dtype, gelu: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, x_scale = quantize_rows(torch.randn(2, 3, 64, generator=generator), torch.float8_e4m3fn)
    weight, weight_scale = quantize_rows(torch.randn(48, 64, generator=generator), torch.float8_e4m3fn)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    truth = F.linear(x.double() * x_scale.double(), weight.double() * weight_scale.double())
    truth = truth if bias is None else truth + bias.double()
    truth = F.gelu(truth, approximate="tanh") if gelu else truth
    found = float8_linear(x, x_scale, weight, weight_scale[:, 0], bias, gelu, dtype)
    assert (found.shape, found.dtype) == ((2, 3, 48), dtype)
    assert relative_error(found, truth) < torch.finfo(dtype).eps * 4
