from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn

from samopt import clone, rebind
from samopt.rebind import rebind_inside, retarget, set_module, wrap
from tests.snapshot import Snapshot


class Tied(nn.Module):
    """Two layers that share a weight, a buffer, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.one.register_forward_hook(negate)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x))
        return result


def negate(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return -output


def bias_only(module: nn.Linear, x: Tensor) -> Tensor:
    return module.bias.expand_as(x)


def plus_bias(inner: functools.partial[Tensor], module: nn.Linear, x: Tensor) -> Tensor:
    return inner(x) + module.bias


@pytest.fixture
def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def test_a_clone_has_its_own_parameters_on_the_same_storage(tied: Tied) -> None:
    new = clone(tied)
    assert torch.equal(new(X), tied(X))
    tensors = {**dict(tied.named_parameters()), **dict(tied.named_buffers())}
    copies = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    assert tensors.keys() == copies.keys() == {"one.weight", "one.bias", "two.bias", "table", "hidden"}
    for name, tensor in tensors.items():
        assert copies[name] is not tensor
        assert type(copies[name]) is type(tensor)
        assert copies[name].data_ptr() == tensor.data_ptr()
    assert new.two.weight is new.one.weight, "what was tied stays tied"
    assert set(new.state_dict()) == set(tied.state_dict())


def test_what_is_done_to_a_clone_leaves_the_original_alone(tied: Tied) -> None:
    tied.one.bias.requires_grad_(False)
    tied(X).sum().backward()
    before = Snapshot(tied)
    new = clone(tied)
    assert not new.one.bias.requires_grad
    assert new.two.bias.requires_grad
    new.bfloat16().eval().requires_grad_(False)
    new.one.register_forward_hook(negate)
    new.two.compile()
    vars(new)["extra"] = 1
    del new.one
    before.assert_unchanged(tied)


def test_a_clone_of_a_meta_model_stays_there(tied: Tied) -> None:
    assert all(parameter.is_meta for parameter in clone(tied.to("meta")).parameters())


def test_rebound_methods_follow_a_copy_and_a_pickle(tied: Tied) -> None:
    rebind(tied.one, "forward", bias_only)
    for again in (copy.deepcopy(tied), clone(tied), pickle.loads(pickle.dumps(tied))):
        assert torch.equal(again(X), tied(X))
        again.one.bias = nn.Parameter(tied.one.bias + 1)
        assert not torch.equal(again(X), tied(X)), "it runs on the weights of the copy"


def test_wrapping_keeps_what_was_there_and_wraps_again(tied: Tied) -> None:
    linear = tied.two
    plain = linear(X)
    wrap(linear, "forward", plus_bias)
    assert torch.equal(linear(X), plain + linear.bias)
    wrap(linear, "forward", plus_bias)
    assert torch.equal(linear(X), plain + linear.bias + linear.bias)
    copied = copy.deepcopy(linear)
    assert torch.equal(copied(X), linear(X))
    with torch.no_grad():
        copied.bias.add_(1)
    assert torch.allclose(copied(X), linear(X) + 3)


@pytest.mark.parametrize("wraps", [0, 1, 2])
def test_what_is_bound_inside_keeps_the_wraps_around_it(tied: Tied, wraps: int) -> None:
    rebind(tied.two, "forward", plus_bias)
    rebind_inside(tied.two, "forward", nn.Linear.forward)
    plain = tied.two(X)
    for _ in range(wraps):
        wrap(tied.two, "forward", plus_bias)
    rebind_inside(tied.two, "forward", bias_only)
    assert torch.allclose(tied.two(X), plain - X @ tied.two.weight.T + wraps * tied.two.bias)
    assert torch.equal(copy.deepcopy(tied).two(X), tied.two(X))


def test_retargeted_methods_run_on_the_new_module(tied: Tied) -> None:
    old, new = tied.one, nn.Linear(3, 3)
    wrap(old, "forward", plus_bias)
    wrap(old, "forward", plus_bias)
    vars(new)["forward"] = retarget({"forward": vars(old)["forward"]}, old, new)["forward"]
    expected = nn.functional.linear(X, new.weight, new.bias) + 2 * new.bias
    assert torch.allclose(new(X), expected)


def test_a_rebound_method_compiles_without_a_graph_break(tied: Tied) -> None:
    wrap(tied.two, "forward", plus_bias)
    compiled = torch.compile(copy.deepcopy(tied), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), tied(X))


def test_modules_are_read_and_set_by_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.GELU())
    assert model.get_submodule("") is model
    new = nn.SiLU()
    set_module(model, "0.0", new)
    assert model.get_submodule("0.0") is new
    set_module(model, "1", new)
    assert list(model.modules())[1:] == [model[0], new]
