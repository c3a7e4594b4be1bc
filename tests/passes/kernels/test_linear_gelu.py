"""The operator that joins a linear layer and GELU, on a CPU: the exact form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import samopt.passes.kernels.linear_gelu  # noqa: F401 - registers the operator
from tests.numerics import relative_error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_operator_on_a_cpu_is_right(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 5, 16), (24, 16), (24,)))
    wanted = F.linear(x.double(), weight.double(), bias.double())
    wanted = wanted * torch.special.ndtr(wanted)
    ours = torch.ops.samopt.linear_gelu(x, weight, bias)
    assert ours.dtype == dtype
    assert relative_error(ours, wanted) < 2 * torch.finfo(dtype).eps
