"""Tracing one method of a module into a torch.fx graph, so that the graph says all the method does, or not at all.

Unlike `torch.fx.symbolic_trace` this patches nothing, traces any method, and keeps apart what may change later:
weights are read live (`get_attr`), children and other methods, of the module or of a child, stay calls (`call_module`
whose target is the dotted name of what is called), and so are honoured when a later pass replaces them. What is baked
in is what Python decided on the way: plain attribute values, which are listed, and the kind of each argument.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from samopt.graphs.graph_method import REQUIRED, TENSOR, VALUE, GraphMethod, Key, Kind
from samopt.graphs.source_check import Declined, check_source, is_own
from samopt.graphs.stand_ins import INPLACE, ModuleView, RecordFactories, Tracer

_MAX_VARIANTS = 16
_NOT_TENSORS = (int, float, str, tuple, list, dict)


@dataclass(frozen=True)
class Trace:
    """One method traced for one kind of arguments.

    Attributes:
        graph: placeholders for all parameters but the first, in order, whether or not they are used.
        reads: the plain attributes that were baked in, by dotted name.
    """

    graph: fx.Graph
    reads: dict[str, Any]


def method_function(module: nn.Module, method: str) -> types.FunctionType:
    """The function that `module`'s class has under the name `method`.

    Raises:
        Declined: there is none, or it is no plain method.
    """
    function = inspect.getattr_static(type(module), method, None)
    if not isinstance(function, types.FunctionType):
        raise Declined("it is not a plain method")
    return function


def parameters(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The parameters of a method without the first, each with its default or REQUIRED."""
    return [(each.name, each.default) for each in list(inspect.signature(function).parameters.values())[1:]]


def bound_method(module: nn.Module, method: str) -> GraphMethod | None:
    """What an earlier graph pass bound to `module` under the name `method`.

    Raises:
        Declined: something else was bound, which a trace of the class's code would ignore.
    """
    bound = vars(module).get(method)
    if bound is None:
        return None
    function = getattr(bound, "func", None)
    if isinstance(function, GraphMethod) and bound.args == (module,) and not bound.keywords:
        return function
    raise Declined("an earlier pass replaced it")


def trace_method(module: nn.Module, method: str) -> dict[Key, Trace]:
    """Traces `module.method` once for each kind of arguments that its signature allows.

    A bool parameter (by annotation or default) gets a trace for each value, one that may be None a trace for that.
    Neither `module` nor anything else is changed.

    Raises:
        Declined: it cannot be traced soundly. A trace that only fails where an argument is None is left out instead.
    """
    function = method_function(module, method)
    check_source(function)
    bound = bound_method(module, method)
    keys = list(itertools.product(*_kinds(function)))
    if len(keys) > _MAX_VARIANTS:
        raise Declined(f"its bool and optional arguments make {len(keys)} combinations, more than {_MAX_VARIANTS}")
    traces = {}
    for key in keys:
        code, reads = (bound and bound.implementation(key)) or (function, {})
        try:
            traces[key] = _trace(module, code, parameters(function), key)
            traces[key].reads.update(reads)
        except (AttributeError, TypeError) as error:
            if None not in key:
                raise Declined(f"it cannot be traced: {error}") from error
        except fx.proxy.TraceError as error:
            raise Declined("its control flow depends on the values of tensors, or on unknown arguments") from error
        except Declined:
            raise
        except Exception as error:
            raise Declined(f"it cannot be traced: {type(error).__name__}: {error}") from error
    return traces


def _kinds(function: types.FunctionType) -> list[list[Kind]]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation may be any expression, and name what is not there
        hints = function.__annotations__
    kinds: list[list[Kind]] = []
    for name, default in parameters(function):
        hint = hints.get(name, type(default) if default is not REQUIRED and default is not None else torch.Tensor)
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kinds.append([None] if default is None or types.NoneType in options else [])
        for option in options:
            if option in (bool, "bool"):
                kinds[-1] += [False, True]
            elif option is not types.NoneType:
                kind = VALUE if (typing.get_origin(option) or option) in _NOT_TENSORS else TENSOR
                kinds[-1] += [] if kind in kinds[-1] else [kind]
    return kinds


def _trace(module: nn.Module, function: Callable[..., Any], names: list[tuple[str, Any]], key: Key) -> Trace:
    assert isinstance(function, types.FunctionType)
    tracer = Tracer()
    arguments = []
    for (name, _), kind in zip(names, key, strict=True):
        proxy = tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["kind"] = kind
        arguments.append(proxy if isinstance(kind, str) else kind)
    # A copy of the function whose global functions record a call: patching its module would reach other threads.
    scope = {name: tracer.recorder(x) if is_own(x) else x for name, x in function.__globals__.items()}
    traced = types.FunctionType(function.__code__, scope, function.__name__)
    with RecordFactories(tracer):
        result = traced(ModuleView(module, "", tracer), *arguments)
    tracer.graph.output(tracer.create_arg(result))
    _check_rebinding(tracer.graph)
    tracer.graph.lint()
    return Trace(tracer.graph, tracer.reads)


def _check_rebinding(graph: fx.Graph) -> None:
    # `x += 1` is printed as just that, which also changes what a second name for x reads if x is a number.
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        in_place = node.target in INPLACE.values() and node.target is not operator.setitem
        if in_place and any(order[user] > order[node] for user in node.args[0].users):
            raise Declined(f"it updates `{node.args[0]}` in place while another name holds it")
