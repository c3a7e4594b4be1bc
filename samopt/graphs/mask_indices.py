"""Which index is a boolean mask: guessed from the source, to find what is worth tracing, and known from the graph."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import fx, nn

from samopt.graphs.aliasing import operation
from samopt.graphs.graph_method import VALUE
from samopt.graphs.source_check import Declined, words

_COMPARISONS = words("eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not bool")
_LOGIC = words("and_ or_ xor invert bitwise_and bitwise_or bitwise_xor bitwise_not")
_VIEWS = words("clone contiguous detach expand flatten getitem reshape squeeze unsqueeze view")
_NUMBERS = words("dim getattr numel size")  # getattr: x.shape
_INTEGERS = words("arange argmax argmin argsort int long nonzero")
_ARITHMETIC = words("add floordiv mod mul neg sub")
REPEATABLE = _COMPARISONS | _LOGIC | _VIEWS | _ARITHMETIC | {"getattr"}
"""Operations that give the same result for the same arguments: no random numbers."""


def subscripts(graph: fx.Graph, module: nn.Module) -> Iterator[fx.Node]:
    """The reads (`getitem`) and writes (`setitem`) whose index is a boolean mask.

    Raises:
        Declined: an index mixes a mask with others, or nothing tells whether it is one.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (operator.getitem, operator.setitem):
            index = node.args[1]
            if isinstance(index, fx.Node):
                if is_mask(index, module):
                    yield node
                elif not _is_no_mask(index, module):
                    raise Declined(f"nothing tells whether the index `{index}` is a boolean mask")
            elif isinstance(index, (tuple, list)):
                for part in (part for part in index if isinstance(part, fx.Node)):
                    if not _is_no_mask(part, module):
                        raise Declined(f"its index `[{', '.join(map(str, index))}]` may mix a mask with other indices")


def is_mask(node: fx.Node, module: nn.Module) -> bool:
    """Whether `node`, if it is a tensor at all, is a boolean one."""
    name = operation(node)
    if node.op == "get_attr":
        return _dtype(node, module) is torch.bool
    if name in _COMPARISONS or torch.bool in node.args or node.kwargs.get("dtype") is torch.bool:
        return True
    inputs = node.all_input_nodes
    if name in _LOGIC:
        return bool(inputs) and all(is_mask(each, module) for each in inputs)
    return name in _VIEWS and is_mask(inputs[0], module)


def _is_no_mask(node: fx.Node, module: nn.Module) -> bool:
    name = operation(node)
    if node.op == "placeholder":
        return node.meta.get("kind") == VALUE
    if node.op == "get_attr":
        return _dtype(node, module) is not torch.bool
    if name in _NUMBERS or name in _INTEGERS or any(dtype in node.args for dtype in (torch.int32, torch.int64)):
        return True
    inputs = node.all_input_nodes
    return name in _VIEWS | _ARITHMETIC and bool(inputs) and all(_is_no_mask(each, module) for each in inputs)


def _dtype(node: fx.Node, module: nn.Module) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(attrgetter(str(node.target))(module), "dtype", None)
    return dtype


def may_index_with_mask(tree: ast.FunctionDef) -> bool:
    """Whether a function, by its source, may index with a boolean mask. A quick look that errs towards yes."""
    values: dict[str, list[ast.AST | None]] = {}
    nodes = list(_code(tree))
    for node in nodes:
        if isinstance(node, (ast.For, ast.comprehension)):
            for name in (each for each in ast.walk(node.target) if isinstance(each, ast.Name)):
                values.setdefault(name.id, []).append(ast.Constant(0))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in (each for each in ast.walk(target) if isinstance(each, ast.Name)):
                    if isinstance(name.ctx, ast.Store):
                        values.setdefault(name.id, []).append(node.value if name is target else None)
        elif (
            isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in ("int", "str")
        ):
            values.setdefault(node.arg, []).append(ast.Constant(0))
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    return any(_may_be_mask(index, values, 4) for index in indices)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    # Annotations are full of subscripts.
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from _code(child)


def _may_be_mask(node: ast.AST | None, values: dict[str, list[ast.AST | None]], depth: int) -> bool:
    if isinstance(node, (ast.Constant, ast.Slice)):
        return False
    if isinstance(node, ast.Tuple):
        return any(_may_be_mask(part, values, depth) for part in node.elts)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor))
    if isinstance(node, ast.IfExp):
        return _may_be_mask(node.body, values, depth) or _may_be_mask(node.orelse, values, depth)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name not in _INTEGERS and name not in ("len", "slice")
    if isinstance(node, ast.Name) and node.id in values and depth:
        return any(_may_be_mask(value, values, depth - 1) for value in values[node.id])
    return True
