"""What a trace would get wrong is declined, each with its reason, before or while it is traced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from samopt.graphs import Declined, own_methods
from samopt.graphs.tracing import trace_method
from tests import numerics
from tests.snapshot import Snapshot

SETTINGS = {"flag": True}


def helper(x: Tensor) -> Tensor:
    return x - 1


class Refused(nn.Module):
    """Methods that a trace would get wrong, each with the reason as its docstring."""

    size: int

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.counts = [0]

    def catches(self, x: Tensor) -> Tensor:
        """it catches exceptions"""
        try:
            return x[5]
        except IndexError:
            return x

    def no_grad(self, x: Tensor) -> Tensor:
        """it has a `with` block"""
        with torch.no_grad():
            return x * 1

    def computed_none(self, x: Tensor) -> Tensor:
        """it tests a computed value with `is`: `y is None`"""
        y = self.child(x)
        return x if y is None else y

    def changed_none(self, x: Tensor, y: Tensor | None) -> Tensor:
        """it tests a computed value with `is`: `y is not None`"""
        y = self.child(x)
        return x if y is not None else x + 1

    def isinstance_(self, x: Tensor) -> Tensor:
        """it uses `isinstance`"""
        return x if isinstance(x, Tensor) else x + 1

    def hasattr_(self, x: Tensor) -> Tensor:
        """it uses `hasattr`"""
        return x if hasattr(x, "nothing") else x + 1

    def prints(self, x: Tensor) -> Tensor:
        """it uses `print`"""
        print(x.shape)
        return x

    def flag(self, x: Tensor) -> Tensor:
        """it uses `SETTINGS`"""
        return x if SETTINGS["flag"] else x + 1

    def grad_mode(self, x: Tensor) -> Tensor:
        """it uses `torch.is_grad_enabled`"""
        return x if torch.is_grad_enabled() else x + 1

    def other_module(self, x: Tensor) -> Tensor:
        """it uses the module tests.numerics"""
        return numerics.tensors(x)[0]

    @torch.no_grad()
    def decorated(self, x: Tensor) -> Tensor:
        """it is decorated"""
        return x

    def closure(self, x: Tensor) -> Tensor:
        """it uses super() or variables of an enclosing function"""
        return super().forward(x)

    def keyword_only(self, *, x: Tensor) -> Tensor:
        """it has *args, **kwargs, or keyword-only"""
        return x

    def inner(self, x: Tensor) -> Tensor:
        """it defines a function"""
        return (lambda: x)()

    def generator(self, x: Tensor) -> Iterator[Tensor]:
        """it is a generator"""
        yield x

    def sets(self, x: Tensor) -> Tensor:
        """it sets an attribute: `self.size`"""
        self.size = 4
        return x

    def sets_child(self, x: Tensor) -> Tensor:
        """it sets an attribute: `child.in_features`"""
        child = self.child
        child.in_features += 1
        return x

    def state(self, x: Tensor) -> Tensor:
        """it reads `self.counts`, a list, which may change"""
        self.counts[0] += 1
        return x

    def own_parts(self, x: Tensor) -> Tensor:
        """it uses `self.parameters`, a part of nn.Module itself"""
        return x + sum(p.sum() for p in self.parameters())

    def of_values(self, x: Tensor) -> Tensor:
        """its control flow depends on the values of tensors"""
        return x if x.sum() > 0 else x + 1

    def of_shapes(self, x: Tensor) -> Tensor:
        """its control flow depends on the values of tensors"""
        return x if x.shape[0] > 3 else x + 1

    def iterates(self, x: Tensor) -> Tensor:
        """its control flow depends on the values of tensors"""
        return torch.stack([row + 1 for row in x])

    def length(self, x: Tensor) -> Tensor:
        """it cannot be traced: RuntimeError: 'len' is not supported"""
        return x if len(x) else x + 1

    def passes_child(self, x: Tensor) -> Tensor:
        """it passes a ModuleView on"""
        return helper(self.child)  # type: ignore[arg-type]

    def two_names(self, x: Tensor) -> int:
        """it updates `getitem` in place while another name holds it"""
        size = before = x.shape[0]
        size += 1
        return size + before

    def many(self, a: bool, b: bool, c: bool, d: bool, e: bool) -> None:
        """its bool and optional arguments make 32 combinations"""


@pytest.mark.parametrize("name", [name for name in own_methods(Refused) if not name.startswith("_")])
def test_what_a_trace_would_get_wrong_is_declined(name: str) -> None:
    module = Refused()
    before = Snapshot(module)
    reason = getattr(module, name).__doc__
    with pytest.raises(Declined) as caught:
        trace_method(module, name)
    assert str(caught.value).startswith(reason)
    before.assert_unchanged(module)
    assert module.counts == [0]
