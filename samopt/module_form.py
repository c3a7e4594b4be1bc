"""What a module is, values of tensors aside: to tell whether a model built anew is the one that it stands for."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from samopt.base import APPLIED, Phase
from samopt.graphs.graph_method import GraphMethod

PLAIN = (bool, int, float, str, bytes, tuple, torch.dtype, type(None))
# Attributes of no account, or compared otherwise.
ASIDE = {"training", "_is_full_backward_hook", "_compiled_call_impl", "__getstate__", APPLIED}


def difference(model: nn.Module, other: nn.Module) -> str | None:
    """The first thing in which two models differ, their compilation and the values of tensors aside; None of two alike.

    Looked at are classes, names, shapes and dtypes of parameters and buffers, attributes that are plain values, and
    methods that passes bound. Hooks are not.
    """
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        if name not in theirs:
            return f"{name} was not there"
        aside = ASIDE if name else ASIDE | {"_apply"}  # an optimised model's own, which moves it
        ours, expected = _form(module, aside), _form(theirs.pop(name), aside)
        for key in sorted(ours.keys() | expected.keys()):
            if ours.get(key) != expected.get(key):
                here = f"{name or 'the model'}: {key}"
                return f"{here} is {_words(ours.get(key))} and was {_words(expected.get(key))}"
    return f"{next(iter(theirs))} is gone" if theirs else None


def _form(module: nn.Module, aside: set[str]) -> dict[str, Any]:
    form: dict[str, Any] = {"class": type(module)}
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if name not in device_made():
                kind = "parameter" if tensors is module._parameters else "buffer"
                form[name] = None if tensor is None else f"a {kind} {list(tensor.shape)} of {tensor.dtype}"
    for name, value in vars(module).items():
        if name in aside:
            continue
        if isinstance(value, PLAIN):
            form[name] = value
        elif isinstance(value, (functools.partial, types.MethodType)):
            form[name] = _method(value)
    form["passes"] = tuple(name for name in vars(module).get(APPLIED, ()) if name not in _compiling())
    return form


def _method(value: Any) -> Any:
    """What a bound method runs: functions by identity, inside each other as they are."""
    if isinstance(value, types.MethodType):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        inner = tuple(_method(arg) for arg in value.args if not isinstance(arg, nn.Module))
        return (_method(value.func), *inner)
    if isinstance(value, GraphMethod):
        return GraphMethod, value.method, value.variants
    return value


@functools.cache
def device_made() -> frozenset[str]:
    """Buffers that exist where the device has kernels for them."""
    from samopt.passes.semi_sparse import PARTS

    return frozenset(PARTS)


@functools.cache
def _compiling() -> frozenset[str]:
    from samopt.passes import PASSES

    return frozenset(kind.__name__ for kind in PASSES.values() if kind.phase is Phase.COMPILE)


def _words(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, tuple) and value and (callable(value[0]) or isinstance(value[0], tuple)):
        return "other code"
    return "absent" if value is None else str(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits on the same device."""
    if one.device != other.device or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
