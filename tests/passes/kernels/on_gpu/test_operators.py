"""All of samopt's operators on a GPU, against what they give on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import relative_error, tensors
from tests.operator_calls import OPERATORS, arguments, checks, on_the_cpu, operator
from tests.passes.kernels.on_gpu.configurations import TOLERANCE, needs_float8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("rearranged", [False, True], ids=["contiguous", "rearranged"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_float8 if name.startswith("float8") else ()) for name in OPERATORS]
)
def test_opcheck(name: str, rearranged: bool) -> None:
    given = arguments(name, torch.bfloat16, "cuda", rearranged)
    torch.library.opcheck(operator(name), given, test_utils=checks(name))
    for ours, cpu in zip(*(tensors(operator(name)(*args)) for args in (given, on_the_cpu(given))), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (cpu.shape, cpu.dtype, cpu.stride())
        assert relative_error(ours.cpu(), cpu) < 2 * TOLERANCE[torch.bfloat16]
