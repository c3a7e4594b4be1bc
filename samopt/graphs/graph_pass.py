"""The form of a graph pass: trace one method of a module, rewrite the graph, bind the generated code to a clone.

The module so keeps its class, attributes, children, parameters and keys; only the one method runs other code, and
only for the kinds of arguments that were traced (see `samopt.graphs.graph_method`).
"""

from __future__ import annotations

import abc
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import fx, nn

from samopt.base import Pass
from samopt.errors import Unsupported
from samopt.graphs.graph_method import GraphMethod, generate
from samopt.graphs.source_check import Declined
from samopt.graphs.tracing import bound_method, method_function, parameters, trace_method
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip


@dataclass(frozen=True)
class GraphPass(Pass):
    """A pass that rewrites the graphs of methods. A subclass is a frozen dataclass with `transform`."""

    def candidates(self, module: nn.Module) -> Iterable[str]:
        """The names of the methods of `module` worth tracing. Override it where a look at the source can tell."""
        return own_methods(type(module))

    @abc.abstractmethod
    def transform(self, graph: fx.Graph, module: nn.Module) -> int:
        """Rewrites `graph` in place.

        Args:
            graph: one method, for one kind of arguments, as `samopt.graphs.tracing` describes.
            module: whose method it is; read it, never change it.

        Returns:
            The number of rewrites; 0 leaves the method as it is.

        Raises:
            Declined: the method cannot be rewritten soundly; the message says why.
        """

    @final
    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        for fqn, module in model.named_modules():
            if self._has_rewritten(module):
                yield Skip(fqn, f"{type(self).__name__} was applied already")
                continue
            rewrites = {}
            for method in self.candidates(module):
                try:
                    _, rewrites[method] = self._generate(module, method)
                except Declined as declined:
                    yield Skip(fqn, f"{method}: {declined}")
            rewrites = {method: count for method, count in rewrites.items() if count}
            if rewrites:
                yield Site(fqn, {"methods": tuple(rewrites), "rewrites": sum(rewrites.values())})

    @final
    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        for method in site.facts["methods"]:
            rebind(new, method, self._generate(module, method)[0])
        return new

    @final
    def explain(self, model: nn.Module) -> str:
        """The code of each site before and after, to read. Changes nothing."""
        parts = []
        for site in (found for found in self.match(model) if isinstance(found, Site)):
            module = model.get_submodule(site.fqn)
            for method in site.facts["methods"]:
                bound = bound_method(module, method)
                before = bound.code if bound else textwrap.dedent(inspect.getsource(method_function(module, method)))
                after, _ = self._generate(module, method)
                name = f"{site.fqn}.{method}".lstrip(".")
                parts.append(f"# {name}, before\n{before.strip()}\n\n# {name}, after\n{after.code.strip()}\n")
        return "\n\n".join(parts)

    def _generate(self, module: nn.Module, method: str) -> tuple[GraphMethod, int]:
        """The replacement for `module.method`, and the number of rewrites in it."""
        variants = []
        rewrites = 0
        for key, trace in trace_method(module, method).items():
            count = self.transform(trace.graph, module)
            if not count:
                continue  # the original runs
            rewrites = max(rewrites, count)
            trace.graph.lint()
            try:
                variants.append(generate(trace.graph, method, key, trace.reads.items()))
            except Unsupported as error:
                raise Declined(str(error)) from error
        function = method_function(module, method)
        return GraphMethod(method, parameters(function), variants, bound_method(module, method)), rewrites


def own_methods(cls: type[nn.Module]) -> tuple[str, ...]:
    """The methods that `cls` has from classes outside of torch, its own first; names with two underscores left out."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            names.update(dict.fromkeys(name for name in vars(base) if not name.startswith("__")))
    return tuple(name for name in names if isinstance(inspect.getattr_static(cls, name), types.FunctionType))
