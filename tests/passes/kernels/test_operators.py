"""What holds for all of samopt's operators: PyTorch traces, compiles and exports them without running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from tests.numerics import assert_bit_equal, tensors
from tests.operator_calls import OPERATORS, arguments, checks, operator

pytestmark = pytest.mark.parametrize("name", OPERATORS)


def layout(result: Any) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
    """Shape, dtype and strides of each tensor of a result."""
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors(result)]


@pytest.mark.parametrize("rearranged", [False, True], ids=["contiguous", "rearranged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fake_tensors_are_laid_out_as_real_ones(name: str, dtype: torch.dtype, rearranged: bool) -> None:
    given = arguments(name, dtype, rearranged=rearranged)
    real = operator(name)(*given)
    with FakeTensorMode() as mode:
        fake = operator(name)(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given))
    assert layout(fake) == layout(real)
    assert all(tensor.is_contiguous() for tensor in tensors(real))


@pytest.mark.parametrize("rearranged", [False, True], ids=["contiguous", "rearranged"])
def test_opcheck(name: str, rearranged: bool) -> None:
    given = arguments(name, torch.float32, rearranged=rearranged)
    torch.library.opcheck(operator(name), given, test_utils=checks(name))


class Calls(nn.Module):
    """A module around an operator, which it calls with the numbers it was made with."""

    def __init__(self, name: str, numbers: list[Any]) -> None:
        super().__init__()
        self.name, self.numbers = name, numbers

    def forward(self, *given: Tensor) -> Any:
        return operator(self.name)(*given, *self.numbers)


def module_and_tensors(name: str) -> tuple[Calls, tuple[Tensor, ...]]:
    """A module that calls the operator, and the tensors to call it with."""
    given = arguments(name, torch.float32)
    numbers = [x for x in given if not isinstance(x, Tensor)]
    return Calls(name, numbers), tuple(x for x in given if isinstance(x, Tensor))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_code_calls_the_operator(name: str, dynamic: bool) -> None:
    seen: list[Any] = []

    def backend(graph: GraphModule, _: list[Tensor]) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    module, given = module_and_tensors(name)
    torch._dynamo.reset()
    result = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*given)
    torch._dynamo.reset()
    assert seen.count(operator(name)) == 1
    assert_bit_equal(result, module(*given))


@torch.no_grad()
def test_exported_programs_call_the_operator(name: str) -> None:
    module, given = module_and_tensors(name)
    program = torch.export.export(module, given)
    assert [node.target for node in program.graph.nodes].count(operator(name)) == 1
    assert_bit_equal(program.module()(*given), module(*given))
