"""Whether a method's source can be traced without the trace lying.

Tracing a method records what it does to stand-ins for its arguments. Most of what it cannot follow raises at once
(a tensor in an `if`), but some Python answers for a stand-in as if it were a value: `x is None`, `type(x)`,
`hasattr(x, "shape")`, a global flag, an attribute set on the side. Code that uses those is declined here, by its
source, before it is traced.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.overrides import get_testing_overrides


class Declined(Exception):
    """A method that cannot be traced, or a graph that cannot be rewritten, soundly. The message is the reason."""


def words(text: str) -> frozenset[str]:
    """The words of `text`: a set of names that reads well."""
    return frozenset(text.split())


# Builtins that either fail on a stand-in or do to it what they do to a tensor.
_BUILTINS = words(
    "abs all any bool dict enumerate float int len list max min range reversed round slice sorted sum tuple zip"
)
_FACTORIES = [getattr(torch, name) for name in words("arange empty eye full linspace ones rand randn tensor zeros")]
_TYPES = (torch.Size, torch.device, torch.finfo, torch.iinfo)
_PACKAGES = ("math", "numpy", "torch")


@functools.lru_cache(maxsize=1024)
def syntax_tree(function: types.FunctionType) -> ast.FunctionDef:
    """The parsed source of `function`.

    Raises:
        Declined: there is no source, or it is not one plain `def`.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        raise Declined("its source is not available") from None
    if not isinstance(tree, ast.FunctionDef):
        raise Declined("it is not defined by a plain `def`")
    return tree


def is_immutable(value: Any) -> bool:
    """Whether generated code may hold `value` itself."""
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return value is None or value is ... or type(value) in plain


def is_own(value: Any) -> bool:
    """Whether `value` is a Python function that is not torch's."""
    return isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] != "torch"


@functools.lru_cache(maxsize=1024)
def check_source(function: types.FunctionType) -> None:
    """Checks that tracing `function`, a method, is sound, where calls of other own code are recorded, not traced into.

    Raises:
        Declined: it is not sound; the message says why.
    """
    tree = syntax_tree(function)
    if tree.decorator_list or hasattr(function, "__wrapped__"):
        raise Declined("it is decorated")
    arguments = tree.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise Declined("it has *args, **kwargs, or keyword-only or positional-only parameters")
    if function.__closure__:
        raise Declined("it uses super() or variables of an enclosing function")
    check = _Check(function, tree)
    for statement in tree.body:
        check.visit(statement)


class _Check(ast.NodeVisitor):
    """Visits the statements of one method; raises Declined at the first that a trace would get wrong."""

    REFUSED: ClassVar[dict[type[ast.AST], str]] = {
        ast.Try: "it catches exceptions",
        ast.With: "it has a `with` block",
        ast.Match: "it has a `match` statement",
        ast.Lambda: "it defines a function",
        ast.FunctionDef: "it defines a function",
        ast.ClassDef: "it defines a class",
        ast.Import: "it imports",
        ast.ImportFrom: "it imports",
        ast.Global: "it sets global variables",
        ast.Delete: "it deletes something",
        ast.Yield: "it is a generator",
        ast.YieldFrom: "it is a generator",
    }

    def __init__(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        self.globals = function.__globals__
        self.parameters = [argument.arg for argument in tree.args.args]
        self.first_store: dict[str, int] = {}
        for name in (node for node in ast.walk(tree) if isinstance(node, ast.Name)):
            if isinstance(name.ctx, ast.Store):
                line = self.first_store.get(name.id, name.lineno)
                self.first_store[name.id] = min(line, name.lineno)
        self.loops = 0

    def visit(self, node: ast.AST) -> None:
        if reason := self.REFUSED.get(type(node)):
            raise Declined(reason)
        loop = isinstance(node, (ast.For, ast.While))
        self.loops += loop
        super().visit(node)
        self.loops -= loop

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # The annotation is not run.
        self.visit(node.target)
        if node.value:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops) and not self._is_known(node.left):
            # Nothing intercepts `is`: the stand-in would be called "not None" whatever the value.
            raise Declined(f"it tests a computed value with `is`: `{ast.unparse(node)}`")
        self.generic_visit(node)

    def _is_known(self, tested: ast.AST) -> bool:
        """Whether `tested` is an argument as it was passed, or an attribute of self."""
        if isinstance(tested, ast.Attribute):
            while isinstance(tested, ast.Attribute):
                tested = tested.value
            return isinstance(tested, ast.Name) and tested.id == self.parameters[0]
        if not isinstance(tested, ast.Name) or tested.id not in self.parameters:
            return False
        stored = self.first_store.get(tested.id)
        return stored is None or (not self.loops and tested.lineno <= stored)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise Declined(f"it sets an attribute: `{ast.unparse(node)}`")
        chain = list(_chain(node))
        root = chain[0]
        if not isinstance(root, ast.Name) or self._is_local(root.id):
            self.visit(node.value)
            return
        value = self._lookup(root.id)
        while isinstance(value, types.ModuleType) and len(chain) > 1:
            if value.__name__.partition(".")[0] not in _PACKAGES:
                raise Declined(f"it uses the module {value.__name__}: `{ast.unparse(node)}`")
            chain.pop(0)
            attribute = chain[0]
            assert isinstance(attribute, ast.Attribute)
            value = getattr(value, attribute.attr, None)
        self._check_global(value, ast.unparse(node))

    def visit_Name(self, node: ast.Name) -> None:
        if self._is_local(node.id):
            return
        value = self._lookup(node.id)
        if not is_own(value):
            self._check_global(value, node.id)

    def _is_local(self, name: str) -> bool:
        return name in self.parameters or name in self.first_store

    def _lookup(self, name: str) -> Any:
        return self.globals[name] if name in self.globals else getattr(builtins, name, None)

    def _check_global(self, value: Any, text: str) -> None:
        if is_immutable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
            return
        name = getattr(value, "__name__", "")
        if any(value is each for each in (*_FACTORIES, *_TYPES)) or getattr(math, name, None) is value:
            return
        if name in _BUILTINS and getattr(builtins, name) is value:
            return
        if (
            not isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
            or value not in get_testing_overrides()
        ):
            raise Declined(f"it uses `{text}`, whose value or effect a trace would freeze or miss")


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """The attribute accesses that make up `a.b.c`, from `a` on."""
    if isinstance(node, ast.Attribute):
        yield from _chain(node.value)
    yield node
