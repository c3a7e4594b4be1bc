"""What a graph pass binds in a method's place: generated code, and the original for all that code was not made for.

A trace holds for the kinds of arguments and the plain attribute values it was made with. So a `GraphMethod` looks at
both on every call and runs the original method wherever they differ: specialising is safe, never merely usual.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import operator
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from samopt.errors import Unsupported
from samopt.graphs.source_check import is_own

TENSOR, VALUE = "tensor", "value"
Kind = str | bool | None
"""TENSOR, None, True, False, or VALUE for anything else."""
Key = tuple[Kind, ...]
"""The kind of each argument, in the order of the signature: there is one graph for each."""
REQUIRED = inspect.Parameter.empty


class RunOriginal(Exception):
    """Raised by a helper in generated code: the tensors at hand need the method as it was.

    Generated code that may raise it must not have changed anything its caller can see by then.
    """


def kind_of(value: Any) -> Kind:
    """The kind of one argument."""
    if value is None or isinstance(value, bool):
        return value
    return TENSOR if isinstance(value, torch.Tensor) else VALUE


@dataclass(frozen=True)
class Variant:
    """Generated code for one kind of arguments.

    Attributes:
        key: the kinds.
        source: one function, whose first parameter is the module.
        imports: the names it uses, each with the module and the attribute path there ("" is the module itself).
        reads: the plain attributes baked into it, each with its dotted name and value.
    """

    key: Key
    source: str
    imports: tuple[tuple[str, str, str], ...]
    reads: tuple[tuple[str, Any], ...]


class GraphMethod:
    """A callable `f(module, ...)` made of generated code. It never changes, pickles, and `torch.compile` inlines it."""

    def __init__(
        self,
        method: str,
        parameters: Iterable[tuple[str, Any]],
        variants: Iterable[Variant],
        previous: GraphMethod | None = None,
    ) -> None:
        """
        Args:
            method: its name in the module's class, where the original code is.
            parameters: its parameters without the first, each with its default, or REQUIRED.
            variants: the generated code; a kind of arguments without any runs the original.
            previous: what an earlier graph pass had bound, the original as far as this one is concerned.
        """
        self.method = method
        self.parameters = tuple(parameters)
        self.variants = tuple(variants)
        self.previous = previous
        self._compile()

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = self._bind(args, kwargs)
        variant = None if arguments is None else self._functions.get(tuple([kind_of(value) for value in arguments]))
        if arguments is None or variant is None:
            return self._original(module)(*args, **kwargs)
        function, reads = variant
        for path, value in reads:
            if not _is_still(module, path, value):
                return self._original(module)(*args, **kwargs)
        try:
            return function(module, *arguments)
        except RunOriginal:
            return self._original(module)(*args, **kwargs)

    def implementation(self, key: Key) -> tuple[Callable[..., Any], dict[str, Any]] | None:
        """The function, of a module and all arguments in order, that runs for `key`, and what it read; None is the
        class's own.
        """
        for variant in self.variants:
            if variant.key == key:
                return self._functions[key][0], dict(variant.reads)
        return self.previous.implementation(key) if self.previous else None

    @property
    def code(self) -> str:
        """The generated code, one function for each kind of arguments."""
        return "\n".join(f"# {self.describe(variant.key)}\n{readable(variant.source)}" for variant in self.variants)

    def describe(self, key: Key) -> str:
        """The arguments that `key` stands for, in words."""
        return ", ".join(f"{name}: {kind}" for (name, _), kind in zip(self.parameters, key, strict=True)) or "always"

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        # By hand, as dynamo traces it. Of a wrong call it makes None, or too many arguments to be of a known kind: the
        # original then raises its TypeError.
        arguments = list(args)
        used = 0
        for name, default in self.parameters[len(args) :]:
            if name in kwargs:
                arguments.append(kwargs[name])
                used += 1
            elif default is REQUIRED:
                return None
            else:
                arguments.append(default)
        return arguments if used == len(kwargs) else None

    def _original(self, module: nn.Module) -> Callable[..., Any]:
        if self.previous is not None:
            return functools.partial(self.previous, module)
        # From the class: getattr(module, ...) is what called us.
        return functools.partial(getattr(type(module), self.method), module)

    def _compile(self) -> None:
        self._functions: dict[Key, tuple[Callable[..., Any], tuple[tuple[list[str], Any], ...]]] = {}
        for variant in self.variants:
            reads = tuple((name.split("."), value) for name, value in variant.reads)
            self._functions[variant.key] = (_function(self.method, variant), reads)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_functions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._compile()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphMethod:
        return self


def _is_still(module: Any, path: list[str], value: Any) -> bool:
    # 1 is not True, nor 1.0, to the code that a value is baked into.
    for name in path:
        module = getattr(module, name, REQUIRED)
    return type(module) is type(value) and bool(module == value)


def generate(graph: fx.Graph, method: str, key: Key, reads: Iterable[tuple[str, Any]]) -> Variant:
    """The source of `graph` as a function, and the imports it needs.

    Raises:
        Unsupported: it calls something that cannot be imported by name, so the module would not pickle.
    """
    code = graph.python_code("self")
    head = "def forward("
    body = code.src[code.src.index(head) :]
    source = f"def {method}({body.removeprefix(head)}".rstrip() + "\n"
    compiled = compile(source, "<generated>", "exec").co_consts[0]
    imports = []
    for name, value in sorted(code.globals.items()):
        if name in compiled.co_names:
            short = getattr(value, "__name__", name)
            if is_own(value) and short not in (*compiled.co_names, *compiled.co_varnames):
                source = re.sub(rf"\b{name}\b", short, source)  # fx spells the module out
                name = short
            imports.append((name, *_whence(value)))
    return Variant(key, source, tuple(imports), tuple(reads))


def readable(source: str) -> str:
    """Generated code without the assignments that only release memory."""
    return "\n".join(line.partition(";  ")[0] if line.endswith(" = None") else line for line in source.splitlines())


def _whence(value: Any) -> tuple[str, str]:
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    if isinstance(value, float):
        return "math", "nan" if math.isnan(value) else "inf"
    if value is type(None):
        return "types", "NoneType"
    module, path = getattr(value, "__module__", None) or "torch", getattr(value, "__qualname__", "")
    try:
        if _import(module, path) is value:
            return module, path
    except (ImportError, AttributeError):
        pass
    raise Unsupported(f"it calls {module}.{path}, which cannot be imported by that name")


def _import(module: str, path: str) -> Any:
    imported = __import__(module, fromlist=["_"])
    return operator.attrgetter(path)(imported) if path else imported


def _function(method: str, variant: Variant) -> Callable[..., Any]:
    # A file name of its own in linecache, so that tracebacks and debuggers show the generated lines.
    filename = f"<samopt {method} {abs(hash(variant.source)):x}>"
    linecache.cache[filename] = (len(variant.source), None, variant.source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {name: _import(module, path) for name, module, path in variant.imports}
    exec(compile(variant.source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[method]
    return function
