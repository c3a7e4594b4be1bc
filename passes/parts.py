"""What is inside a module, listed once, so that a call can look for changes in microseconds."""

from __future__ import annotations

import itertools
import operator
import threading
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(*modules: Any) -> bool:
    """Whether any of the modules has a hook of its own, or all modules of the process have."""
    return _has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )


class Parts:
    """The modules, hooks, parameters and buffers in a module: in vit_h's encoder 329, 1316 and 457."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._hooks: list[dict[int, Any]] = []
        children: list[dict[str, Any]] = []
        owners: list[dict[str, Any]] = []
        for module in modules:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            self._hooks += [module._backward_hooks, module._backward_pre_hooks]
            children.append(module._modules)
            owners += [module._parameters, module._buffers]
        # Most modules have no children, and most no buffers: that this is still so is seen faster than what others have
        self._empty = [held for held in (*children, *owners) if not held]
        self._children = [held for held in children if held]
        self._known_children = [dict(held) for held in self._children]
        self._owners = [held for held in owners if held]
        self._known_names, self._known_absent = self._present_names(), self._absent()
        named = [(held, name) for held in self._owners for name, tensor in held.items() if tensor is not None]
        self._holders, self._names = [held for held, _ in named], [name for _, name in named]

    def _present_names(self) -> list[tuple[str, ...]]:
        return list(map(tuple, self._owners))

    def _absent(self) -> list[bool]:
        """Of each name of a parameter or buffer, whether it is None."""
        values = itertools.chain.from_iterable(map(dict.values, self._owners))
        return list(map(operator.is_, values, itertools.repeat(None)))

    def current(self) -> bool:
        """Whether every module is still where it was, and has parameters and buffers under the same names.

        Whether these are the same tensors is for `addresses` to say.
        """
        return (
            not any(self._empty)
            and self._children == self._known_children
            and self._present_names() == self._known_names
            and self._absent() == self._known_absent
        )

    def hooked(self) -> bool:
        """Whether any module has a hook of its own, or all modules of the process have."""
        return any(self._hooks) or _has_any_global_hook()

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that are in place now."""
        return list(map(operator.getitem, self._holders, self._names))

    def addresses(self) -> list[int]:
        """Where the values of the parameters and buffers are."""
        return list(map(Tensor.data_ptr, map(operator.getitem, self._holders, self._names)))


class PartsOf:
    """The parts of one module, listed anew where a module in it was replaced. Threads may share it."""

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._lock = threading.Lock()

    def __call__(self, root: nn.Module) -> Parts:
        """The parts of `root`, the same module at every call."""
        with self._lock:
            if self._parts is None or not self._parts.current():
                self._parts = Parts(root)
            return self._parts
