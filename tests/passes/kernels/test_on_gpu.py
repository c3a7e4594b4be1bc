"""The kernels as a GPU runs them: real shapes in half precision, against SAM's own modules in float64."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels import (
    attention,
    cublaslt,
    float8_gelu,
    image_to_token,
    int8_linear,
    linear,
    scaled_problem,
    tuning,
)
from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.attention_problem import problem
from samopt.passes.kernels.cublaslt import Product
from samopt.passes.kernels.scaled_launch import launch as launch_scaled
from samopt.passes.kernels.scaled_reference import scaled_linear
from samopt.passes.kernels.tuning import Config
from tests.attention_problems import Tensors, launched, random_tensors, scale_of, truth
from tests.image_token_problems import EPS, random_problem
from tests.image_token_problems import truth as image_token_truth
from tests.numerics import relative_error, tensors
from tests.operator_calls import OPERATORS, arguments, checks, operator
from tests.scaled_layers import Layer, random_layer, without_bias
from tests.scaled_layers import truth as layer_truth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

needs_float8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
)

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}

# Grid, window, heads and their dimension.
VIT_B = {"vit_b, windows": Geometry(64, 64, 14, 14, 12, 64), "vit_b, global": Geometry(64, 64, 64, 64, 12, 64)}
VIT_H = {"vit_h, windows": Geometry(64, 64, 14, 14, 16, 80), "vit_h, global": Geometry(64, 64, 64, 64, 16, 80)}
ODD = {
    "past the grid on both sides": Geometry(37, 50, 9, 20, 2, 96),
    "slightly past the grid": Geometry(16, 16, 14, 14, 2, 32),
    "all inside": Geometry(40, 40, 20, 20, 2, 128),
    "rows of three chunks": Geometry(20, 150, 20, 150, 2, 32),
    "odd global": Geometry(37, 50, 37, 50, 2, 96),
    "small global": Geometry(16, 16, 16, 16, 2, 128),
}
EVERY = {**VIT_B, **VIT_H, **ODD}


@functools.cache
def configuration(geometry: Geometry, dtype: torch.dtype) -> Config:
    """The configuration that is shipped for this GPU; else the first candidate that the GPU can launch. Found once, so
    that nothing is sought while a CUDA graph is captured."""
    from triton.runtime.errors import OutOfResources

    sought = problem(geometry, dtype, torch.device("cuda", torch.cuda.current_device()))
    if (shipped := tuning._stored(sought, tuning.SHIPPED, sought.versioned_key())) is not None:
        return shipped
    for config in sought.candidates:
        try:
            launched(config, geometry, random_tensors(geometry, 1, dtype, "cuda"))
        except OutOfResources:
            continue
        return config
    raise AssertionError(f"no candidate fits the GPU's memory for {geometry}")


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


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes what `configuration` says: seeking the best one takes a while."""

    def choose(sought: tuning.Problem) -> Config:
        return configuration(Geometry(**dict(sought.shape)), sought.dtype)

    monkeypatch.setattr(attention, "choose", choose)
    monkeypatch.setattr(
        int8_linear, "choose", lambda sought: int8_configuration(bool(dict(sought.shape)["gelu"]), sought.dtype)
    )
    monkeypatch.setattr(float8_gelu, "choose", lambda sought: float8_configuration())
    monkeypatch.setattr(image_to_token, "choose", lambda sought: token_configuration(sought.dtype))


@functools.cache
def int8_configuration(gelu: bool, dtype: torch.dtype) -> Config:
    device = torch.device("cuda", torch.cuda.current_device())
    return first_that_fits(scaled_problem.int8_problem(128, 128, 128, gelu, dtype, device))


@functools.cache
def float8_configuration() -> Config:
    return first_that_fits(
        scaled_problem.float8_problem(128, 128, 128, torch.device("cuda", torch.cuda.current_device()))
    )


@functools.cache
def token_configuration(dtype: torch.dtype) -> Config:
    device = torch.device("cuda", torch.cuda.current_device())
    return first_that_fits(image_to_token.problem(1, 128, 256, 8, 8, dtype, device))


def first_that_fits(sought: tuning.Problem) -> Config:
    """The first candidate that the GPU can launch, which does not depend on sizes."""
    from triton.runtime.errors import OutOfResources

    for config in sought.candidates:
        try:
            sought.run(config, sought.output())
        except OutOfResources:
            continue
        return config
    raise AssertionError("no candidate fits the GPU's memory")


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


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("rearranged", [False, True], ids=["contiguous", "rearranged"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_float8 if name.startswith("float8") else ()) for name in OPERATORS]
)
def test_opcheck(name: str, rearranged: bool) -> None:
    given = arguments(name, torch.bfloat16, "cuda", rearranged)
    torch.library.opcheck(operator(name), given, test_utils=checks(name))
    for ours, cpu in zip(*(tensors(operator(name)(*args)) for args in (given, on_the_cpu(given))), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (cpu.shape, cpu.dtype, cpu.stride())
        assert relative_error(ours.cpu(), cpu) < 2 * TOLERANCE[torch.bfloat16]


def on_the_cpu(given: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(x.cpu() if isinstance(x, Tensor) else x for x in given)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [768, 1280, 96])
def test_layer_norm_is_right(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 2, 64, 64, width, device="cuda") * 3 + 1).to(dtype)
    weight, bias = torch.randn(2, width, device="cuda").to(dtype)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)

    assert relative_error(torch.ops.samopt.layer_norm(x, weight, bias, 1e-6), norm(x)) < TOLERANCE[dtype] / 2
    ours = torch.ops.samopt.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert relative_error(ours, norm(x.double() + residual.double())) < TOLERANCE[dtype] / 2
    total, ours = torch.ops.samopt.sum_layer_norm(x, residual, x.flip(0), weight, bias, 1e-6)
    wanted = x.double() + residual.double() + x.flip(0).double()
    assert relative_error(total, wanted) < TOLERANCE[dtype] / 2
    assert relative_error(ours, norm(wanted)) < TOLERANCE[dtype] / 2


LINEAR_SHAPES = [(3 * 4096, 3072, 768), (4900, 1280, 5120), (7, 576, 192)]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), LINEAR_SHAPES)
def test_linear_is_right(M: int, N: int, K: int, dtype: torch.dtype, biased: bool, gelu: bool) -> None:
    x, bias = torch.randn(M, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
    weight = (torch.randn(N, K, device="cuda") * K**-0.5).to(dtype)
    wanted = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    wanted = F.gelu(wanted) if gelu else wanted
    given = weight, bias if biased else None, gelu
    assert relative_error(torch.ops.samopt.linear(x, *given), wanted) < TOLERANCE[dtype]
    every_second = torch.stack([bias, bias + 1], 1)[:, 0] if biased else None
    assert relative_error(torch.ops.samopt.linear(x, weight, every_second, gelu), wanted) < TOLERANCE[dtype]
    shifted = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(M, K).copy_(x)
    assert relative_error(torch.ops.samopt.linear(shifted, *given), wanted) < TOLERANCE[dtype], "not aligned"


def test_linear_refuses_what_pytorch_refuses() -> None:
    x, weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((64, 32), (48, 32), (48,)))
    for other in ((weight[:, :16], bias), (weight, bias.float()), (weight, bias[:16]), (weight.cpu(), bias)):
        with pytest.raises(RuntimeError):
            torch.ops.samopt.linear(x, *other, False)


@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize(("M", "N", "K"), LINEAR_SHAPES)
def test_every_proposal_of_cublaslt_is_right_for_its_own_rows_and_for_more(M: int, N: int, K: int, gelu: bool) -> None:
    few = Product(linear.rows_of(M) // 2, N, K, torch.bfloat16, True, gelu, torch.device("cuda", 0))
    known = cublaslt.proposals(few)
    assert known
    for product in (few, dataclasses.replace(few, M=M)):
        x, bias = torch.randn(product.M, K, device="cuda").bfloat16(), torch.randn(N, device="cuda").bfloat16()
        weight = (torch.randn(N, K, device="cuda") * K**-0.5).bfloat16()
        wanted = F.linear(x.double(), weight.double(), bias.double())
        wanted = F.gelu(wanted) if gelu else wanted
        for place, proposal in enumerate(known):
            if (workspace := cublaslt.workspace_for(product, few, place)) is not None:
                out = torch.full((product.M, N), torch.nan, device="cuda", dtype=torch.bfloat16)
                cublaslt.multiply(product, proposal.algorithm, workspace, x, weight, bias, out)
                assert relative_error(out, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("K", "N", "gelu"),
    [
        (inner * width, outer * width, gelu)
        for width in (192, 768, 1280)
        for inner, outer, gelu in ((1, 3, False), (1, 1, False), (1, 4, True), (4, 1, False))
    ],
)
def test_int8_linear_is_right(K: int, N: int, gelu: bool, dtype: torch.dtype) -> None:
    for M in (3 * 4096, 4900, 1):
        layer = random_layer(M, N, K, dtype, "cuda")
        for given in (layer, without_bias(layer)):
            ours = torch.ops.samopt.int8_linear(*given, gelu, dtype)
            assert (ours.shape, ours.dtype) == ((M, N), dtype)
            assert relative_error(ours, layer_truth(*given, gelu)) < TOLERANCE[dtype] / 2, M


@pytest.mark.parametrize("gelu", [False, True], ids=["no activation", "GELU"])
@pytest.mark.parametrize("config", scaled_problem.INT8_CANDIDATES, ids=str)
def test_every_configuration_of_int8_linear_is_right_to_the_last_rounding(config: Config, gelu: bool) -> None:
    from triton.runtime.errors import OutOfResources

    given, out = random_layer(333, 208, 1296, torch.float32, "cuda"), torch.full((333, 208), torch.nan, device="cuda")
    try:
        launch_scaled(config, *given, gelu, torch.float32, out)
    except OutOfResources as failure:
        pytest.skip(str(failure))
    assert relative_error(out, layer_truth(*given, gelu)) < 1e-6
    torch.testing.assert_close(out, scaled_linear(*given, gelu), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("sizes", [(333, 208, 1296), (3, 24, 20)], ids=str)
def test_int8_linear_without_its_kernel_is_right(sizes: tuple[int, int, int]) -> None:
    given = random_layer(*sizes, torch.float32, "cuda")
    assert relative_error(scaled_linear(*given, True), layer_truth(*given, True)) < 1e-6


@pytest.mark.usefixtures("untuned")
def test_int8_linear_runs_in_a_cuda_graph() -> None:
    def call() -> Tensor:
        return torch.ops.samopt.int8_linear(*given, True, torch.bfloat16)

    given = random_layer(4096, 768, 768, torch.bfloat16, "cuda")
    before = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = call()
    for tensor, new in zip(given, random_layer(4096, 768, 768, torch.bfloat16, "cuda", seed=2), strict=True):
        tensor.copy_(new)
    graph.replay()
    assert relative_error(after, layer_truth(*given, True)) < TOLERANCE[torch.bfloat16]
    assert relative_error(after, before) > 0.5


def test_the_tuner_finds_a_right_one_for_int8_linear(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_found", {})
    given = random_layer(4096, 768, 192, torch.bfloat16, "cuda")
    ours = torch.ops.samopt.int8_linear(*given, True, torch.bfloat16)
    assert relative_error(ours, layer_truth(*given, True)) < TOLERANCE[torch.bfloat16]
    (key,) = json.loads(cache.read_text(encoding="utf-8"))
    assert key.startswith("int8_linear(M=4096,N=768,K=192,gelu=1) bfloat16 on ")


FLOAT8_SCALE = 1 / 16  # of the results: up to about 6, so that they become 96


def float8_layer(M: int, N: int, K: int, seed: int = 1) -> Layer:
    return random_layer(M, N, K, torch.bfloat16, "cuda", seed, torch.float8_e4m3fn)


def call_float8(given: Layer) -> Tensor:
    return torch.ops.samopt.float8_gelu(*given, torch.tensor(FLOAT8_SCALE, device="cuda"))


def assert_rounded(ours: Tensor, given: Layer) -> None:
    """Asserts that float8 is right: to its rounding, and to what the matrix units lose of the sum before."""
    wanted = layer_truth(*given, True) / FLOAT8_SCALE
    assert ours.dtype == torch.float8_e4m3fn
    assert relative_error(ours, wanted) < 0.04, "0.027 for many values, somewhat more or less for few"
    error = (ours.double() - wanted).abs()
    assert (error <= wanted.abs() * 2.0**-4 + 2.0**-10 + 3e-3 * wanted.abs().max()).all()


@needs_float8
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize(("N", "K"), [(4 * width, width) for width in (192, 768, 1280)], ids=str)
def test_float8_gelu_is_right(N: int, K: int) -> None:
    for M in (3 * 4096, 4900, 1):
        given = float8_layer(M, N, K)
        for one in (given, without_bias(given)):
            ours = call_float8(one)
            assert ours.shape == (M, N)
            assert_rounded(ours, one)


@needs_float8
@pytest.mark.parametrize("config", scaled_problem.FLOAT8_CANDIDATES, ids=str)
def test_every_configuration_of_float8_gelu_is_right(config: Config) -> None:
    from triton.runtime.errors import OutOfResources

    # the last one has more blocks than any GPU has programs at once
    for M, N, K in ((333, 208, 1296), (17, 16, 16), (4900, 3072, 768)):
        given, scale = float8_layer(M, N, K), torch.tensor(FLOAT8_SCALE, device="cuda")
        out = torch.full((M, N), torch.nan, device="cuda").to(torch.float8_e4m3fn)
        try:
            launch_scaled(config, *given, True, torch.float8_e4m3fn, out, scale)
        except OutOfResources as failure:
            pytest.skip(str(failure))
        assert_rounded(out, given)


@needs_float8
@pytest.mark.parametrize("sizes", [(333, 208, 1296), (3, 24, 20)], ids=str)
def test_float8_gelu_without_its_kernel_is_right(sizes: tuple[int, int, int]) -> None:
    given = float8_layer(*sizes)
    assert relative_error(scaled_linear(*given, True), layer_truth(*given, True)) < 3e-3


@needs_float8
@pytest.mark.usefixtures("untuned")
def test_float8_gelu_saturates_and_keeps_nan() -> None:
    M, N, K = 300, 208, 64
    x, weight = (torch.ones(rows, K, device="cuda").to(torch.float8_e4m3fn) for rows in (M, N))
    x_scale = torch.full((M, 1), 1 / K, device="cuda")
    x_scale[1], x_scale[2], x_scale[3], x_scale[4] = 1e6, -1e6, torch.inf, torch.nan
    weight_scale, scale = torch.ones(N, device="cuda"), torch.tensor(1 / 256, device="cuda")
    ours = torch.ops.samopt.float8_gelu(x, x_scale, weight, weight_scale, None, scale).float()
    assert (ours[0] == 208).all()  # 215.3 = 256 gelu(1), and the next one is 224
    assert (ours[1] == 448).all()
    assert (ours[2] == 0).all()
    assert (ours[3] == 448).all()
    assert ours[4].isnan().all()


@needs_float8
@pytest.mark.usefixtures("untuned")
def test_float8_gelu_runs_in_a_cuda_graph() -> None:
    given, scale = float8_layer(4096, 3072, 768), torch.tensor(FLOAT8_SCALE, device="cuda")
    before = torch.ops.samopt.float8_gelu(*given, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = torch.ops.samopt.float8_gelu(*given, scale)
    for tensor, new in zip(given, float8_layer(4096, 3072, 768, seed=2), strict=True):
        assert tensor is not None
        assert new is not None
        tensor.copy_(new)
    graph.replay()
    assert_rounded(after, given)
    assert relative_error(after.float(), before.float()) > 0.5


@needs_float8
def test_the_tuner_finds_a_right_one_for_float8_gelu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_found", {})
    given = float8_layer(4096, 768, 192)
    assert_rounded(call_float8(given), given)
    (key,) = json.loads(cache.read_text(encoding="utf-8"))
    assert key.startswith("float8_gelu(M=4096,N=768,K=192) float8_e4m3fn on ")


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


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_float8)], ids=str)
@pytest.mark.parametrize("width", [96, 768, 1280, 3072, 5120])
def test_quantised_rows_are_those_of_a_cpu_but_for_a_few(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 777, width, device="cuda") * 3 + 1).bfloat16()
    weight, bias = torch.randn(2, width, device="cuda").bfloat16()
    x[3] = 0
    for name, given in (
        ("quantize_rows", (x, dtype, False)),
        ("quantize_rows", (x, dtype, True)),
        ("layer_norm_rows", (x, residual, weight, bias, 1e-6, dtype)),
        ("layer_norm_rows", (x, None, weight, bias, 1e-6, dtype)),
        ("sum_layer_norm_rows", (x, residual, x.flip(0), weight, bias, 1e-6, dtype)),
    ):
        *total, values, scales = operator(name)(*given)
        *added, expected, wanted = operator(name)(*on_the_cpu(given))
        assert all(relative_error(mine.cpu(), other) < 1e-3 for mine, other in zip(total, added, strict=True))
        torch.testing.assert_close(scales.cpu(), wanted, rtol=2e-6, atol=0)
        assert (values.cpu().float() != expected.float()).float().mean() < 5e-3
        assert relative_error(values.cpu().float(), expected.float()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_float8)], ids=str)
def test_rows_that_are_not_finite_are_not_lost(dtype: torch.dtype) -> None:
    x = torch.randn(4, 1280, device="cuda")
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    _, scales = torch.ops.samopt.quantize_rows(x, dtype)
    assert scales.flatten().isfinite().tolist() == [True, False, False, True]


@needs_float8
@pytest.mark.parametrize("per_row", [True, False], ids=["a scale a row", "one scale"])
@pytest.mark.parametrize(("K", "N"), [(1280, 3840), (1280, 1280), (5120, 1280), (192, 576)])
def test_float8_linear_is_right(K: int, N: int, per_row: bool) -> None:
    x, x_scale = torch.ops.samopt.quantize_rows(torch.randn(2, 700, K, device="cuda"), torch.float8_e4m3fn)
    weight, weight_scale = torch.ops.samopt.quantize_rows(torch.randn(N, K, device="cuda"), torch.float8_e4m3fn)
    if not per_row:
        x_scale = torch.tensor(1 / 64, device="cuda").expand(2, 700, 1)
    bias = torch.randn(N, device="cuda").bfloat16()
    ours = torch.ops.samopt.float8_linear(x, x_scale, weight, weight_scale[:, 0], bias, False, torch.bfloat16)
    wanted = F.linear(x.double() * x_scale, weight.double() * weight_scale, bias.double())
    assert (ours.shape, ours.dtype) == ((2, 700, N), torch.bfloat16)
    assert relative_error(ours, wanted) < 5e-3


# Image tokens, their channels and the inner ones: of Meta's decoder, and of one where nothing is a multiple of a block.
DECODERS = {"Meta's": (4096, 256, 128), "odd": (1001, 64, 48)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 64])
@pytest.mark.parametrize("case", DECODERS)
def test_every_configuration_of_image_to_token_is_right(case: str, tokens: int, dtype: torch.dtype) -> None:
    from triton.runtime.errors import OutOfResources

    fitting = 0
    for images in (1, 5):
        given = random_problem(5, *DECODERS[case], tokens, images=images, dtype=dtype, device="cuda")
        wanted = image_token_truth(given)
        for config in image_to_token.CANDIDATES:
            out = torch.full(wanted.shape, torch.nan, dtype=dtype, device="cuda")
            try:
                image_to_token.launch(config, given, 8, EPS, out)
            except OutOfResources:
                continue
            assert relative_error(out, wanted) < TOLERANCE[dtype], config
            fitting += 1
    assert fitting


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [7, 65])
def test_image_to_token_errs_no_more_than_pytorch(tokens: int, dtype: torch.dtype, cache: Path) -> None:
    """As the tuner has it, and with more tokens than the kernel takes."""
    given = random_problem(16, *DECODERS["Meta's"], tokens, dtype=dtype, device="cuda")
    wanted = image_token_truth(given)
    ours = torch.ops.samopt.image_to_token(*given, 8, EPS)
    theirs = image_to_token.by_pytorch(given, 8, EPS)
    assert (ours.shape, ours.dtype) == (wanted.shape, dtype)
    assert relative_error(ours, wanted) <= 1.05 * relative_error(theirs, wanted)


@pytest.mark.usefixtures("untuned")
def test_image_to_token_runs_in_a_cuda_graph() -> None:
    given = random_problem(4, *DECODERS["Meta's"], dtype=torch.bfloat16, device="cuda")
    before = torch.ops.samopt.image_to_token(*given, 8, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = torch.ops.samopt.image_to_token(*given, 8, EPS)
    for tensor, new in zip(
        given, random_problem(4, *DECODERS["Meta's"], dtype=torch.bfloat16, device="cuda", seed=2), strict=True
    ):
        tensor.copy_(new)
    graph.replay()
    assert relative_error(after, image_token_truth(given)) < TOLERANCE[torch.bfloat16]
    assert relative_error(after, before) > 0.5
