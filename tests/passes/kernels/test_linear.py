"""The operator of a linear layer, with GELU and without, on a CPU; and what stands for a number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from samopt.passes.kernels.linear import rows_of
from tests.numerics import relative_error


@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_operator_on_a_cpu_is_right(dtype: torch.dtype, biased: bool, gelu: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 5, 16), (24, 16), (24,)))
    wanted = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    if gelu:
        wanted = wanted * torch.special.ndtr(wanted)
    ours = torch.ops.samopt.linear(x, weight, bias if biased else None, gelu)
    assert ours.dtype == dtype
    assert relative_error(ours, wanted) < 2 * torch.finfo(dtype).eps


def test_a_power_of_two_stands_for_the_rows() -> None:
    assert [rows_of(M) for M in (1, 128, 129, 4096, 4900, 32768, 131072)] == [128, 128, 256, 4096, 8192, 32768, 32768]
