"""Windows on Hopper GPUs: where the kernel is tried, that it compiles for them, and on one, that it is right."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._triton import has_triton_package

from samopt.passes.kernels import hopper_launch
from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.attention_problem import WINDOW_CANDIDATES, problem
from samopt.passes.kernels.hopper_launch import HOPPER_CANDIDATES, LOADER_REGISTERS, hopper_candidates, registers
from samopt.passes.kernels.tuning import Config, relative_error
from tests.attention_problems import launched, random_tensors, scale_of, truth

CUDA = torch.device("cuda", 0)
VIT_H = Geometry(64, 64, 14, 14, 16, 80)
# Shared memory of a multiprocessor, what a program cannot have of it, and its registers.
MEMORY, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
WARPS = 4


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the GPU were a Hopper one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"D": 64}, True),
        ({"D": 96}, True),
        ({"D": 32}, True),
        ({"D": 128}, False),
        ({"rows": 16, "columns": 16}, True),
        ({"rows": 3, "columns": 9}, True),
        ({"rows": 2}, False),
        ({"rows": 17}, False),
        ({"columns": 8}, False),
        ({"columns": 17}, False),
    ],
    ids=str,
)
def test_which_windows_it_is_tried_for(change: dict[str, int], fits: bool) -> None:
    geometry = dataclasses.replace(VIT_H, **change)
    tried = problem(geometry, torch.bfloat16, CUDA).candidates
    assert tuple(tried) == (*(HOPPER_CANDIDATES if fits else ()), *WINDOW_CANDIDATES)


def test_it_is_tried_on_hopper_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper_candidates(VIT_H, torch.device("cpu")) == ()
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert hopper_candidates(VIT_H, CUDA) == ()


@pytest.mark.parametrize("config", HOPPER_CANDIDATES, ids=str)
def test_registers_are_those_that_the_gpu_has(config: Config) -> None:
    options = config.launch_options()
    groups = options["CONSUMERS"] + 1
    threads = groups * WARPS * 32
    each = registers(options["CONSUMERS"], options["maxnreg"])
    taken = (each * (groups - 1) + LOADER_REGISTERS) * WARPS * 32
    assert taken <= options["maxnreg"] * threads <= REGISTERS // options["PROGRAMS"]
    assert taken > 0.95 * REGISTERS / options["PROGRAMS"]  # none are left lying
    assert each % 8 == 0


@pytest.mark.parametrize("config", HOPPER_CANDIDATES, ids=str)
def test_a_buffer_for_queries_is_always_the_same_groups(config: Config) -> None:
    options = config.launch_options()
    assert options["QUERIES"] % options["CONSUMERS"] == 0


@pytest.mark.skipif(not has_triton_package(), reason="needs Triton")
def test_it_compiles_for_hopper_and_fits() -> None:
    # In a process of its own, as Triton interprets in this one.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(compiled) == 6
    for memory, programs, found in compiled:
        assert (memory + RESERVED) * programs <= MEMORY
        assert found == [True, True]


COMPILE = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from samopt.passes.kernels.hopper_launch import HOPPER_CANDIDATES, _layout, registers
from samopt.passes.kernels.hopper_window_attention import hopper_window_attention as kernel

for config in HOPPER_CANDIDATES[:3]:
    options = config.launch_options()
    for second in (0, 16):
        constants = {
            "out_scale": None, "rows": 14, "columns": 14, "D1": 64, "D2": second, "SLOTS": 32, "LAZY": True,
            "REGISTERS": registers(options["CONSUMERS"], options["maxnreg"]),
            **{name: options[name] for name in ("CONSUMERS", "PAIRS", "QUERIES")},
        }
        boxes = {"keys1": (4, 64), "keys2": (4, second or 64), "last1": (2, 64), "last2": (2, second or 64)}
        boxes["terms"] = (4, 32)
        signature = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
        signature |= dict.fromkeys(("padding", "one_hot", "out"), "*bf16")
        for name, (rows, width) in boxes.items():
            signature[name] = f"tensordesc<bf16[1, {rows}, 16, {width}],{_layout(rows, width, torch.bfloat16)!r}>"
        source = GluonASTSource(
            kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        )
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": options["maxnreg"]}
        )
        found = [name in compiled.asm["ptx"] for name in ("wgmma.mma_async", "cp.async.bulk.tensor")]
        print(json.dumps([compiled.metadata.shared, options["PROGRAMS"], found]))
"""


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
CASES = {
    "vit_b": Geometry(64, 64, 14, 14, 12, 64),
    "vit_h": VIT_H,
    "past the grid": Geometry(30, 37, 14, 14, 3, 80),  # a row of windows has two rows of tokens inside
    "past the grid by one": Geometry(29, 29, 14, 14, 2, 64),
    "all inside": Geometry(28, 32, 14, 16, 2, 64),
    "13 rows": Geometry(40, 64, 13, 16, 2, 48),
    "3 rows": Geometry(10, 20, 3, 9, 2, 32),
    "16 rows": Geometry(32, 20, 16, 10, 2, 32),
    "5 rows": Geometry(12, 33, 5, 16, 1, 64),
    "9 rows": Geometry(20, 12, 9, 12, 1, 80),  # one window across
    "less than a box": Geometry(3, 9, 14, 14, 2, 64),
}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("multiprocessors", [None, 1], ids=["all", "one"])  # one: few programs, each with many pairs
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", HOPPER_CANDIDATES, ids=str)
def test_every_configuration_is_right(
    config: Config, case: str, multiprocessors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    if multiprocessors is not None:
        monkeypatch.setattr(hopper_launch, "multiprocessors", lambda device: multiprocessors)
    geometry = CASES[case]
    for dtype, tolerance, factor in ((torch.bfloat16, 1e-2, 1), (torch.bfloat16, 1e-2, 12), (torch.float16, 2e-3, 1)):
        for batch in (1, 3):
            given = random_tensors(geometry, batch, dtype, "cuda", seed=batch, factor=factor)
            try:
                ours = launched(config, geometry, given)
            except OutOfResources:
                assert config is not HOPPER_CANDIDATES[0] or geometry.rows == 16
                pytest.skip("too little shared memory")
            assert relative_error(ours, truth(geometry, given)) < tolerance, (dtype, factor, batch)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", HOPPER_CANDIDATES[:3], ids=str)
def test_runs_give_the_same(config: Config) -> None:
    given = random_tensors(VIT_H, 4, torch.bfloat16, "cuda")
    first = launched(config, VIT_H, given)
    for _ in range(20):
        assert launched(config, VIT_H, given).equal(first)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", HOPPER_CANDIDATES[:3], ids=str)
def test_float8_is_right(config: Config) -> None:
    given = random_tensors(VIT_H, 2, torch.bfloat16, "cuda")
    scale = torch.tensor(1 / 64, device="cuda")
    ours = launch(config, VIT_H, *given, scale_of(VIT_H), out_scale=scale)
    assert ours.dtype == torch.float8_e4m3fn
    assert relative_error(ours.float() * scale, truth(VIT_H, given)) < 0.04


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", HOPPER_CANDIDATES[:3], ids=str)
def test_nan_stays_in_its_image(config: Config) -> None:
    given = random_tensors(VIT_H, 2, torch.bfloat16, "cuda")
    wanted = truth(VIT_H, given)
    given[0][1, 0, 0] = torch.nan
    ours = launched(config, VIT_H, given)
    assert ours[1, 0, 0].isnan().all()
    assert relative_error(ours[0], wanted[0]) < 1e-2
