"""Everything a caller can see of a model, so that tests can say: it is as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """A record of a model's modules, attributes, hooks, modes and weights, by identity and bit for bit."""

    def __init__(self, model: nn.Module) -> None:
        self._objects = _objects(model)
        self._tensors = {name: (_flags(tensor), tensor.detach().clone()) for name, tensor in _tensors(model).items()}

    def assert_unchanged(self, model: nn.Module) -> None:
        """Fails with the first attribute that is no longer the same object, or tensor whose values or flags changed."""
        now = _objects(model)
        assert now.keys() == self._objects.keys(), f"attributes came or went: {sorted(now.keys() ^ self._objects)}"
        for name, value in self._objects.items():
            plain = isinstance(value, (bool, int, float, str, type(None)))
            assert now[name] == value if plain else now[name] is value, f"{name} is another object"
        tensors = _tensors(model)
        for name, (flags, values) in self._tensors.items():
            assert _flags(tensors[name]) == flags, f"{name}: {_flags(tensors[name])}, was {flags}"
            assert torch.equal(tensors[name], values), f"{name} has other values"


def _objects(model: nn.Module) -> dict[str, Any]:
    """Every module, every attribute of each, and every item of the dictionaries among them (children, hooks, ...)."""
    found: dict[str, Any] = {}
    for fqn, module in model.named_modules():
        found[fqn] = module
        for name, value in vars(module).items():
            if isinstance(value, dict):
                found |= {f"{fqn}/{name}/{key}": item for key, item in value.items()}
            elif not isinstance(value, set):  # _non_persistent_buffers_set
                found[f"{fqn}/{name}"] = value
            else:
                found |= {f"{fqn}/{name}/{item}": True for item in value}
    return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _flags(tensor: Tensor) -> tuple[Any, ...]:
    gradient = None if tensor.grad is None else tensor.grad.data_ptr()
    return tensor.dtype, tensor.device, tensor.data_ptr(), tensor._version, tensor.requires_grad, gradient
