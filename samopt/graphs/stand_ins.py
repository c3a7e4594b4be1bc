"""What stands for the module and its arguments while a method is traced, and records what the method does to them."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import inplace_methods
from torch.fx.proxy import Attribute, GraphAppendingTracer, Proxy
from torch.overrides import TorchFunctionMode

from samopt.graphs.source_check import Declined, is_immutable

INPLACE: dict[str, Callable[..., Any]] = {f"__{name}__": getattr(operator, name) for name in inplace_methods}
"""`x += y` and `x[i] = y`: special method to operator."""


class Tracer(GraphAppendingTracer):
    def __init__(self) -> None:
        super().__init__(fx.Graph())
        self.reads: dict[str, Any] = {}
        self._attributes: dict[str, Proxy] = {}

    def proxy(self, node: fx.Node) -> Proxy:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy):
            return a.node
        if isinstance(a, (tuple, list, dict, slice, range)):
            return super().create_arg(a)
        if isinstance(a, float):
            return float(a)  # numpy's floats do not print as Python
        if is_immutable(a):
            return a
        raise Declined(f"it passes a {type(a).__name__} on, which generated code cannot hold")

    def attribute(self, path: str) -> Proxy:
        if path not in self._attributes:
            self._attributes[path] = self.create_proxy("get_attr", path, (), {})
        return self._attributes[path]

    def read(self, path: str, value: Any) -> Any:
        self.reads[path] = value
        return value

    def recorder(self, target: str | Callable[..., Any]) -> Callable[..., Proxy]:
        def call(*args: Any, **kwargs: Any) -> Proxy:
            kind = "call_module" if isinstance(target, str) else "call_function"
            return self.create_proxy(kind, target, args, kwargs)

        return call


class _Value(Proxy):
    """A value unknown while tracing. fx drops what `x[i] = y` and `x += y` do to x; this records it."""

    def __getattr__(self, k: str) -> Attribute:
        return _ValueAttribute(self, k)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Proxy:
        # As Proxy: it looks for instances of `cls`, and there are two classes here.
        return Proxy.__torch_function__(orig_method, types, args, kwargs)


class _ValueAttribute(_Value, Attribute):
    """`x.name`, recorded when it turns out not to be a method call."""


def _record_inplace(target: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name, _target in INPLACE.items():
    if _target is not operator.setitem:
        setattr(_Value, _name, _record_inplace(_target))


class RecordFactories(TorchFunctionMode):
    """Records torch calls that no stand-in takes part in, `torch.zeros(3)`, which would run now and be baked in."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[Any] = []
        fx.node.map_aggregate((args, kwargs or {}), lambda a: found.append(a) if isinstance(a, Proxy) else None)
        if found:
            return func(*args, **(kwargs or {}))
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


class ModuleView:
    """What stands for `self`, or for a child, while a method is traced: reads are live, calls are recorded."""

    def __init__(self, module: nn.Module, path: str, tracer: Tracer) -> None:
        for name, value in (("module", module), ("path", path), ("tracer", tracer)):
            object.__setattr__(self, f"_ModuleView__{name}", value)

    def __getattr__(self, name: str) -> Any:
        module, tracer = self.__module, self.__tracer
        path = f"{self.__path}.{name}" if self.__path else name
        missing = object()
        value: Any = missing
        for attributes in (vars(module), module._parameters, module._buffers, module._modules):
            value = attributes.get(name, value)
        if value is missing:
            value = inspect.getattr_static(type(module), name, missing)
            if value is missing:
                raise AttributeError(f"{type(module).__name__} has no attribute {name}")
            if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
                if hasattr(nn.Module, name) and name != "forward":
                    raise Declined(f"it uses `self.{path}`, a part of nn.Module itself")
                return tracer.recorder(path)
        if isinstance(value, torch.Tensor):
            return tracer.attribute(path)
        if isinstance(value, nn.Module):
            return ModuleView(value, path, tracer)
        if is_immutable(value):
            return tracer.read(path, value)
        if callable(value) and name in vars(module):
            return tracer.recorder(path)
        raise Declined(f"it reads `self.{path}`, a {type(value).__name__}, which may change")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Declined(f"it sets an attribute: `self.{name}`")

    def __call__(self, *args: Any, **kwargs: Any) -> Proxy:
        if not self.__path:
            raise Declined("it calls the module itself")
        return self.__tracer.recorder(self.__path)(*args, **kwargs)

    def __len__(self) -> int:
        if not isinstance(self.__module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            raise Declined("it takes the length of a module")
        return len(self.__module)

    def __bool__(self) -> bool:
        return not hasattr(type(self.__module), "__len__") or len(self) > 0

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and index < 0:
            index += len(self)
        if type(index) not in (int, str) or str(index) not in self.__module._modules:
            raise Declined("it takes a slice of modules, or one by an unknown index")
        return getattr(self, str(index))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))
