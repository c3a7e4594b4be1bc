"""The attention kernels in Triton's interpreter, and the operator on a CPU, against SAM's own modules in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import attention, tuning
from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.attention_problem import GLOBAL_CANDIDATES, WINDOW_CANDIDATES, by_head
from samopt.passes.kernels.attention_reference import reference
from samopt.passes.kernels.tuning import Config
from tests.attention_problems import launched, random_tensors, scale_of, truth
from tests.numerics import relative_error

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}

# Grid, window, heads and their dimension; batch; rows of queries and of keys.
WINDOWS = {
    "past the grid at the bottom and the right": (Geometry(7, 5, 5, 3, 2, 32), 3, (4, 4)),
    "past the bottom only": (Geometry(6, 8, 4, 4, 2, 32), 1, (4, 4)),
    "past the right only": (Geometry(8, 6, 4, 4, 1, 32), 3, (4, 2)),
    "all inside": (Geometry(10, 10, 5, 5, 1, 64), 1, (8, 4)),
    "all inside, none square": (Geometry(7, 9, 7, 3, 2, 48), 1, (8, 2)),
    "larger than the grid": (Geometry(8, 10, 14, 14, 2, 80), 1, (4, 4)),
    "taller than the grid, several across": (Geometry(3, 9, 5, 4, 1, 96), 1, (16, 4)),
    "SAM's, by one token past the grid": (Geometry(15, 15, 14, 14, 1, 64), 1, (8, 2)),
    "more rows than a step has": (Geometry(9, 20, 9, 16, 1, 32), 1, (4, 8)),
    "one row": (Geometry(6, 20, 1, 17, 1, 32), 1, (4, 4)),
    "one column": (Geometry(20, 5, 18, 1, 2, 128), 1, (16, 4)),
    "one token": (Geometry(2, 3, 1, 1, 2, 32), 3, (4, 4)),
    "few columns, many rows of keys a step": (Geometry(20, 5, 18, 3, 1, 48), 1, (4, 2)),
}

# Likewise; queries of a program and keys of a step.
GLOBAL = {
    "odd": (Geometry(5, 7, 5, 7, 2, 32), 3, (32, 32)),
    "square": (Geometry(16, 16, 16, 16, 2, 64), 1, (64, 32)),
    "rows of three chunks": (Geometry(4, 40, 4, 40, 1, 48), 1, (64, 16)),
    "rows of two chunks": (Geometry(3, 50, 3, 50, 1, 80), 1, (32, 32)),
    "rows of whole chunks": (Geometry(3, 32, 3, 32, 1, 32), 3, (64, 16)),
    "tall": (Geometry(40, 3, 40, 3, 1, 96), 1, (128, 64)),
    "one row": (Geometry(1, 19, 1, 19, 2, 128), 1, (16, 16)),
    "one column": (Geometry(19, 1, 19, 1, 1, 64), 3, (16, 64)),
    "one token": (Geometry(1, 1, 1, 1, 2, 32), 3, (32, 32)),
}

EVERY = {**WINDOWS, **GLOBAL}


def configured(case: str) -> tuple[Geometry, int, Config]:
    """Geometry, batch and configuration of a case."""
    geometry, batch, (queries, keys) = EVERY[case]
    if geometry.is_global:
        return geometry, batch, Config.of(BLOCK_M=queries, BLOCK_N=keys)
    return geometry, batch, Config.of(Q_ROWS=queries, K_ROWS=keys)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", EVERY)
def test_the_kernels_are_right(case: str, dtype: torch.dtype) -> None:
    geometry, batch, config = configured(case)
    tensors = random_tensors(geometry, batch, dtype)
    ours = launched(config, geometry, tensors)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    assert relative_error(ours, truth(geometry, tensors)) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("case", ["past the bottom only", "odd"])
def test_the_configuration_changes_rounding_only(case: str) -> None:
    geometry, _, _ = configured(case)
    tensors = random_tensors(geometry, 1, torch.float32)
    wanted = truth(geometry, tensors)
    for config in GLOBAL_CANDIDATES if geometry.is_global else WINDOW_CANDIDATES:
        assert relative_error(launched(config, geometry, tensors), wanted) < 2e-6, config


@interpreted
@pytest.mark.parametrize("case", ["larger than the grid", "odd"])
def test_inputs_may_lie_in_memory_in_any_order(case: str) -> None:
    geometry, batch, config = configured(case)
    tensors = random_tensors(geometry, batch, torch.float32)
    qkv, padding, rel_pos_h, rel_pos_w = tensors
    elsewhere = (across(qkv, 1, 2), padding.repeat_interleave(2)[::2], across(rel_pos_h, 0, 1), across(rel_pos_w, 0, 1))
    assert not any(tensor.is_contiguous() for tensor in elsewhere)
    assert torch.equal(launched(config, geometry, elsewhere), launched(config, geometry, tensors))


def across(x: Tensor, first: int, second: int) -> Tensor:
    """Equal values, with two dimensions the other way round in memory."""
    return x.transpose(first, second).contiguous().transpose(first, second)


@interpreted
@pytest.mark.parametrize("case", ["past the bottom only", "odd"])
def test_the_scale_is_that_of_the_products_alone(case: str) -> None:
    geometry, batch, config = configured(case)
    tensors = random_tensors(geometry, batch, torch.float32)
    assert relative_error(launched(config, geometry, tensors, 0.3), truth(geometry, tensors, 0.3)) < 2e-6


@interpreted
@pytest.mark.parametrize("case", ["past the bottom only", "odd"])
def test_the_kernels_write_all_of_the_given_output_and_no_input(case: str) -> None:
    geometry, batch, config = configured(case)
    tensors = random_tensors(geometry, batch, torch.float32)
    before = [tensor.clone() for tensor in tensors]
    out = torch.full_like(truth(geometry, tensors), torch.nan, dtype=torch.float32)
    assert launch(config, geometry, *tensors, scale_of(geometry), out) is out
    assert relative_error(out, truth(geometry, tensors)) < 2e-6
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("case", EVERY)
def test_the_operator_on_a_cpu_is_right(case: str) -> None:
    geometry, batch, _ = configured(case)
    tensors = random_tensors(geometry, batch, torch.float64)
    settings = (geometry.heads, geometry.rows, geometry.columns, scale_of(geometry))
    ours = torch.ops.samopt.attention(*tensors, *settings)
    assert relative_error(ours, truth(geometry, tensors)) < 1e-13
    assert torch.equal(ours, reference(*tensors, *settings))


@pytest.mark.parametrize("case", ["past the grid at the bottom and the right", "odd"])
def test_head_by_head_is_right(case: str) -> None:
    geometry, batch, _ = configured(case)
    tensors = random_tensors(geometry, batch, torch.float16)
    ours = by_head(geometry, *tensors, scale_of(geometry))
    assert ours.dtype == torch.float32
    assert relative_error(ours, truth(geometry, tensors)) < 2e-6


@pytest.mark.parametrize("dimension", [16, 32, 48, 64, 80, 96, 128, 144, 192])
def test_head_dimensions_that_fit(dimension: int) -> None:
    assert Geometry(64, 64, 14, 14, 2, dimension).unfit() is None


@pytest.mark.parametrize("dimension", [1, 8, 20, 40, 56, 72, 112, 136, 256])
def test_head_dimensions_that_do_not_fit(dimension: int) -> None:
    assert str(dimension) in (Geometry(64, 64, 14, 14, 2, dimension).unfit() or "")


def test_windows_that_fit() -> None:
    assert Geometry(64, 64, 62, 62, 2, 64).unfit() is None
    assert Geometry(200, 100, 200, 100, 2, 64).unfit() is None, "the grid as one window may be of any size"
    assert Geometry(100, 100, 14, 63, 2, 64).unfit() == "its windows of 14x63 tokens are larger than 62x62"


def test_where_no_configuration_works_it_runs_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: tuning.Problem) -> Config:
        raise Unsupported(f"no configuration of {problem.kernel} works")

    monkeypatch.setattr(attention, "choose", refuse)
    geometry = Geometry(7, 5, 5, 3, 2, 32)
    tensors = random_tensors(geometry, 2, torch.float32)
    with pytest.warns(UserWarning, match="without its kernels, slowly: no configuration of window_attention works"):
        ours = attention._cuda(*tensors, 2, 5, 3, scale_of(geometry))
    assert relative_error(ours, truth(geometry, tensors)) < TOLERANCE[torch.float32]
