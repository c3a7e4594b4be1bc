"""Linear layers as a GPU runs them: in half precision, int8 and float8, against float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.passes.kernels import cublaslt, linear, scaled_problem, tuning
from samopt.passes.kernels.cublaslt import Product
from samopt.passes.kernels.scaled_launch import launch as launch_scaled
from samopt.passes.kernels.scaled_reference import scaled_linear
from samopt.passes.kernels.tuning import Config
from tests.numerics import relative_error
from tests.passes.kernels.on_gpu.configurations import TOLERANCE, needs_float8
from tests.scaled_layers import Layer, random_layer, without_bias
from tests.scaled_layers import truth as layer_truth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

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
