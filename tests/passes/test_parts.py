"""What is inside a module, and that no change of it goes unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samopt.passes.parts import Parts


@pytest.fixture
def module() -> Any:
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def test_weights_and_hooks_are_listed(module: Any) -> None:
    parts = Parts(module)
    expected = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    assert {id(tensor) for tensor in parts.tensors()} == expected
    assert parts.addresses() == [tensor.data_ptr() for tensor in parts.tensors()]
    assert not parts.hooked()
    handle = module[1].register_forward_pre_hook(lambda *_: None)
    assert parts.hooked()
    handle.remove()
    assert not parts.hooked()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a module more": lambda module: module.append(nn.ReLU()),
    "a module replaced": lambda module: module.__setitem__(0, nn.Linear(2, 3, bias=False)),
    "a module replaced further in": lambda module: module[2].__setitem__(1, nn.GELU()),
    "a module gone": lambda module: module.__delitem__(2),
    "a child of what had none": lambda module: module[0].register_module("extra", nn.ReLU()),
    "a parameter set to None": lambda module: setattr(module[2][0], "bias", None),
    "a parameter that was None": lambda module: setattr(module[0], "bias", nn.Parameter(torch.zeros(3))),
    "a parameter gone": lambda module: module[2][0].__delattr__("bias"),
    "a parameter more": lambda module: module[0].register_parameter("scale", nn.Parameter(torch.ones(3))),
    "the first parameter": lambda module: module[2][1].register_parameter("scale", nn.Parameter(torch.ones(3))),
    "a buffer more": lambda module: module[1].register_buffer("table", torch.ones(3)),
    "the first buffer": lambda module: module[0].register_buffer("table", torch.ones(3)),
    "a buffer set to None": lambda module: setattr(module[1], "running_mean", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(module: Any, change: str) -> None:
    parts = Parts(module)
    assert parts.current()
    CHANGES[change](module)
    assert not parts.current()
    parts = Parts(module)
    assert parts.current()
    assert parts.addresses() == [tensor.data_ptr() for tensor in parts.tensors()]
    assert len(parts.tensors()) == len([*module.parameters(), *module.buffers()])


def test_another_tensor_under_the_same_name_is_seen_by_its_address(module: Any) -> None:
    parts = Parts(module)
    before = parts.addresses()
    kept, module[0].weight = module[0].weight, nn.Parameter(torch.zeros(3, 2))
    assert parts.current()
    assert [ours == theirs for ours, theirs in zip(parts.addresses(), before, strict=True)].count(False) == 1
    module[0].weight = kept
    assert parts.addresses() == before
