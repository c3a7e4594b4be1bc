"""New modules from old ones: clones that share weights, and methods bound to one module.

A rewrite changes what a module computes, not what it is: its class, attributes, children and state_dict stay.
So new code is bound to the one instance, as a `functools.partial` over a function that can be imported by name:
unlike a bound method or a closure it deep-copies, pickles, and is traced by `torch.compile`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

MARK = "_samopt_as_checked"  # on a module whose weights a pass reads instead of calling it


def clone(module: M) -> M:
    """A copy of `module` with fresh Parameter and buffer objects on the same storage.

    Moving, casting, hooking or compiling the clone leaves the original alone. Writing values in place does not:
    a pass must not.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(module, memo)


def rebind(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    """Makes `module.method(...)` run `function(module, ...)`.

    Args:
        module: the instance to change, usually a clone.
        method: the name that callers use, such as "forward".
        function: importable by name (or itself picklable), so that the module still pickles.
    """
    _unmark(module, method, function)
    module.__dict__[method] = functools.partial(function, module)


def unbind(module: nn.Module, method: str) -> None:
    """Makes `module.method(...)` that of its class again. If it was bound, the module no longer is what was checked."""
    if module.__dict__.pop(method, None) is not None:
        module.__dict__.pop(MARK, None)


def wrap(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    """Makes `module.method(...)` run `function(inner, module, ...)`, where `inner(...)` is the method as it was."""
    _unmark(module, method, function)
    inner = module.__dict__.get(method) or functools.partial(getattr(type(module), method), module)
    module.__dict__[method] = functools.partial(function, inner, module)


def rebind_inside(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    """Like `rebind`, but what `wrap` put around the method stays around it: passes go in either order."""
    _unmark(module, method, function)

    def inside(bound: Any) -> Any:
        if isinstance(bound, functools.partial) and len(bound.args) == 2 and bound.args[1] is module:
            return functools.partial(bound.func, inside(bound.args[0]), module)
        return functools.partial(function, module)

    module.__dict__[method] = inside(module.__dict__.get(method))


def mark(*modules: nn.Module) -> None:
    """Says of modules that what they compute was checked, so that a pass's code may read their weights instead of
    calling them. A module put in their place has no mark, nor has a clone whose forward is bound to foreign code."""
    for module in modules:
        module.__dict__[MARK] = True


def marked(*modules: nn.Module) -> bool:
    """Whether all modules still are what was checked."""
    return all(getattr(module, MARK, False) for module in modules)


def _unmark(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    if method == "forward" and not of_a_pass(function):
        module.__dict__.pop(MARK, None)


def bound(module: nn.Module, method: str) -> Any:
    """The function that was bound to `module.method`; None where the method is that of its class."""
    return _called(vars(module).get(method))


def of_a_pass(function: Any) -> bool:
    """Whether a function, or what a partial or a bound method calls, is code of samopt's own passes."""
    return getattr(_called(function), "__module__", "").startswith("samopt.passes.")


def _called(function: Any) -> Any:
    """What a partial or a bound method calls, or the function itself."""
    return getattr(function, "func", getattr(function, "__func__", function))


def retarget(contents: dict[str, Any], old: nn.Module, new: nn.Module) -> dict[str, Any]:
    """The attributes `contents` of `old`, with the methods bound to `old` bound to `new` instead."""

    def follow(value: Any) -> Any:
        if isinstance(value, functools.partial):
            return functools.partial(value.func, *map(follow, value.args), **value.keywords)
        if isinstance(value, types.MethodType) and value.__self__ is old:
            return types.MethodType(value.__func__, new)
        return new if value is old else value

    return {key: follow(value) for key, value in contents.items()}


def bind_methods(module: nn.Module) -> None:
    """Turns what `rebind` put into `module` and the modules in it into bound methods, in place.

    To torch.compile (2.11) every partial is an object of its own, so that modules alike would not share compiled
    code; bound methods of one function are alike. They do not pickle: pickling and copying turn them back.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            bound = isinstance(value, functools.partial) and value.args == (part,) and not value.keywords
            if bound and isinstance(value.func, types.FunctionType):
                vars(part)[name] = types.MethodType(value.func, part)
                vars(part)["__getstate__"] = types.MethodType(_state_with_partials, part)


def _state_with_partials(module: nn.Module) -> dict[str, Any]:
    state = type(module).__getstate__(module)
    del state["__getstate__"]
    for name, value in state.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            state[name] = functools.partial(value.__func__, module)
    return state


def set_module(model: nn.Module, fqn: str, module: nn.Module) -> None:
    """Puts `module` where `fqn` is in `model` (not the root, which is nobody's child)."""
    parent, _, name = fqn.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
