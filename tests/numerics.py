"""How tests hold arithmetic to its class: errors are measured against the unmodified module in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.verify import relative_error as relative_error_of

S = TypeVar("S", bound=np.generic)


def read_only(array: NDArray[S]) -> NDArray[S]:
    """A copy that must not be written to, as `np.asarray` makes of a PIL image: PyTorch warns of such."""
    array = array.copy()
    array.flags.writeable = False
    return array


@torch.no_grad()
def relative_error(values: Any, truth: Any) -> float:
    """|values - truth| / |truth|, over all tensors of a result together."""
    return relative_error_of(tensors(values), tensors(truth))


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result that is one, or a sequence of them."""
    return [result] if isinstance(result, Tensor) else list(result)


@torch.no_grad()
def assert_rounding(original: nn.Module, rewritten: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Asserts that `rewritten` errs at most twice what `original` errs, both run in the dtype they are in."""
    truth = copy.deepcopy(original).double()(*(x.double() for x in inputs))
    baseline = relative_error(original(*inputs), truth)
    error = relative_error(rewritten(*inputs), truth)
    dtype = next(original.parameters()).dtype
    assert 0 < baseline < 32 * torch.finfo(dtype).eps, f"the unmodified model is off by {baseline}: nothing is measured"
    assert error <= 2 * baseline, f"{dtype}: error {error:.2e}, unmodified {baseline:.2e}"


@torch.no_grad()
def assert_bit_equal(ours: Any, theirs: Any) -> None:
    """Asserts that two results hold equal tensors, bit for bit."""
    for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), f"differs by up to {(mine.double() - other.double()).abs().max():.1e}"
