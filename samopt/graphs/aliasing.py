"""Which tensors in a traced graph may share memory, and which operations write it.

Replacing a write in place by a new value is sound only if nobody else could see the write. What is not known to be
harmless counts as harmful: an operation that is in no list below may write, keep and return any of its arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import fx, nn
from torch.fx.graph import inplace_methods

from samopt.graphs.source_check import Declined, is_own, words
from samopt.graphs.tracing import trace_method

# Results in memory of their own. `out=` and `inplace=` are looked at separately.
_FRESH = words(
    """
    abs acos add addmm all amax amin any arange argmax argmin argsort asin atan atan2 avg_pool2d baddbmm bitwise_and
    bitwise_not bitwise_or bitwise_xor bmm cat ceil clamp clip clone concat conv1d conv2d conv_transpose2d cos cumsum
    div empty empty_like eq erf exp eye floor floordiv floor_divide full full_like ge gelu gt interpolate invert isclose
    isfinite isin isinf isnan layer_norm le linear linspace log logical_and logical_not logical_or logical_xor lshift lt
    masked_fill matmul maximum mean minimum mod mul ne neg new_empty new_full new_ones new_zeros nonzero norm not_
    one_hot ones ones_like or_ and_ xor pow prod rand randn reciprocal relu remainder repeat round rshift rsqrt
    scaled_dot_product_attention sigmoid sign sin softmax sqrt square stack std sub sum tan tanh tensor tril triu
    truediv var where zeros zeros_like
    """
)
# Views of all the memory of their argument, or copies of it: each element once, in the same order.
_WHOLE = words(
    """
    bfloat16 bool contiguous cpu cuda detach double flatten float half reshape squeeze to type type_as unsqueeze view
    view_as
    """
)
_VIEWS = words(
    """
    chunk diagonal dropout expand expand_as flip getattr getitem movedim narrow permute pos select split swapaxes t
    transpose unbind unflatten
    """
)
_FACTS = words(
    """
    device dim dtype element_size is_contiguous is_cuda is_floating_point item itemsize layout ndim ndimension nelement
    numel shape size stride tolist
    """
)

Origins = frozenset[fx.Node]
_NOTHING: Origins = frozenset()


class Aliases:
    """The memory behind each node of a graph.

    Attributes:
        order: the position of each node.
        origins: the nodes whose memory a node may share: what allocated it, or the argument or attribute it came in by.
    """

    def __init__(
        self,
        graph: fx.Graph,
        module: nn.Module,
        is_copy: Callable[[fx.Node], bool] | None = None,
        depth: int = 6,
    ) -> None:
        """
        Args:
            graph: as `trace_method` made it.
            module: whose method it is.
            is_copy: recognises nodes that look like views but copy.
            depth: how many calls deep to look into children and other methods; what lies deeper counts as harmful.
        """
        self._module = module
        self._depth = depth
        self._is_copy = is_copy or (lambda node: False)
        self._opaque: set[fx.Node] = set()
        self._whole: set[fx.Node] = set()
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.origins: dict[fx.Node, Origins] = {}
        for node in graph.nodes:
            self.origins[node] = self._origins(node)

    def why_not_own(self, node: fx.Node) -> str | None:
        """Why the tensor `node` may be visible outside of the method, or is not laid out like one of its own; or None.

        None means that it holds each of its elements once, in memory that this method allocated.
        """
        for origin in sorted(self.origins[node], key=self.order.__getitem__, reverse=True):
            if origin.op == "placeholder":
                return f"its argument `{origin.target}`"
            if origin.op == "get_attr":
                return f"the module's own `{origin.target}`"
            if origin in self._opaque:
                return f"what `{describe(origin)}` returned, which others may hold"
        return None if node in self._whole else f"`{node}`, a view that need not hold its elements once and in order"

    def writes(self, node: fx.Node) -> Origins:
        """The memory that `node` may write."""
        if node in self._opaque:
            # What it is given, and what it may know already: all that came from outside or was given to its like.
            kept = _NOTHING.union(*map(self._inputs, self._opaque))
            return kept | {origin for origin in self.origins if origin.op in ("placeholder", "get_attr")}
        if node.op in ("call_function", "call_method") and _is_inplace(node) and isinstance(node.args[0], fx.Node):
            return self.origins[node.args[0]]
        return _NOTHING

    def keeps(self, node: fx.Node) -> Origins:
        """The memory that `node` may keep hold of, besides returning it."""
        return self._inputs(node) if node in self._opaque else _NOTHING

    def writes_outside(self, node: fx.Node) -> str | None:
        """What `node` is known to write that the caller can see, or None."""
        outside = [o for o in self.writes(node) if o.op in ("placeholder", "get_attr") and node not in self._opaque]
        return f"`{outside[0].target}`" if outside else None

    def sharing(self, node: fx.Node) -> Iterator[fx.Node]:
        """The other nodes that may share memory with `node`."""
        mine = self.origins[node]
        return (other for other, origins in self.origins.items() if other is not node and mine & origins)

    def _inputs(self, node: fx.Node) -> Origins:
        return _NOTHING.union(*(self.origins[each] for each in node.all_input_nodes))

    def _origins(self, node: fx.Node) -> Origins:
        own = frozenset([node])
        if node.op in ("placeholder", "get_attr"):
            return own
        if node.op == "output" or self._is_copy(node):
            return _NOTHING if node.op == "output" else self._mark(node, own)
        name = operation(node)
        first = node.args[0] if node.args else None
        if name in _FACTS or (name == "getattr" and node.args[1] in _FACTS):
            return _NOTHING
        if name in _FRESH or (node.op == "call_module" and returns_own(self._module, str(node.target), self._depth)):
            return self._mark(node, own)
        if name is not None and isinstance(first, fx.Node) and (_is_inplace(node) or name in _WHOLE):
            return self._mark(node, self.origins[first]) if first in self._whole else self.origins[first]
        if name in _VIEWS and len(node.all_input_nodes) >= 1:
            return self._inputs(node)
        self._opaque.add(node)
        return own | self._inputs(node)

    def _mark(self, node: fx.Node, origins: Origins) -> Origins:
        self._whole.add(node)
        return origins


def operation(node: fx.Node) -> str | None:
    """The name of the operator, torch function or tensor method that `node` is; None if it may be anything else."""
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return None
    if node.op == "call_method":
        return str(node.target)
    if len(node.args) > 1 and getattr(node.target, "__name__", "") == "relu":
        return None  # its second argument is `inplace`
    if node.op != "call_function" or is_own(node.target) or isinstance(node.target, str):
        return None
    if node.target in vars(operator).values() and any(isinstance(arg, (list, tuple)) for arg in node.args):
        # [x] + rest is a list that holds x. An index is no such list.
        return node.target.__name__ if node.target in (operator.getitem, operator.setitem) else None
    return getattr(node.target, "__name__", None)


def describe(node: fx.Node) -> str:
    """What `node` calls, in words."""
    return getattr(node.target, "__name__", str(node.target)) if node.op != "call_module" else f"self.{node.target}"


def returns_own(module: nn.Module, path: str, depth: int = 6) -> bool:
    """Whether calling `module.path` has no effect and returns one tensor, in memory that nothing else holds."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    child = owner._modules.get(name)
    if child is not None:
        if child._forward_hooks or child._forward_pre_hooks or type(child).__call__ is not nn.Module.__call__:
            return False
        owner, name = child, "forward"
    try:
        traces = trace_method(owner, name) if depth else {}
    except Declined:
        return False
    return bool(traces) and all(_returns_own(trace.graph, owner, depth - 1) for trace in traces.values())


def _returns_own(graph: fx.Graph, module: nn.Module, depth: int) -> bool:
    aliases = Aliases(graph, module, depth=depth)
    result = graph.output_node().args[0]
    if not isinstance(result, fx.Node) or aliases.why_not_own(result):
        return False
    written = _NOTHING.union(*map(aliases.writes, graph.nodes))
    kept = _NOTHING.union(*map(aliases.keeps, graph.nodes))
    return not any(o.op in ("placeholder", "get_attr") for o in written) and not kept & aliases.origins[result]


def _is_inplace(node: fx.Node) -> bool:
    name = operation(node) or ""
    return name in inplace_methods or (name.endswith("_") and not name.endswith("__") and name not in _FRESH)
