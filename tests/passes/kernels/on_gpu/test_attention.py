"""Attention as a GPU runs it: real shapes in half precision, against SAM's own modules in float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samopt.passes.kernels import tuning
from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.attention_problem import problem
from tests.attention_problems import Tensors, launched, random_tensors, scale_of, truth
from tests.numerics import relative_error
from tests.passes.kernels.on_gpu.configurations import EVERY, TOLERANCE, VIT_B, VIT_H, configuration, needs_float8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in EVERY]
    + [(case, torch.float16) for case in (*VIT_B, *VIT_H, "past the grid on both sides", "rows of three chunks")],
    ids=str,
)
def test_attention_is_right(case: str, dtype: torch.dtype) -> None:
    geometry = EVERY[case]
    config = configuration(geometry, dtype)
    for batch in (1, 3):
        given = random_tensors(geometry, batch, dtype, "cuda")
        ours = launched(config, geometry, given)
        assert ours.dtype == dtype
        assert relative_error(ours, truth(geometry, given)) < TOLERANCE[dtype], batch


@pytest.mark.parametrize("case", ["vit_h, windows", "vit_h, global", "rows of three chunks"])
def test_attention_writes_all_of_a_given_output(case: str) -> None:
    geometry, dtype = EVERY[case], torch.bfloat16
    given = random_tensors(geometry, 3, dtype, "cuda")
    out = torch.full_like(
        given[0][..., : geometry.heads * geometry.D], torch.nan, memory_format=torch.contiguous_format
    )
    launch(configuration(geometry, dtype), geometry, *given, scale_of(geometry), out)
    assert relative_error(out, truth(geometry, given)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [*VIT_B, "vit_h, global"])
def test_attention_is_right_where_the_sum_of_the_first_maximum_overflows(case: str, dtype: torch.dtype) -> None:
    geometry = EVERY[case]
    given = random_tensors(geometry, 1, dtype, "cuda", factor=12)
    assert (
        relative_error(launched(configuration(geometry, dtype), geometry, given), truth(geometry, given))
        < (TOLERANCE[dtype])
    )


@pytest.mark.parametrize("case", ["vit_b, windows", "vit_b, global", "rows of three chunks"])
def test_nan_stays_in_its_image(case: str) -> None:
    geometry, dtype = EVERY[case], torch.bfloat16
    given = random_tensors(geometry, 2, dtype, "cuda")
    wanted = truth(geometry, given)
    given[0][1, 0, 0] = torch.nan
    ours = launched(configuration(geometry, dtype), geometry, given)
    assert ours[1, 0, 0].isnan().all()
    assert relative_error(ours[0], wanted[0]) < TOLERANCE[dtype]


def call(geometry: Geometry, given: Tensors) -> Tensor:
    return torch.ops.samopt.attention(*given, geometry.heads, geometry.rows, geometry.columns, scale_of(geometry))


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("case", ["vit_b, windows", "vit_b, global"])
def test_the_operator_runs_the_kernels_also_in_a_cuda_graph(case: str) -> None:
    geometry, dtype = EVERY[case], torch.bfloat16
    given = random_tensors(geometry, 2, dtype, "cuda")
    before = call(geometry, given)
    assert relative_error(before, truth(geometry, given)) < TOLERANCE[dtype]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = call(geometry, given)
    for tensor, new in zip(given, random_tensors(geometry, 2, dtype, "cuda", seed=2), strict=True):
        tensor.copy_(new)
    graph.replay()
    assert relative_error(after, truth(geometry, given)) < TOLERANCE[dtype]
    assert relative_error(after, before) > 0.5


@pytest.mark.parametrize(
    "index",
    [0, pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
    ids=["the current GPU", "another GPU"],
)
@pytest.mark.parametrize("case", ["slightly past the grid", "small global"])
def test_the_tuner_finds_a_right_one(case: str, index: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_found", {})
    geometry, dtype, device = EVERY[case], torch.bfloat16, torch.device("cuda", index)
    sought = problem(geometry, dtype, device)
    few = dataclasses.replace(sought, candidates=sought.candidates[-3:])
    config = tuning.choose(few)
    assert config in few.candidates
    assert list(json.loads(cache.read_text(encoding="utf-8"))) == [few.versioned_key()]
    assert torch.cuda.get_device_name(device) in few.key()
    given = random_tensors(geometry, 1, dtype, f"cuda:{index}")
    assert relative_error(call(geometry, given), truth(geometry, given)) < TOLERANCE[dtype]


@needs_float8
@pytest.mark.parametrize("case", ["vit_h, windows", "vit_h, global", "past the grid on both sides"])
def test_attention_in_float8_is_right(case: str) -> None:
    geometry, dtype = EVERY[case], torch.bfloat16
    given = random_tensors(geometry, 2, dtype, "cuda")
    scale = torch.tensor(1 / 64, device="cuda")
    ours = launch(configuration(geometry, dtype), geometry, *given, scale_of(geometry), out_scale=scale)
    assert ours.dtype == torch.float8_e4m3fn
    assert relative_error(ours.float() * scale, truth(geometry, given)) < 0.04
