"""The attention kernels where numbers are extreme, in Triton's interpreter: sums that overflow, and NaN.

In bfloat16 they are LAZY: they take the maximum of the first keys. So they are here, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from samopt.passes.kernels.attention_launch import Geometry, unit_of
from samopt.passes.kernels.tuning import Config
from tests.attention_problems import Tensors, launched, random_tensors, truth
from tests.numerics import relative_error

triton = pytest.importorskip("triton", reason="needs Triton")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret"),
    # NumPy, which the interpreter computes with, warns of what a GPU computes silently.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]

PROBLEMS = {
    "global_attention": (Geometry(3, 20, 3, 20, 2, 48), Config.of(BLOCK_M=32, BLOCK_N=16)),
    "window_attention": (Geometry(5, 6, 4, 5, 2, 48), Config.of(Q_ROWS=4, K_ROWS=2)),
}

QUERY, KEY, VALUE = range(3)


class Lazy:
    """A kernel that is LAZY whatever the dtype.

    Attributes:
        programs: how many ran.
        totals: of each pass over all keys, the sum of weights per query, as NumPy has it.
    """

    def __init__(self, kernel: Any, attend: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.attend = attend
        self.programs = 0
        self.totals: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.programs += grid[0]
            self.kernel[grid](*args, **{**options, "LAZY": True})

        return launch

    def watched(self, *args: Any) -> Any:
        """Its `_attend`: a program calls it again where the first maximum does not do."""
        result = self.attend(*args)
        self.totals.append(result[0].handle.data)
        return result


@pytest.fixture(params=PROBLEMS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lazy(kernel: str, monkeypatch: pytest.MonkeyPatch) -> Lazy:
    module = pytest.importorskip(f"samopt.passes.kernels.{kernel}")
    lazy = Lazy(getattr(module, kernel), module._attend)
    monkeypatch.setattr(module, kernel, lazy)
    monkeypatch.setattr(module, "_attend", lazy.watched)
    return lazy


def run(kernel: str, tensors: Tensors) -> Tensor:
    geometry, config = PROBLEMS[kernel]
    return launched(config, geometry, tensors)


def by_heads(out: Tensor, geometry: Geometry) -> Tensor:
    """[B, H, W, heads, D]."""
    return out.unflatten(3, (geometry.heads, geometry.D))


def test_the_first_maximum_is_as_good_as_the_running_one(kernel: str, lazy: Lazy) -> None:
    geometry, _ = PROBLEMS[kernel]
    tensors = random_tensors(geometry, 1, torch.float32)
    assert relative_error(run(kernel, tensors), truth(geometry, tensors)) < 2e-6
    assert 0 < lazy.programs == len(lazy.totals), "the running maximum was taken: nothing is tested"


def test_where_sums_grow_too_large_the_running_maximum_is_taken(kernel: str, lazy: Lazy) -> None:
    geometry, _ = PROBLEMS[kernel]
    tensors = random_tensors(geometry, 1, torch.float32, factor=12)
    assert relative_error(run(kernel, tensors), truth(geometry, tensors)) < 1e-5
    assert len(lazy.totals) > lazy.programs
    assert not all(np.isfinite(total).all() for total in lazy.totals), "the first maximum would do: nothing is tested"


@pytest.mark.parametrize(("part", "lazily"), [(KEY, False), (KEY, True), (VALUE, True)])
def test_nan_stays_in_its_image_and_head(kernel: str, part: int, lazily: bool, request: pytest.FixtureRequest) -> None:
    if lazily:
        request.getfixturevalue("lazy")
    geometry, _ = PROBLEMS[kernel]
    tensors = random_tensors(geometry, 2, torch.float32)
    wanted = by_heads(truth(geometry, tensors), geometry)
    tensors[0].unflatten(3, (3, geometry.heads, geometry.D))[1, 0, 0, part, 1, 5] = torch.nan
    ours = by_heads(run(kernel, tensors), geometry)
    seen = (1, slice(geometry.rows), slice(geometry.columns), 1) + ((5,) if part == VALUE else ())
    assert ours[seen].isnan().all(), "every query of that window and head sees the token"
    ours[1, :, :, 1] = wanted[1, :, :, 1].float()
    assert relative_error(ours, wanted) < 2e-6


def test_nan_in_a_query_stays_with_it(kernel: str, lazy: Lazy) -> None:
    geometry, _ = PROBLEMS[kernel]
    tensors = random_tensors(geometry, 1, torch.float32, factor=12)
    wanted = by_heads(truth(geometry, tensors), geometry)
    tensors[0].unflatten(3, (3, geometry.heads, geometry.D))[0, 2, 3, QUERY, 1, 5] = torch.nan
    ours = by_heads(run(kernel, tensors), geometry)
    assert lazy.programs
    assert ours[0, 2, 3, 1].isnan().all()
    ours[0, 2, 3, 1] = wanted[0, 2, 3, 1].float()
    assert relative_error(ours, wanted) < 1e-5, "the others overflow, and still take the running maximum"


def test_positions_may_be_as_large_as_float16_has_them() -> None:
    geometry, config = PROBLEMS["window_attention"]
    qkv, padding, rel_pos_h, rel_pos_w = random_tensors(geometry, 1, torch.float16)
    qkv.unflatten(3, (3, geometry.heads, geometry.D))[..., QUERY, :, 0] = 128
    rel_pos_h[:, 0] = torch.arange(len(rel_pos_h)) * 64  # 128 times it: 49152 at most, and far enough from each other
    given = (qkv, padding, rel_pos_h, rel_pos_w)
    assert relative_error(launched(config, geometry, given), truth(geometry, given)) < 2e-2


@pytest.mark.parametrize("scale", [1e-3, 0.08, 0.125, 0.3, 1])
def test_what_stands_for_one_brings_terms_into_the_range_of_positions(scale: float) -> None:
    assert 0.5 < 1 / (scale * unit_of(scale)) <= 1


@pytest.mark.parametrize("scale", [1e-9, 7])
def test_what_stands_for_one_fits_float16_and_is_at_least_1(scale: float) -> None:
    assert unit_of(scale) == {1e-9: 2**15, 7: 1}[scale]
