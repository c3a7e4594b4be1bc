"""Whether the boolean-mask reads and writes of a traced method can be replaced by arithmetic on all rows.

    x[m] = v; y[m] = x[m] * 2 + w

can, if the mask is the same, if v and w are numbers or broadcast over rows, if `*` and `+` give every element the same
bits wherever it lies, and if nobody else can see x and y being written.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from samopt.graphs.aliasing import Aliases, describe, operation
from samopt.graphs.mask_indices import REPEATABLE
from samopt.graphs.source_check import Declined, words

# Correctly rounded, so the same in vector code, scalar code and on any device. `sin` is not: on CPUs it is another
# function for strided memory than for contiguous. Nor is `maximum`, of -0.0 and 0.0.
_EXACT = words("abs add bfloat16 div double float half mul neg sub truediv")
IN_PLACE: dict[Any, Any] = {operator.iadd: operator.add, operator.isub: operator.sub}
IN_PLACE |= {operator.imul: operator.mul, operator.itruediv: operator.truediv}


class MaskedWrites:
    """The masked reads and writes of one graph, all of which can be replaced by arithmetic on all rows.

    Attributes:
        writes: the `setitem` nodes, in order.
        between: the masked reads, and the operations on them up to a write, each with a read that it comes from.
        returning: those reads whose only way leads back to the tensor they came from, still unchanged.
        weights: the operands and values that broadcast over rows, and are the module's own.
        order: the position of each node.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, found: list[fx.Node]) -> None:
        """
        Args:
            graph: as `trace_method` made it.
            module: whose method it is.
            found: what `subscripts` found.

        Raises:
            Declined: one of them cannot be replaced; the message says why.
        """
        self._reads = {node for node in found if node.target is operator.getitem}
        self.writes = [node for node in found if node.target is operator.setitem]
        self._aliases = Aliases(graph, module, is_copy=self._reads.__contains__)
        self.order = self._aliases.order
        self._tainted: set[fx.Node] = set()  # what depends on a masked read
        for node in graph.nodes:
            if node in self._reads or not self._tainted.isdisjoint(node.all_input_nodes):
                self._tainted.add(node)
        self.between: dict[Any, fx.Node] = {}
        self.returning = set(self._reads)
        self.weights: set[Any] = set()
        for write in self.writes:
            self._check_target(write)
            self._check_value(write.args[2], write)
        for node in [*self.between, *self._reads]:
            for user in node.users:
                is_value = user in self.writes and user.args[2] is node and node not in user.args[:2]
                if node not in self.between or not (user in self.between or is_value):
                    source = self.between.get(node, node).args[0]
                    raise Declined(f"it reads `{source}` with a mask for more than a write with the same mask")
        for node in graph.nodes:
            # A helper may ask for the original after that, which would then do it twice.
            if node not in self.writes and (outside := self._aliases.writes_outside(node)):
                raise Declined(f"it also changes {outside}")

    def _check_target(self, write: fx.Node) -> None:
        x, at = write.args[0], self.order[write]
        assert isinstance(x, fx.Node)
        if reason := self._aliases.why_not_own(x):
            raise Declined(f"it writes to {reason}")
        for other in self._aliases.sharing(x):
            # What was made of x later will be made of what replaces it.
            if self.order[other] < at and any(self.order[user] > at for user in other.users):
                raise Declined(f"it writes to `{x}`, and later uses `{other}`, which shares its memory")
        for node, when in self.order.items():
            if when < at and self._aliases.keeps(node) & self._aliases.origins[x]:
                raise Declined(f"it writes to `{x}`, which `{describe(node)}` may have kept")

    def _check_value(self, value: Any, write: fx.Node) -> None:
        if not isinstance(value, fx.Node):
            if not isinstance(value, (bool, int, float)):
                raise Declined(f"it writes {value!r}")
        elif value in self._reads:
            self._check_read(value, write)
            self.between[value] = value
            overtaken = any(self.order[value] < self.order[other] < self.order[write] for other in self.writes)
            if value.args != write.args[:2] or overtaken:
                self.returning.discard(value)
        elif value in self._tainted:
            exact = operation(value) in _EXACT or value.target in IN_PLACE
            if not exact or value.kwargs:
                raise Declined(f"`{describe(value)}` between a read and a write need not round alike on all rows")
            for arg in value.args:
                self._check_value(arg, write)
            if value.target in IN_PLACE and value.args[0] not in self.between:
                raise Declined(f"it changes `{value.args[0]}` in place")
            self.between[value] = next(self.between[arg] for arg in value.args if arg in self.between)
        elif self._is_weight(value):
            self.weights.add(value)
        else:
            raise Declined(f"it writes `{value}`, which may hold one row for each True of the mask")

    def _check_read(self, read: fx.Node, write: fx.Node) -> None:
        source: Any = read.args[0]
        mask: Any = read.args[1]
        if not self._same(mask, write.args[1]):
            raise Declined(f"it reads `{source}` with one mask and writes with another")
        for node, when in self.order.items():
            if self.order[read] < when < self.order[write]:
                # Other masked writes leave the tensor that was read as it is: they make a new one.
                written = self._aliases.writes(node)
                if written & self._aliases.origins[mask] or (
                    node not in self.writes and written & self._aliases.origins[source]
                ):
                    raise Declined(f"`{node}` changes `{source}` or its mask between read and write")

    def _same(self, one: Any, other: Any) -> bool:
        """Whether two masks, or parts of them, are computed alike from the same unchanged tensors."""
        if one is other or not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
            return type(one) is type(other) and bool(one == other)
        alike = one.op == other.op and one.target == other.target and operation(one) in REPEATABLE
        if not alike or len(one.args) != len(other.args) or one.kwargs or other.kwargs:
            return False
        first, last = sorted((self.order[one], self.order[other]))
        inputs = frozenset().union(*(self._aliases.origins[node] for node in (*one.all_input_nodes, one, other)))
        changed = any(first < when < last and self._aliases.writes(node) & inputs for node, when in self.order.items())
        return not changed and all(map(self._same, one.args, other.args))

    def _is_weight(self, node: fx.Node) -> bool:
        """Whether `node` depends on the module's own tensors alone, so that its shape is the same in every call."""
        inputs = node.all_input_nodes
        known = not self._aliases.keeps(node) and bool(inputs)
        return node.op == "get_attr" or (known and all(map(self._is_weight, inputs)))
