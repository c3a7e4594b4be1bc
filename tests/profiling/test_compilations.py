"""What torch.compile does is told: which line breaks a graph, which guard made it compile again."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from samopt.profiling.compilations import Compilations, record_compilations


def fine(x: Tensor, times: int) -> Tensor:
    return x * times


def broken(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        y = y - 1
    return y


def line_of(function: object, text: str) -> int:
    assert callable(function)
    lines, first = inspect.getsourcelines(function)
    (found,) = (first + number for number, line in enumerate(lines) if text in line)
    return found


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_guard_that_fails() -> None:
    compiled = torch.compile(fine, backend="eager", dynamic=False)
    with record_compilations() as found:
        for size, times in ((3, 2), (3, 2), (4, 2), (4, 5)):
            compiled(torch.ones(size), times)
    assert [(one.function, one.file, one.line) for one in found.compiled] == [
        ("fine", __file__, line_of(fine, "def fine"))
    ] * 3
    assert all(one.seconds > 0 and not one.failed for one in found.compiled)
    shape, value = found.recompiled
    assert shape.guard == "tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert value.guard == f"times == 2, for line {line_of(fine, 'return')}: return x * times"
    assert found.breaks == []
    assert str(found).startswith("3 compilations in ")
    assert "2 of them anew; 0 graph breaks" in str(found).splitlines()[0]
    assert f"test_compilations.py:{line_of(fine, 'def fine')}) compiled again in" in str(found)


def test_a_line_that_breaks_the_graph() -> None:
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    with record_compilations() as found:
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    (at,) = found.breaks  # once
    assert (at.file, at.line) == (__file__, line_of(broken, "if y.sum()"))
    assert "data-dependent branching" in at.reason
    assert "\n" not in at.reason
    assert [one.function for one in found.compiled] == ["broken", "the rest of broken"] * 2
    assert f"test_compilations.py:{at.line}: " in str(found)
    assert found.to_dict()["breaks"] == [{"file": __file__, "line": at.line, "reason": at.reason}]


def test_a_whole_graph_that_cannot_be() -> None:
    compiled = torch.compile(broken, backend="eager", fullgraph=True)
    with record_compilations() as found, pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(3))
    (failed,) = found.compiled
    assert "data-dependent branching" in failed.failed
    assert f"broken was not compiled: {failed.failed}" in str(found)


def test_nothing_is_heard_before_and_after() -> None:
    compiled, trace = torch.compile(fine, backend="eager", dynamic=False), logging.getLogger("torch.__trace")
    compiled(torch.ones(2), 2)
    handlers = list(trace.handlers)
    with record_compilations() as found:
        compiled(torch.ones(2), 2)
    compiled(torch.ones(5), 2)
    assert found == Compilations()
    assert trace.handlers == handlers
