"""Boolean-mask reads and writes become `torch.where`: no synchronisation with the GPU, and no graph break.

    x[m] = v             x = where(m, v, x)
    x[m] += w            x = where(m, x + w, x)
    y[m] = x[m] * 2      y = where(m, x * 2, y)

Indexing with a mask m counts its True elements, and on a GPU the host waits for that count. `where` computes every row
and keeps some. The results are equal bit for bit, infinities and signs of zero included (a NaN stays one), as each
element goes through the same operations; so only operations that round correctly may lie between read and write (`sin`
is another function for strided memory than for contiguous).

A value may be a number, weights that broadcast over rows, or a read with the same mask. Any other tensor may hold one
row per True, and reads that go elsewhere have as many rows as the mask has True: both are declined. Ranks and dtypes
are not known from the code: the helpers below look at them on each call and leave what does not fit to the original.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from samopt.base import Numerics, Phase
from samopt.graphs import Declined, GraphPass, own_methods
from samopt.graphs.graph_method import RunOriginal
from samopt.graphs.mask_indices import may_index_with_mask, subscripts
from samopt.graphs.masked_writes import IN_PLACE, MaskedWrites
from samopt.graphs.source_check import syntax_tree
from samopt.graphs.tracing import method_function


@dataclass(frozen=True)
class WhereIndexing(GraphPass):
    """Boolean-mask reads and writes become `torch.where`, in SAM's prompt encoder and any method that can be traced."""

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def candidates(self, module: nn.Module) -> Iterator[str]:
        for method in own_methods(type(module)):
            function = method_function(module, method)
            try:
                worth = may_index_with_mask(syntax_tree(function))
            except Declined:  # it has no source, and will be declined for that if there is anything to it
                worth = any(instruction.opname == "STORE_SUBSCR" for instruction in dis.get_instructions(function))
            if worth:
                yield method

    def transform(self, graph: fx.Graph, module: nn.Module) -> int:
        found = list(subscripts(graph, module))
        if not found:
            return 0
        writes = MaskedWrites(graph, module, found)
        _Rewrite(graph, writes).run()
        return len(writes.writes)


# In generated code: m is a mask [*P], x is [*P, *R], and a row of x is [*R].


def rows(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`m` as [*P, 1, ...], so that it broadcasts over the rows of `x`."""
    every(m, x)
    # where() lays its result out as a contiguous x; of any other layout the original keeps what it was.
    if not x.is_contiguous() or m.device != x.device:
        raise RunOriginal
    return m.contiguous().reshape(m.shape + (1,) * (x.ndim - m.ndim))


def every(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x`, all of it, where the original reads `x[m]`."""
    fits = isinstance(m, torch.Tensor) and m.dtype == torch.bool and m.ndim > 0 and m.shape == x.shape[: m.ndim]
    if not fits or x.is_complex():  # complex products round differently in vector code
        raise RunOriginal
    return x


def per_row(w: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`w`, which broadcasts over the rows of x[m], [n, *R], as what does so over `x`."""
    every(m, x)
    if not isinstance(w, torch.Tensor):
        raise RunOriginal
    row = x.shape[m.ndim :]
    if w.ndim > len(row):
        # Leading ones go, but a tensor with dimensions stays one: 0-dim tensors promote dtypes otherwise.
        extra = w.ndim - max(len(row), 1)
        if any(size != 1 for size in w.shape[: w.ndim - len(row)]):
            raise RunOriginal
        w = w.reshape(w.shape[extra:])
    return w


def beside(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, whose rows y[m] broadcast with the rows x[m] as all of it does with all of `x`."""
    if y.ndim != x.ndim:
        raise RunOriginal
    return y


def like(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`v`, if all of it can be written to all of `x` without a cast."""
    fits = v.dtype == x.dtype and v.device == x.device and v.ndim == x.ndim
    if not fits or not all(size in (1, wanted) for size, wanted in zip(v.shape, x.shape, strict=True)):
        raise RunOriginal
    return v


def cast(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`v` in the dtype of `x`, as an operation in place on x computes it."""
    fits = v.dtype == x.dtype or (v.dtype.is_floating_point and x.dtype.is_floating_point)
    if not fits or v.shape != x.shape:
        raise RunOriginal
    return v.to(x.dtype)


class _Rewrite:
    """The rewriting of one graph."""

    def __init__(self, graph: fx.Graph, found: MaskedWrites) -> None:
        self.graph = graph
        self.found = found
        self.order = dict(found.order)
        self.widened: dict[fx.Node, fx.Node] = {}  # each masked read, and what replaced it
        self.masks: dict[fx.Node, Any] = {}

    def run(self) -> None:
        for node in [node for node in self.graph.nodes if node in self.found.between]:
            self._widen(node)
        for write in self.found.writes:
            x, mask, value = write.args
            assert isinstance(x, fx.Node)
            keep = self._insert(write, rows, (mask, x), "keep")
            if not isinstance(value, fx.Node):
                # A number in the dtype of x, as indexing casts it.
                value = self._insert(write, "new_full", (x, (), value), "value")
            elif value in self.found.weights:
                row = self._insert(write, per_row, (value, mask, x), "row")
                value = self._insert(write, like, (self._insert(write, "expand_as", (row, x), "row"), x), "value")
            elif not (value.target is cast and value.args[1] is x):
                value = self._insert(write, like, (value, x), "value")
            where = self._insert(write, torch.where, (keep, value, x), "where")
            x.replace_all_uses_with(where, functools.partial(self._follows, write))
            self.graph.erase_node(write)

    def _follows(self, write: fx.Node, user: fx.Node) -> bool:
        return self.order[user] > self.order[write]

    def _widen(self, node: fx.Node) -> None:
        """Makes a masked read, or an operation on one, compute all rows."""
        read = self.found.between[node]
        source: Any
        new: Any
        if node is read:
            source, self.masks[read] = node.args
            # Where it goes back to what it read from, `rows` checks for both.
            new = source if read in self.found.returning else self._insert(node, every, (node.args[1], source), "whole")
            self.widened[read] = new
        else:
            args: list[Any] = list(node.args)
            read_before = None
            for index, arg in enumerate(args):
                if arg in self.found.weights:
                    args[index] = self._insert(node, per_row, (arg, self.masks[read], self.widened[read]), "row")
                elif isinstance(arg, fx.Node):  # it was read with the mask too
                    if read_before not in (None, arg):
                        args[index] = self._insert(node, beside, (arg, read_before), "other")
                    read_before = arg
            target = IN_PLACE.get(node.target, node.target)
            new = self._insert(node, target, tuple(args), str(getattr(target, "__name__", target)))
            if node.target in IN_PLACE:
                new = self._insert(node, cast, (new, args[0]), "value")
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _insert(self, before: fx.Node, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.create_node(
                "call_method" if isinstance(target, str) else "call_function", target, args, {}, name
            )
        self.order[node] = self.order[before]
        return node
