"""Graph passes: what a trace says, and the method that is bound in the original's place."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

from samopt import AlreadyApplied, GraphPass, NoSites, Numerics, Phase, Site, Skip
from samopt.graphs import Declined, own_methods
from samopt.graphs.graph_method import REQUIRED, GraphMethod, RunOriginal, Variant
from samopt.graphs.tracing import trace_method
from samopt.passes import WhereIndexing
from tests import mask_toys
from tests.snapshot import Snapshot
from tests.toy_graphs import rewritten


@dataclass(frozen=True)
class DoubleBySum(GraphPass):
    """Writes 2 * x as x + x."""

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def transform(self, graph: fx.Graph, module: nn.Module) -> int:
        doubles = [node for node in graph.nodes if node.target is operator.mul and 2 in node.args]
        for node in doubles:
            (x,) = node.all_input_nodes
            if x.op == "get_attr":
                raise Declined(f"`{x.target}` is a weight")
            node.target, node.args = operator.add, (x, x)
        return len(doubles)


def helper(x: Tensor) -> Tensor:
    return x - 1


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.power = 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def shifted(self, x: Tensor, by: float) -> Tensor:
        return x + by


class Parent(nn.Module):
    """Says all a trace can say."""

    gain = 3.0
    children_: Any
    activation: Any

    def __init__(self) -> None:
        super().__init__()
        self.children_ = nn.ModuleList([Child(), Child()])
        self.bias = None
        self.activation = torch.relu

    def forward(self, x: Tensor, scale: float, double: bool = False, mask: Tensor | None = None) -> Tensor:
        """All of it."""
        y = torch.zeros(3, device=x.device) + torch.ones(3)
        for child in self.children_:
            y = y + child(x) ** child.power
        y += self.children_[-1].shifted(y, scale) * self.gain
        if double:
            y = 2 * y
        if mask is not None:
            y = y * mask
        if self.bias is not None:
            y = y + self.bias
        first, *_ = (helper(y), math.pi)
        return self.activation(first + self.extra(x)) + self.children_[0].weight

    def extra(self, x: Tensor) -> Tensor:
        return x[0].sum()


X = torch.tensor([[0.5, -1.0, 2.0]])


def test_children_and_methods_stay_calls_and_weights_are_read_live() -> None:
    traces = trace_method(Parent(), "forward")
    assert list(traces) == [("tensor", "value", double, mask) for double in (False, True) for mask in (None, "tensor")]
    trace = traces["tensor", "value", True, "tensor"]
    calls = [node.target for node in trace.graph.nodes if node.op == "call_module"]
    assert calls == ["children_.0", "children_.1", "children_.1.shifted", "extra", "activation"]
    assert [node.target for node in trace.graph.nodes if node.op == "get_attr"] == ["children_.0.weight"]
    functions = [node.target for node in trace.graph.nodes if node.op == "call_function"]
    assert functions[:3] == [getattr, torch.zeros, torch.ones]
    assert {operator.iadd, helper} <= set(functions)
    assert trace.reads == {"children_.0.power": 2, "children_.1.power": 2, "gain": 3.0, "bias": None}


def test_tracing_changes_nothing() -> None:
    module = Parent()
    before, state = Snapshot(module), torch.get_rng_state()
    list(DoubleBySum().match(module))
    before.assert_unchanged(module)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generated_method_stands_for_the_original() -> None:
    module = Parent()
    ours = rewritten(module, DoubleBySum())
    for arguments in [(X, 2.0), (X, 2.0, True), (X, 2.0, True, X), (X, 2.0, False, X)]:
        assert torch.equal(ours(*arguments), module(*arguments))
    assert torch.equal(ours(scale=0.5, double=True, x=X), module(X, 0.5, True))
    method = vars(ours)["forward"].func
    assert [variant.key[2] for variant in method.variants] == [True, True]  # the others had nothing to rewrite
    assert "y = " not in method.code
    assert (
        "# x: tensor, scale: value, double: True, mask: None\ndef forward(self, x, scale, double, mask):" in method.code
    )


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((X,), {"double": True}),
        ((X, 1.0, True, None, 4), {}),
        ((X, 1.0, True), {"x": X}),
        ((X, 1.0, True), {"other": 1}),
    ],
)
def test_a_wrong_call_raises_as_the_original_does(args: Any, kwargs: Any) -> None:
    ours = rewritten(Parent(), DoubleBySum())
    with pytest.raises(TypeError, match=r"Parent\.forward\(\)"):
        ours(*args, **kwargs)


@pytest.mark.parametrize("name", ["gain", "bias", "children_.0.power", "children_.1.power"])
def test_what_was_baked_in_is_compared_on_each_call(name: str) -> None:
    module = Parent()
    ours = rewritten(module, DoubleBySum())
    for each in (module, ours):
        owner, _, attribute = name.rpartition(".")
        setattr(each.get_submodule(owner), attribute, 4)
    assert torch.equal(ours(X, 2.0, True), module(X, 2.0, True))


def test_children_replaced_later_are_called() -> None:
    module = Parent()
    ours = rewritten(module, DoubleBySum())
    for each in (module, ours):
        each.children_[0] = nn.Linear(3, 3)
        each.children_[0].power = 2
    ours.children_[0].load_state_dict(module.children_[0].state_dict())
    assert torch.equal(ours(X, 2.0, True), module(X, 2.0, True))


def test_it_copies_pickles_compiles_and_runs_in_threads() -> None:
    module = Parent()
    ours = rewritten(module, DoubleBySum())
    expected = module(X, 2.0, True)
    loaded = pickle.loads(pickle.dumps(ours))
    assert vars(loaded)["forward"].args == (loaded,)
    compiled = torch.compile(rewritten(module, DoubleBySum()), backend="eager", fullgraph=True)
    results = [each(X, 2.0, True) for each in (copy.deepcopy(ours), loaded, compiled)]
    threads = [threading.Thread(target=lambda: results.append(rewritten(ours)(X, 2.0, True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 7
    assert all(torch.equal(result, expected) for result in results)
    torch._dynamo.reset()


def test_a_helper_may_ask_for_the_original() -> None:
    source = "def shifted(self, x, by):\n    raise RunOriginal\n"
    variant = Variant(("tensor", "value"), source, (("RunOriginal", RunOriginal.__module__, "RunOriginal"),), ())
    parameters = [("x", REQUIRED), ("by", REQUIRED)]
    method = GraphMethod("shifted", parameters, [variant])
    assert torch.equal(method(Child(), X, 1.0), X + 1.0)
    # The original of the second graph pass is what the first made.
    first = GraphMethod(
        "shifted", parameters, [Variant(variant.key, "def shifted(self, x, by):\n    return 7\n", (), ())]
    )
    assert GraphMethod("shifted", parameters, [variant], first)(Child(), X, 1.0) == 7


class DoubledMask(mask_toys.Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = 2 * x
        if self.threshold > 0:
            x[labels == 1] = self.threshold
        return x


@pytest.mark.parametrize("passes", [(DoubleBySum(), WhereIndexing()), (WhereIndexing(), DoubleBySum())])
def test_two_graph_passes_rewrite_one_method(passes: tuple[GraphPass, GraphPass]) -> None:
    module = DoubledMask()
    ours = rewritten(module, *passes)
    code = vars(ours)["forward"].func.code
    assert "x + x" in code
    assert "torch.where(" in code
    x, labels = torch.randn(3, 5, 4), torch.ones(3, 5)
    assert torch.equal(ours(x, labels), module(x, labels))
    assert torch.equal(ours(x.permute(1, 0, 2), labels.T), module(x.permute(1, 0, 2), labels.T))
    for threshold in (0.25, -1.0):  # read by the first pass's trace, so baked into the second's too
        module.threshold = ours.threshold = threshold
        assert torch.equal(ours(x, labels), module(x, labels))
    assert pickle.loads(pickle.dumps(ours))(x, labels).shape == x.shape
    with pytest.raises(AlreadyApplied):
        passes[0](ours)


def test_a_method_that_something_else_replaced_is_declined() -> None:
    module = DoubledMask()
    module.forward = helper  # type: ignore[method-assign, assignment]
    with pytest.raises(NoSites, match="an earlier pass replaced it"):
        WhereIndexing()(module)


def test_a_reason_of_the_pass_is_a_skip() -> None:
    class Weight(Child):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.weight

        def shifted(self, x: Tensor, by: float) -> Tensor:
            return 2 * x

    site, skip = sorted(DoubleBySum().match(nn.Sequential(Weight())), key=lambda found: isinstance(found, Skip))
    assert site == Site("0", {"methods": ("shifted",), "rewrites": 1})
    assert skip == Skip("0", "forward: `weight` is a weight")


def test_explain_shows_the_code_before_and_after() -> None:
    model = nn.Sequential(DoubledMask())
    before = Snapshot(model)
    text = WhereIndexing().explain(model)
    before.assert_unchanged(model)
    head, _, tail = text.partition("# 0.forward, after\n")
    assert head.startswith(
        "# 0.forward, before\ndef forward(self, x: Tensor, labels: Tensor) -> Tensor:\n    x = 2 * x"
    )
    assert "    x[labels == 1] = self.threshold\n" in head
    assert "    where = torch.where(keep, value, mul)\n    return where" in tail
    assert " = None" not in tail
    WhereIndexing()(model)
    assert "torch.where" in DoubleBySum().explain(model).partition("# 0.forward, after\n")[0]


class Base(nn.Module):
    def inherited(self) -> None: ...


class Derived(Base):
    attribute = 1

    def forward(self) -> None: ...
    def __repr__(self) -> str:
        return "derived"

    @property
    def computed(self) -> int:
        return 1

    @staticmethod
    def static() -> None: ...


def test_own_methods_are_plain_methods_from_outside_of_torch() -> None:
    assert own_methods(Derived) == ("forward", "inherited")


def test_code_without_source_is_declined() -> None:
    names: dict[str, Any] = {"Child": Child}
    exec(
        "class Typed(Child):\n    def forward(self, x):\n        x = x * 1\n        x[x == 1] = 0\n        return x",
        names,
    )
    with pytest.raises(NoSites, match="forward: its source is not available"):
        WhereIndexing()(names["Typed"]())
