"""What tests of graph passes share: rewriting a copy, comparing bits, and no silent way back to the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samopt import GraphPass
from samopt.graphs.graph_method import GraphMethod


def rewritten(module: nn.Module, *passes: GraphPass) -> Any:
    """A deep copy of `module`, rewritten by the passes in order."""
    ours = copy.deepcopy(module)
    for each in passes:
        each(ours)
    return ours


def refuse_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where generated code hands over to the original method, as it may, but not in the usual case."""

    def refuse(self: GraphMethod, module: nn.Module) -> Callable[..., Any]:
        raise AssertionError(f"the original {self.method} ran")

    monkeypatch.setattr(GraphMethod, "_original", refuse)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    """Also of zeros. Which NaN a NaN is, torch's vector code and the rest of a row do not agree on."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for mine, other in zip(*([x] if isinstance(x, Tensor) else x for x in (ours, theirs)), strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine.isnan(), other.isnan())
        bits = (x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")) for x in (mine, other))
        assert torch.equal(*(x.view(integer[x.element_size()]) for x in bits))
