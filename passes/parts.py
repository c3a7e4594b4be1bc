"""What is inside a module, listed once, so that a call can look for changes in microseconds."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Parts:
    """The modules, hooks, parameters and buffers in a module: in vit_h's encoder 329, 1316 and 459."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._known = self._present()
        self._hooks: list[dict[int, Any]] = []
        owners: list[dict[str, Any]] = []
        for module in modules:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            self._hooks += [module._backward_hooks, module._backward_pre_hooks]
            owners += [module._parameters, module._buffers]
        named = [(owner, name) for owner in owners for name, tensor in owner.items() if tensor is not None]
        self._owners, self._names = [owner for owner, _ in named], [name for _, name in named]

    def _present(self) -> list[nn.Module | None]:
        return list(itertools.chain.from_iterable(map(dict.values, self._children)))

    def current(self) -> bool:
        """Whether every module is still where it was."""
        return self._present() == self._known

    def hooked(self) -> bool:
        """Whether any module has a hook of its own, or all modules of the process have."""
        return any(self._hooks) or _has_any_global_hook()

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that are in place now."""
        return list(map(operator.getitem, self._owners, self._names))

    def addresses(self) -> list[int]:
        """Where the values of the parameters and buffers are."""
        return list(map(Tensor.data_ptr, map(operator.getitem, self._owners, self._names)))
