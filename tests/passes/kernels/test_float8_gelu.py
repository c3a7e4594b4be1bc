"""The float8 product with GELU in Triton's interpreter, and its operator on a CPU, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import float8_gelu, scaled_launch, tuning
from samopt.passes.kernels.scaled_launch import launch, unfit
from samopt.passes.kernels.scaled_problem import FLOAT8_CANDIDATES, float8_problem
from samopt.passes.kernels.tuning import Config
from tests.attention_problems import poisoned
from tests.numerics import assert_bit_equal, relative_error
from tests.operator_calls import checks
from tests.scaled_layers import Layer, random_layer, truth, without_bias

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

FLOAT8 = torch.float8_e4m3fn
SMALL = Config.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)
SCALE = torch.tensor(1 / 64)
# M, N, K: none a multiple of the blocks; more rows of blocks than are walked together; and inside one block
SIZES = [(1, 48, 80), (3, 16, 16), (37, 80, 48), (150, 48, 16)]


@pytest.fixture(params=[True, False], ids=["descriptors", "pointers"])
def tma(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel reads as on Hopper and later, or as on older GPUs."""
    monkeypatch.setattr(scaled_launch, "has_tma", lambda device: request.param)
    return bool(request.param)


def layer(M: int, N: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return random_layer(M, N, K, dtype, operands=FLOAT8)


def assert_nearest(ours: Tensor, wanted: Tensor, by_interpreter: bool = False) -> None:
    """Asserts that each value is `wanted`, float64, rounded to float8, where float32's rounding may go to either side.

    Triton's interpreter loses a carry of the mantissa into the exponent, so that 15.9 becomes 8, and cuts subnormal
    values off where a GPU rounds them: there values that carry may be half as large, and small ones off by a step.
    """
    assert ours.dtype is FLOAT8
    assert wanted.abs().max() < 448
    error, size = (ours.double() - wanted).abs(), wanted.abs()
    bound = size * 2.0**-4 + 2.0 ** (-9 if by_interpreter else -10) + 1e-6 * size.max()
    if by_interpreter:
        carries = torch.frexp(size * (1 + 2.0**-4)).exponent > torch.frexp(size).exponent
        assert carries.double().mean() < 0.2
        bound = torch.where(carries, bound.maximum(size * 0.51), bound)
    assert (error <= bound).all()


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("persistent", [0, 3])
def test_the_kernel_is_right(sizes: tuple[int, int, int], with_bias: bool, persistent: int) -> None:
    given: Layer = layer(*sizes)
    given = given if with_bias else without_bias(given)
    config = Config.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, PERSISTENT=persistent)
    with poisoned():
        ours = launch(config, *given, True, FLOAT8, scale=SCALE)
    assert ours.shape == sizes[:2]
    assert_nearest(ours, truth(*given, True) / SCALE, by_interpreter=True)


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
def test_the_kernel_keeps_its_precision_until_it_rounds(gelu: bool) -> None:
    given = layer(37, 80, 48)
    assert relative_error(launch(SMALL, *given, gelu, torch.float32), truth(*given, gelu)) < 1e-6
    ours = launch(SMALL, *given, gelu, torch.float32, scale=SCALE)
    assert relative_error(ours, truth(*given, gelu) / SCALE) < 1e-6


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("config", [FLOAT8_CANDIDATES[2], FLOAT8_CANDIDATES[-1]], ids=str)
def test_blocks_larger_than_the_matrices_are_right(config: Config) -> None:
    given = layer(37, 80, 48)
    assert relative_error(launch(config, *given, True, torch.float32), truth(*given, True)) < 1e-6


@interpreted
@pytest.mark.usefixtures("tma")
@pytest.mark.parametrize("persistent", [0, 3])
def test_the_kernel_keeps_within_its_matrices(persistent: int) -> None:
    M, N, K = 37, 80, 48
    x, x_scale, weight, weight_scale, bias = layer(M + 11, N + 16, K)
    x[M:], weight[N:] = torch.nan, torch.nan
    x_scale[M:], weight_scale[N:], bias[N:] = torch.nan, torch.nan, torch.nan
    given = (x[:M], x_scale[:M], weight[:N], weight_scale[:N], bias[:N])
    memory = torch.full((M * N + 64,), torch.nan).to(FLOAT8)
    memory[M * N :] = 7
    config = Config.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, PERSISTENT=persistent)
    launch(config, *given, True, FLOAT8, memory[: M * N].view(M, N), SCALE)
    assert_nearest(memory[: M * N].view(M, N), truth(*given, True) / SCALE, by_interpreter=True)
    assert (memory[M * N :].float() == 7).all()


@interpreted
def test_a_persistent_program_computes_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = layer(37, 80, 48)
    wanted = launch(SMALL, *given, True, torch.float32)
    for count in (1, 2, 100):
        monkeypatch.setattr(scaled_launch, "multiprocessors", lambda device, count=count: count)
        config = Config.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, PERSISTENT=2)
        assert_bit_equal(launch(config, *given, True, torch.float32), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_the_operator_on_a_cpu_is_right(with_bias: bool, dtype: torch.dtype) -> None:
    given: Layer = layer(30, 24, 20, dtype)
    given = given if with_bias else without_bias(given)
    x, x_scale, *others = given
    ours = torch.ops.samopt.float8_gelu(x.view(2, 3, 5, 20), x_scale.view(2, 3, 5, 1), *others, SCALE)
    assert ours.shape == (2, 3, 5, 24)
    assert_nearest(ours.flatten(0, 2), truth(*given, True) / SCALE)


def test_what_is_too_large_saturates_and_nan_stays() -> None:
    x = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [448.0, 448.0], [-448.0, -448.0]]).to(FLOAT8)
    weight, one = torch.ones(1, 2).to(FLOAT8), torch.ones(1)
    ours = torch.ops.samopt.float8_gelu(x, one.expand(4, 1), weight, one, None, torch.tensor(1.0)).float()
    assert ours[0] == 3
    assert ours[1].isnan()
    assert ours[2] == 448
    assert ours[3] == 0
    infinite = torch.ops.samopt.float8_gelu(x, one.expand(4, 1), weight, one / 0, None, torch.tensor(1.0)).float()
    assert infinite[0] == 448


def test_opcheck_without_a_bias() -> None:
    given = without_bias(layer(6, 32, 48))
    torch.library.opcheck(torch.ops.samopt.float8_gelu.default, (*given, SCALE), test_utils=checks("float8_gelu"))


def test_what_does_not_fit_says_why() -> None:
    assert unfit(5120, 1280, FLOAT8) is None
    assert unfit(16, 131072, FLOAT8) is None
    assert unfit(24, 16, FLOAT8) == "its weight is 24x16, and the kernel for 8-bit matrices takes multiples of 16"


# What the operator does on a GPU, in the interpreter.


@interpreted
def test_the_operator_runs_the_kernel_with_the_configuration_for_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[tuning.Problem] = []

    def choose(problem: tuning.Problem) -> Config:
        sought.append(problem)
        return SMALL

    monkeypatch.setattr(float8_gelu, "choose", choose)
    given = layer(150, 80, 48)
    ours = float8_gelu._cuda(given[0].view(3, 50, 48), given[1].view(3, 50, 1), *given[2:], SCALE)
    assert ours.shape == (3, 50, 80)
    assert_nearest(ours.flatten(0, 1), truth(*given, True) / SCALE, by_interpreter=True)
    (problem,) = sought
    assert (problem.shape, problem.dtype) == ((("M", 256), ("N", 80), ("K", 48)), FLOAT8)


@pytest.mark.parametrize("N", [80, 24], ids=["no configuration", "unfit"])
def test_where_the_kernel_cannot_run_the_operator_says_so_and_computes(N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem: tuning.Problem) -> Config:
        raise Unsupported("no configuration works")

    monkeypatch.setattr(float8_gelu, "choose", choose)
    given = layer(37, N, 48)
    reason = "no configuration works" if N == 80 else "its weight is 24x48"
    with pytest.warns(UserWarning, match=f"float8_gelu runs without its kernel, slowly: {reason}"):
        ours = float8_gelu._cuda(*given, SCALE)
    assert_nearest(ours, truth(*given, True) / SCALE)


def test_candidates_fit_and_some_fit_every_gpu() -> None:
    kibibytes = []
    for config in FLOAT8_CANDIDATES:
        block = dict(config.blocks)
        # a persistent program has room for its result beside what it loads
        result = block["BLOCK_M"] * block["BLOCK_N"] if "PERSISTENT" in block else 0
        loaded = (block["BLOCK_M"] + block["BLOCK_N"]) * block["BLOCK_K"] * config.num_stages
        assert (loaded + result) / 1024 * block.get("PERSISTENT", 1) < 227, "of compute capability 9.0"
        kibibytes.append(loaded // 1024)
    assert sum(size < 99 for size in kibibytes) > 3, "of 8.9"


@interpreted
@pytest.mark.usefixtures("cache")
def test_the_tuner_takes_the_right_and_not_the_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    good, wrong = Config.of(BLOCK_M=128, BLOCK_N=32, BLOCK_K=32), Config.of(BLOCK_M=64, BLOCK_N=32, BLOCK_K=32)
    problem = float8_problem(100, 48, 80, torch.device("cpu"))

    def run(config: Config, out: Tensor) -> None:  # without the interpreter's rounding
        out.copy_(problem.reference().to(FLOAT8))
        if config == wrong:
            out[:, 40:] = 0

    monkeypatch.setattr(tuning, "gpu_seconds", lambda run: 1.0)
    few = dataclasses.replace(problem, candidates=(wrong, good), run=run)
    assert tuning.tune(few) == good


def test_the_problem_is_as_wide_as_layers_are_and_saturates_nothing() -> None:
    problem = float8_problem(100, 48, 80, torch.device("cpu"))
    reference = problem.reference()
    assert (reference.dtype, reference.shape, problem.output().dtype) == (torch.float32, (128, 48), FLOAT8)
    assert reference.abs().max() < 448
    assert 0.3 < reference.std() / 32 < 3
