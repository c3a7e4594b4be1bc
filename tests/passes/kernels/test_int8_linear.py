"""The int8 product in Triton's interpreter, and its operator on a CPU, against NumPy's int64 and float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import int8_linear, scaled_launch, tuning
from samopt.passes.kernels.scaled_launch import launch, unfit
from samopt.passes.kernels.scaled_problem import INT8_CANDIDATES, SOURCES, int8_problem, rows_of
from samopt.passes.kernels.tuning import Config
from tests.attention_problems import poisoned
from tests.numerics import assert_bit_equal, relative_error
from tests.scaled_layers import Layer, random_layer, truth, without_bias

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 8e-3}  # the interpreter cuts bfloat16 off
SMALL = Config.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)
# M, N, K: none a multiple of the blocks; more rows of blocks than are walked together; and inside one block
SIZES = [(1, 48, 80), (3, 16, 16), (37, 80, 48), (150, 48, 16)]


@pytest.fixture(params=[True, False], ids=["descriptors", "pointers"])
def tma(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel reads as on Hopper and later, or as on older GPUs."""
    monkeypatch.setattr(scaled_launch, "has_tma", lambda device: request.param)
    return bool(request.param)


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_right(sizes: tuple[int, int, int], with_bias: bool, gelu: bool, dtype: torch.dtype) -> None:
    given: Layer = random_layer(*sizes, dtype)
    given = given if with_bias else without_bias(given)
    with poisoned():
        ours = launch(SMALL, *given, gelu, dtype)
    assert (ours.shape, ours.dtype) == (sizes[:2], dtype)
    assert relative_error(ours, truth(*given, gelu)) < TOLERANCE[dtype]


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("config", [INT8_CANDIDATES[0], INT8_CANDIDATES[-2]], ids=str)
def test_blocks_larger_than_the_matrices_are_right(config: Config) -> None:
    given = random_layer(37, 80, 48)
    assert relative_error(launch(config, *given, True, torch.float32), truth(*given, True)) < 5e-7


@interpreted
@pytest.mark.usefixtures("tma")
def test_the_kernel_keeps_within_its_matrices() -> None:
    (M, N, K), dtype = (37, 80, 48), torch.float32
    x, x_scale, weight, weight_scale, bias = random_layer(M + 11, N + 16, K)
    x[M:], weight[N:] = 127, 127
    x_scale[M:], weight_scale[N:], bias[N:] = torch.nan, torch.nan, torch.nan
    given = (x[:M], x_scale[:M], weight[:N], weight_scale[:N], bias[:N])
    memory = torch.full((M * N + 64,), torch.nan)
    memory[M * N :] = 7
    launch(SMALL, *given, False, dtype, memory[: M * N].view(M, N))
    assert relative_error(memory[: M * N].view(M, N), truth(*given)) < TOLERANCE[dtype]
    assert (memory[M * N :] == 7).all()


def kernel(given: Layer) -> Tensor:
    return launch(SMALL, *given, False, torch.float32)


def operator(given: Layer) -> Tensor:
    return torch.ops.samopt.int8_linear(*given, False, torch.float32)


WAYS = pytest.mark.parametrize("way", [pytest.param(kernel, marks=interpreted), operator], ids=["kernel", "operator"])


@WAYS
@pytest.mark.usefixtures("tma")
def test_the_largest_sums_are_exact(way: Callable[[Layer], Tensor]) -> None:
    K = 8192
    x, weight = torch.full((4, K), -128, dtype=torch.int8), torch.full((16, K), -128, dtype=torch.int8)
    x[1], weight[1] = 127, 127
    x[2, ::3], weight[2, ::5] = 127, 1
    x[3, 0], weight[3, 1] = -127, -127  # sums that float32 cannot hold on the way
    sums = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert sums.max() == 2**27
    assert (sums.astype(np.float32) != sums).any()
    ours = way((x, torch.ones(4, 1), weight, torch.ones(16), None))
    assert_bit_equal(ours, torch.from_numpy(sums.astype(np.float32)))


@WAYS
@pytest.mark.usefixtures("tma")
def test_what_is_zero_leaves_the_bias(way: Callable[[Layer], Tensor]) -> None:
    x, x_scale, weight, weight_scale, bias = random_layer(5, 32, 48)
    x[1], x_scale[1] = 0, 0
    x[2] = 0
    x_scale[3] = 0
    weight[4], weight_scale[4] = 0, 0
    ours = way((x, x_scale, weight, weight_scale, bias))
    assert_bit_equal(ours[1:4], bias.expand(3, -1))
    assert_bit_equal(ours[:, 4], bias[4].expand(5))
    assert relative_error(ours, truth(x, x_scale, weight, weight_scale, bias)) < TOLERANCE[torch.float32]


@interpreted
@pytest.mark.usefixtures("tma")
def test_kernel_and_operator_agree() -> None:
    given = random_layer(37, 80, 48)
    assert_bit_equal(kernel(given), operator(given))
    ours, wanted = launch(SMALL, *given, True, torch.float32), torch.ops.samopt.int8_linear(*given, True, torch.float32)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_the_operator_on_a_cpu_is_right(with_bias: bool, gelu: bool, dtype: torch.dtype) -> None:
    given: Layer = random_layer(30, 24, 20, torch.float64)
    given = given if with_bias else without_bias(given)
    x, x_scale, *others = given
    ours = torch.ops.samopt.int8_linear(x.view(2, 3, 5, 20), x_scale.view(2, 3, 5, 1), *others, gelu, dtype)
    assert (ours.shape, ours.dtype) == ((2, 3, 5, 24), dtype)
    assert relative_error(ours.flatten(0, 2), truth(*given, gelu)) < TOLERANCE[dtype]


def test_opcheck_without_a_bias() -> None:
    given = without_bias(random_layer(6, 32, 48))
    torch.library.opcheck(torch.ops.samopt.int8_linear.default, (*given, True, torch.bfloat16))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((3840, 1280), None),
        ((16, 16), None),
        ((24, 16), "its weight is 24x16, and the kernel for 8-bit matrices takes multiples of 16"),
        ((16, 40), "its weight is 16x40, and the kernel for 8-bit matrices takes multiples of 16"),
        ((16, 131056), None),
        ((16, 131072), "a sum over its 131072 inputs can be too large for int32"),
    ],
    ids=str,
)
def test_what_does_not_fit_says_why(sizes: tuple[int, int], reason: str | None) -> None:
    assert unfit(*sizes, torch.int8) == reason


# What the operator does on a GPU, in the interpreter.


@interpreted
def test_the_operator_runs_the_kernel_with_the_configuration_for_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[tuning.Problem] = []

    def choose(problem: tuning.Problem) -> Config:
        sought.append(problem)
        return SMALL

    monkeypatch.setattr(int8_linear, "choose", choose)
    given = random_layer(150, 80, 48)
    ours = int8_linear._cuda(given[0].view(3, 50, 48), given[1].view(3, 50, 1), *given[2:], True, torch.float16)
    assert (ours.shape, ours.dtype) == ((3, 50, 80), torch.float16)
    assert relative_error(ours.flatten(0, 1), truth(*given, True)) < TOLERANCE[torch.float16]
    (problem,) = sought
    assert (problem.shape, problem.dtype) == ((("M", 256), ("N", 80), ("K", 48), ("gelu", 1)), torch.float16)


@pytest.mark.parametrize("N", [80, 24], ids=["no configuration", "unfit"])
def test_where_the_kernel_cannot_run_the_operator_says_so_and_computes(N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem: tuning.Problem) -> Config:
        raise Unsupported("no configuration works")

    monkeypatch.setattr(int8_linear, "choose", choose)
    given = random_layer(37, N, 48)
    reason = "no configuration works" if N == 80 else "its weight is 24x48"
    with pytest.warns(UserWarning, match=f"int8_linear runs without its kernel, slowly: {reason}"):
        ours = int8_linear._cuda(*given, True, torch.float32)
    assert relative_error(ours, truth(*given, True)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("rows", "wanted"), [(1, 128), (128, 128), (129, 256), (4096, 4096), (4900, 8192), (12288, 16384), (10**6, 32768)]
)
def test_problems_are_shared_by_batches(rows: int, wanted: int) -> None:
    assert rows_of(rows) == wanted
    problem = int8_problem(rows, 48, 32, False, torch.bfloat16, torch.device("cpu"))
    assert dict(problem.shape)["M"] == wanted
    assert problem.output().shape == (wanted, 48)


def test_some_candidate_fits_every_gpu() -> None:
    kibibytes = []
    for config in INT8_CANDIDATES:
        block = dict(config.blocks)
        kibibytes.append((block["BLOCK_M"] + block["BLOCK_N"]) * block["BLOCK_K"] * config.num_stages // 1024)
    assert max(kibibytes) < 227, "of compute capability 9.0"
    assert sum(size < 99 for size in kibibytes) > 3, "of 8.6 and 8.9"


@interpreted
@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("cache")
def test_the_tuner_takes_the_right_and_not_the_wrong(
    dtype: torch.dtype, gelu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, wrong = Config.of(BLOCK_M=128, BLOCK_N=32, BLOCK_K=32), Config.of(BLOCK_M=64, BLOCK_N=32, BLOCK_K=32)
    problem = int8_problem(100, 48, 80, gelu, dtype, torch.device("cpu"))

    def run(config: Config, out: Tensor) -> None:
        problem.run(config, out)
        if config == wrong:
            out[:, 24:] = 0

    monkeypatch.setattr(tuning, "gpu_seconds", lambda run: 1.0)
    few = dataclasses.replace(problem, candidates=(wrong, good), run=run)
    assert tuning.tune(few) == good
    reference = problem.reference()
    assert reference.dtype == torch.float32
    assert 0.3 < reference.std() < 3, "as wide as layers' results are"


def test_the_key_names_all_that_the_configuration_depends_on() -> None:
    def key(M: int = 4096, N: int = 48, gelu: bool = False, dtype: torch.dtype = torch.bfloat16) -> str:
        return int8_problem(M, N, 32, gelu, dtype, torch.device("cpu")).key()

    source = tuning.source_hash(SOURCES)
    assert key() == f"int8_linear(M=4096,N=48,K=32,gelu=0) bfloat16 on cpu, source {source}"
    assert len({key(), key(N=64), key(gelu=True), key(dtype=torch.float16), key(M=4097)}) == 5
    assert key(M=4097) == key(M=8192)
