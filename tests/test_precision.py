"""TF32 in convolutions, whichever of PyTorch's two interfaces the caller uses for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from samopt.precision import tf32_convolutions

CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = CUDNN.allow_tf32
    yield
    CUDNN.allow_tf32 = before  # and with it what the newer interface says


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_it_is_switched_and_put_back(before: bool, allowed: bool) -> None:
    CUDNN.allow_tf32 = before
    with tf32_convolutions(allowed):
        assert CUDNN.allow_tf32 == allowed
    assert CUDNN.allow_tf32 == before


@pytest.mark.parametrize("allowed", [True, False])
def test_callers_may_use_the_newer_interface(allowed: bool) -> None:
    CUDNN.allow_tf32 = True
    CUDNN.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        _ = CUDNN.allow_tf32
    with tf32_convolutions(allowed):
        assert CUDNN.conv.fp32_precision == ("tf32" if allowed else "ieee")
    assert CUDNN.conv.fp32_precision == "ieee"
