"""What only a GPU can show: the recipes' accuracy on CUDA, no synchronisation, and CUDA graphs that keep features."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from segment_anything.utils.transforms import ResizeLongestSide
from torch import Tensor

import samopt
from samopt.bench import Bench
from samopt.bench_model import bench_model
from samopt.bench_plan import forgiving, verified, waterfall
from samopt.passes import (
    CastDtype,
    Compile,
    Float8Dynamic,
    FusedMaskDecoder,
    HoistRelPos,
    Int8Dynamic,
    LinearGELU,
    SDPAttention,
    TritonAttention,
    TritonLayerNorm,
    WhereIndexing,
)
from samopt.passes.cuda_graphs import Buffer, Call, Captured, Cuda
from samopt.passes.kernels import attention, cublaslt
from samopt.passes.kernels.attention_launch import Geometry, launch
from samopt.passes.kernels.tuning import Config
from samopt.precision import tf32_convolutions
from samopt.preprocess import preprocess, resized_shape
from samopt.samples import scene_samples
from samopt.tiny import load_tiny
from samopt.verify import relative_error
from tests.models import random_sam
from tests.numerics import assert_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def sam() -> Sam:
    return load_tiny().to("cuda")


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("height", "width"), [(333, 401), (1200, 1800), (3000, 4000), (512, 384), (37, 2000), (1, 1)])
def test_pictures_are_resized_as_by_pil(sam: Sam, height: int, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    on_gpu, size = torch.as_tensor(image, device="cuda"), resized_shape(height, width, 1024)
    with synchronising_is_an_error():
        pixels, _ = preprocess(on_gpu, 1024, sam.pixel_mean, sam.pixel_std)
    levels = (pixels * sam.pixel_std + sam.pixel_mean)[:, : size[0], : size[1]].permute(1, 2, 0).cpu().numpy().round()
    difference = np.abs(levels - ResizeLongestSide(1024).apply_image(image).astype(float))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.01


@pytest.mark.parametrize("recipe", ["exact", "fast"])
def test_recipes_keep_their_budget(sam: Sam, recipe: str) -> None:
    fast = samopt.optimize(sam, recipe, samples=scene_samples(4))
    left_out = {row.name: row.reason for row in samopt.report(fast).steps if row.status != "applied"}
    if recipe != "exact":  # the embedded model is narrow
        narrow = "its rows of 192 are fast as they are, TorchInductor keeps them in registers ("
        assert left_out.pop("TritonLayerNorm(wider_than=1024)").startswith(narrow)
    assert left_out == {}


def test_max_keeps_what_keeps_the_budget(sam: Sam) -> None:
    recipe = samopt.Recipe.of("max")
    steps = [dataclasses.replace(step, keep="always") for step in recipe.steps]  # the embedded model is small
    made = samopt.report(samopt.optimize(sam, dataclasses.replace(recipe, steps=steps), samples=scene_samples(4)))
    rows = {row.name.partition("(")[0]: row for row in made.steps}
    float8 = torch.cuda.get_device_capability() >= (8, 9)
    assert (rows["Float8Dynamic"].status, rows["Int8Dynamic"].status) == (
        ("applied", "skipped") if float8 else ("skipped", "applied")
    )
    assert rows["SemiSparse"].status in ("applied", "dropped")
    last = rows["Compile"].agreement
    assert last is not None
    assert last.masks is not None
    assert last.masks.mean_iou >= recipe.accuracy.mean_iou


@pytest.mark.parametrize(("pass_", "least"), [(Int8Dynamic(), 0.995), (Float8Dynamic(), 0.99)], ids=str)
def test_masks_of_quantised_encoders_stay(sam: Sam, pass_: samopt.Pass, least: float) -> None:
    if isinstance(pass_, Float8Dynamic) and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    free = samopt.Budget(mean_iou=0, kind_mean_iou=0, min_iou=0, truth_drop=1)
    steps = [samopt.Step(step) for step in (CastDtype(), TritonAttention(), LinearGELU(), TritonLayerNorm(0), pass_)]
    agreement = samopt.report(samopt.optimize(sam, samopt.Recipe(steps, free))).steps[-1].agreement
    assert agreement is not None
    assert agreement.masks is not None
    assert agreement.masks.mean_iou >= least


def test_quantised_float32_is_told_to_cast(sam: Sam) -> None:
    with pytest.raises(samopt.NoSites, match="its weights are float32: apply CastDtype first"):
        Int8Dynamic()(sam)


def test_what_is_kept_only_if_faster_is_timed_in_batches_and_as_compiled(sam: Sam) -> None:
    steps = [samopt.Step(CastDtype()), samopt.Step(SDPAttention(), keep="if-faster"), samopt.Step(Compile())]
    row = samopt.report(samopt.optimize(sam, steps, verify="off")).steps[1]
    assert row.speed is not None
    assert row.speed.batch_size == 8
    assert row.speed.before > 0 < row.speed.after
    assert row.status == ("applied" if row.speed.faster else "undone")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was launched: attention in "window" or "global", and "gelu" for a product with its activation, whether
    samopt or PyTorch chose its algorithm."""
    launched: list[str] = []
    product, multiply = torch._addmm_activation, cublaslt.multiply

    def noting_launch(config: Config, geometry: Geometry, *rest: Any, **options: Any) -> Tensor:
        launched.append("global" if geometry.is_global else "window")
        return launch(config, geometry, *rest, **options)

    def noting_product(*args: Any, **options: Any) -> Tensor:
        assert options == {"use_gelu": True}
        launched.append("gelu")
        return product(*args, **options)

    def noting_multiply(product: cublaslt.Product, *rest: Any) -> Tensor:
        if product.gelu:
            launched.append("gelu")
        return multiply(product, *rest)

    monkeypatch.setattr(attention, "launch", noting_launch)
    monkeypatch.setattr(torch, "_addmm_activation", noting_product)
    monkeypatch.setattr(cublaslt, "multiply", noting_multiply)
    return launched


@torch.no_grad()
def test_fast_runs_its_kernels_keeps_its_masks_and_waits_for_nothing(sam: Sam, kernels: list[str]) -> None:
    fast = samopt.optimize(sam, "fast", samples=scene_samples(4))
    steps = {step.name: step for step in samopt.report(fast).steps}
    blocks = fast.image_encoder.blocks
    for name in ("TritonAttention()", "LinearGELU()"):
        assert steps[name].status == "applied"
        assert len(steps[name].sites) == len(blocks)
        assert steps[name].skipped == ()
    agreement = samopt.report(fast).steps[-1].agreement
    assert agreement is not None
    assert agreement.masks is not None
    assert agreement.masks.mean_iou >= 0.995
    assert agreement.masks.min_iou >= 0.9
    pixels = torch.randn(1, 3, 1024, 1024, device="cuda")
    uncompiled = copy.deepcopy(fast).image_encoder
    expected = [("window" if block.window_size else "global", "gelu") for block in blocks]
    for encoder, launches in ((fast.image_encoder, []), (uncompiled, [name for pair in expected for name in pair])):
        encoder(pixels)
        kernels.clear()
        with synchronising_is_an_error():
            encoder(pixels)
        assert kernels == launches, "the compiled encoder replays a CUDA graph, a copy launches each kernel"


@pytest.mark.parametrize(
    ("pass_", "dtype"),
    [
        (TritonAttention(), torch.float16),
        (TritonAttention(), torch.bfloat16),
        (LinearGELU(), torch.bfloat16),
        (TritonLayerNorm(), torch.float32),
        (TritonLayerNorm(), torch.float16),
        (TritonLayerNorm(), torch.bfloat16),
    ],
    ids=str,
)
def test_blocks_as_wide_as_vit_h_err_like_the_unmodified_ones(pass_: samopt.Pass, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = random_sam(1024, width=1280, heads=16).to("cuda")  # one block in windows of 14, one over the grid
    for block in model.image_encoder.blocks:
        for parameter in (*block.norm1.parameters(), *block.norm2.parameters(), block.attn.qkv.bias):
            torch.nn.init.normal_(parameter)
    model.image_encoder.to(dtype)
    ours = copy.deepcopy(model)
    assert len(pass_(ours).sites) == 2
    tokens = 0.01 * torch.randn(1, 64, 64, 1280, device="cuda")  # a small residual hides no error of what is added
    for block, rewritten in zip(model.image_encoder.blocks, ours.image_encoder.blocks, strict=True):
        if dtype is not torch.float32:  # there a whole block of this width errs by more than `assert_rounding` takes
            assert_rounding(block, rewritten, [tokens.to(dtype)])
        assert_rounding(block.norm1, rewritten.norm1, [tokens.to(dtype)])
        assert_rounding(block.mlp, rewritten.mlp, [100 * tokens.to(dtype)])


@pytest.mark.parametrize("fused", [(), (TritonAttention(), LinearGELU())], ids=["sdpa", "kernels"])
def test_no_synchronisation_in_encoder_and_prompt_encoder(sam: Sam, fused: tuple[samopt.Pass, ...]) -> None:
    sam.requires_grad_(False)
    pixels = torch.randn(1, 3, 1024, 1024, device="cuda")
    points = torch.rand(5, 2, 2, device="cuda") * 1024
    labels = torch.tensor([[1, 0]], device="cuda").expand(5, -1)

    def run() -> None:
        sam.image_encoder(pixels)
        sam.prompt_encoder((points, labels), None, None)

    run()
    with synchronising_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        run()
    for rewrite in (HoistRelPos(), WhereIndexing(), SDPAttention(), CastDtype(), *fused):
        rewrite(sam)
    run()
    with synchronising_is_an_error():
        run()


def graphed(sam: Sam, scope: Literal["block", "encoder", "none"] = "block") -> Any:
    """The image encoder of `sam` in bfloat16, compiled for batches of 1, 2 and 4, as CUDA graphs."""
    for rewrite in (HoistRelPos(), SDPAttention(), CastDtype()):
        rewrite(sam)
    Compile(scope, batch_sizes=(1, 2, 4), cuda_graphs=True)(sam)
    return sam.image_encoder


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every capture, of its first input."""
    sizes: list[int] = []
    capture = Cuda.capture

    def noting(self: Cuda, call: Call, inputs: tuple[Buffer, ...]) -> Captured:
        sizes.append(len(inputs[0].tensor))
        return capture(self, call, inputs)

    monkeypatch.setattr(Cuda, "capture", noting)
    return sizes


@pytest.mark.parametrize("scope", ["block", "encoder", "none"])
@torch.no_grad()
def test_cuda_graphs_keep_earlier_features(
    sam: Sam, scope: Literal["block", "encoder", "none"], captured: list[int]
) -> None:
    encoder = graphed(sam, scope)
    batches = [torch.randn(batch, 3, 1024, 1024, device="cuda") for batch in (1, 1, 3, 1, 2, 4)]
    features = [encoder(batch) for batch in batches]
    kept = [feature.clone() for feature in features]
    for batch in reversed(batches):
        encoder(batch)
    assert all(map(torch.equal, features, kept))
    again = [encoder(batch) for batch in batches]
    assert all(map(torch.equal, again, kept))
    assert captured == [1, 4, 2]
    eager = copy.deepcopy(sam).image_encoder  # a copy is not compiled
    assert relative_error(features, [eager(batch) for batch in batches]) < 0.05


@pytest.mark.parametrize("streams", [False, True])
def test_threads_with_cuda_graphs_get_the_answers_of_one(sam: Sam, streams: bool, captured: list[int]) -> None:
    encoder = graphed(sam)
    images = torch.randn(7, 3, 1024, 1024, device="cuda")
    sizes = [3, 1, 7, 2, 5, 4]
    torch.cuda.synchronize()  # the images are there, whatever stream a thread reads them on

    @torch.no_grad()
    def answers(sizes: list[int]) -> list[Tensor]:
        stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            features = [encoder(images[:size]) for _ in range(4) for size in sizes]
        stream.synchronize()
        return features

    with ThreadPoolExecutor(2) as pool:
        there = [pool.submit(answers, order) for order in (sizes, sizes[::-1])]
        forwards, backwards = (future.result() for future in there)
    expected = answers(sizes)
    assert sorted(captured) == [1, 2, 4]
    assert all(map(torch.equal, forwards, expected))
    assert all(map(torch.equal, backwards[::-1], expected))


@torch.no_grad()
def test_cuda_graphs_see_other_weights(sam: Sam, captured: list[int]) -> None:
    encoder = graphed(sam)
    pixels = torch.randn(1, 3, 1024, 1024, device="cuda")

    def load_and_check(factor: float) -> None:
        before = encoder(pixels)
        sam.load_state_dict({key: value * factor for key, value in sam.state_dict().items()})
        expected = copy.deepcopy(sam).image_encoder(pixels)  # a copy is not compiled
        assert relative_error([before], [expected]) > 0.2
        assert relative_error([encoder(pixels)], [expected]) < 0.05

    load_and_check(0.5)
    assert captured == [1], "values written in place need no new capture"
    old = [tensor.data for tensor in (*encoder.parameters(), *encoder.buffers())]  # so that no address is used again
    sam.to("cpu").to("cuda")
    load_and_check(2)
    assert captured == [1, 1]
    del old


@torch.no_grad()
def test_cuda_graphs_hold_the_kernels(sam: Sam, captured: list[int], kernels: list[str]) -> None:
    for rewrite in (CastDtype(), TritonAttention(), LinearGELU()):
        rewrite(sam)
    eager = copy.deepcopy(sam).image_encoder
    Compile(batch_sizes=(1,), cuda_graphs=True)(sam)
    one, other = torch.randn(2, 1, 3, 1024, 1024, device="cuda")
    sam.image_encoder(one)
    assert captured == [1]
    kernels.clear()
    features = [sam.image_encoder(pixels) for pixels in (one, other)]
    assert kernels == [], "a replay launches no kernel by itself"
    assert relative_error(features, [eager(pixels) for pixels in (one, other)]) < 0.05


@pytest.mark.parametrize("recipe", ["fast", "max"])
@torch.no_grad()
def test_few_prompts_are_answered_by_cuda_graphs(sam: Sam, recipe: str, captured: list[int]) -> None:
    """A replay gives the bits of the calls before the capture; what fills prompts up may round differently."""
    fast = samopt.optimize(sam, recipe, verify="off")
    uncaptured = copy.deepcopy(fast)
    predictor, plain = SamPredictor(fast), SamPredictor(uncaptured)
    for each in (predictor, plain):
        each.set_image(scene_samples(1)[0].image)
    captured.clear()
    prompts = [1024 * torch.rand(count, points, 2, device="cuda") for count, points in ((1, 1), (1, 3), (51, 1))]

    def answers(predictor: SamPredictor) -> list[Tensor]:
        found = []
        for points in prompts:
            labels = torch.ones(points.shape[:2], device="cuda", dtype=torch.int)
            found += predictor.predict_torch(points, labels, return_logits=True)
        return found

    first, second = answers(predictor), answers(predictor)
    assert sorted(captured) == [1, 1, 1, 1, 1, 64], "of each the prompt encoder's and the decoder's, whose image is one"
    kept = [answer.clone() for answer in second]
    with synchronising_is_an_error():
        third = answers(predictor)
    for found in (second, third):
        assert all(map(torch.equal, found, first))
    assert all(map(torch.equal, second, kept)), "what was returned is not written again"
    assert len(captured) == 6
    assert relative_error(first, answers(plain)) < 0.03


def test_a_capture_that_is_broken_leaves_the_answer_and_the_next_capture(sam: Sam) -> None:
    """As by a thread that waits for the whole GPU meanwhile."""

    class Waits(torch.nn.Module):
        waits = True

        def forward(self, pixels: Tensor) -> Tensor:
            if self.waits and torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return neck(pixels)

    encoder, neck = graphed(sam, "none"), sam.image_encoder.neck
    encoder.neck = waiting = Waits()
    pixels = torch.randn(2, 3, 1024, 1024, device="cuda")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="runs without a CUDA graph"):
            alone = encoder(pixels[:1])
        assert encoder(pixels[:1]).isfinite().all()
        waiting.waits = False
        both = encoder(pixels)
    assert relative_error([both[:1]], [alone]) < 0.03


@torch.no_grad()
def test_a_caller_may_capture_the_encoder_in_a_graph_of_its_own(sam: Sam, captured: list[int]) -> None:
    encoder = graphed(sam)
    pixels, other = torch.randn(2, 1, 3, 1024, 1024, device="cuda")
    buffer, graph = pixels.clone(), torch.cuda.CUDAGraph()
    expected = encoder(other)
    with torch.cuda.graph(graph):
        features = encoder(buffer)
    buffer.copy_(other)
    graph.replay()
    assert captured == [1]
    assert relative_error([features], [expected]) < 0.01


def test_autocast_is_not_captured() -> None:
    pixels = torch.zeros(1, 3, 8, 8, device="cuda")
    assert Cuda("the image encoder").takes(pixels)
    with torch.autocast("cuda", torch.bfloat16):
        assert not Cuda("the image encoder").takes(pixels)


def test_a_waterfall_has_speed_memory_and_accuracy() -> None:
    device, scenes = torch.device("cuda"), scene_samples(1)
    model = bench_model("sam_tiny")
    recipe = samopt.Recipe.of([CastDtype(), TritonAttention(), Compile(batch_sizes=(1, 2))])
    found = verified(forgiving(recipe), device, model, scenes)
    entries = waterfall(found, model, [1, 2], device, each=True)
    rows: list[Any] = list(Bench(model, device, samples=scenes, whole=True).rows(entries))
    assert [row.what for row in rows if row.batch_size == 1] == [
        "unmodified",
        "+ compile",
        "+ dtype",
        "+ triton_attention",
        "dtype alone",
        "triton_attention alone, with dtype",
        "compile alone",
    ]
    for row in rows:
        assert row.status == "timed", row
        assert row.peak_gib > 0
        assert row.whole_milliseconds > row.milliseconds
        assert row.mask_iou > 0.98
        assert abs(row.miou - rows[0].miou) < 0.02


def test_moves_between_devices(sam: Sam) -> None:
    fast = samopt.optimize(sam.cpu(), [HoistRelPos(), SDPAttention(), CastDtype()], verify="off").to("cuda")
    assert {tensor.device.type for tensor in (*fast.parameters(), *fast.buffers())} == {"cuda"}
    assert samopt.verify(fast, samopt.Reference.record(sam.to("cuda"), scene_samples(1))).finite


@pytest.mark.parametrize("passes", [(), (SDPAttention(encoder=False), FusedMaskDecoder(), CastDtype(encoder=False))])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_decoder_answers_any_number_of_prompts(sam: Sam, passes: tuple[samopt.Pass, ...], mode: Any) -> None:
    for pass_ in passes:
        pass_(sam)
    eager = copy.deepcopy(sam).mask_decoder
    Compile(decoder=True)(sam)
    decoder = sam.mask_decoder
    counters = torch._dynamo.utils.counters["stats"]
    allowed = 0.05 if passes else 1e-5  # bfloat16, or float32

    def check(prompts: int, *, masks: bool) -> None:
        points = 1024 * torch.rand(prompts, 1, 2, device="cuda"), torch.ones(prompts, 1, device="cuda")
        logits = torch.randn(prompts, 1, 256, 256, device="cuda") if masks else None
        given = sam.prompt_encoder.get_dense_pe(), *sam.prompt_encoder(points, None, logits)
        image = torch.randn(1, 256, 64, 64, device="cuda")
        found, expected = (called(image, *given, multimask_output=True) for called in (decoder, eager))
        assert relative_error(list(found), list(expected)) < allowed

    with mode(), tf32_convolutions(False):
        for masks in (False, True):
            before = counters["unique_graphs"]
            for prompts in (2, 1, 64, 7, 256):
                check(prompts, masks=masks)
            assert counters["unique_graphs"] == before + 2
        for model in (sam, eager):  # moved, and back
            model.to("cpu").to("cuda")
        check(5, masks=False)
