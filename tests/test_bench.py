"""What a benchmark's rows say; how fast anything is, is never asserted."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import segment_anything
import torch
from segment_anything.modeling import Sam
from torch import Tensor

import samopt.bench
import samopt.speed
import samopt.timing
from samopt.bench import EncoderBench, Entry, plan, random_model
from samopt.bench_table import Row
from samopt.errors import InvalidInput, Unsupported
from samopt.gate import Budget
from samopt.passes import (
    CastDtype,
    Compile,
    Float8Dynamic,
    HoistRelPos,
    Int8Dynamic,
    SDPAttention,
    TritonLayerNorm,
)
from samopt.peers import Build, Peer
from samopt.recipe import Recipe, Step
from samopt.timing import Encoder, Timed, timed
from samopt.tiny import load_tiny
from tests.models import random_sam
from tests.toys import Exact, MoreWork, counted_seconds

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> EncoderBench:
    """A bench of a small model; the product that measures the chip is small, too."""
    monkeypatch.setattr(samopt.bench, "random_model", lambda model_type, seed: random_sam(img_size=64))
    monkeypatch.setattr(samopt.timing, "CPU_PRODUCT", 64)
    return EncoderBench("small", CPU)


def built(change: Callable[[Any, Tensor], Tensor]) -> Build:
    """Builds the unmodified encoder, called through `change`."""

    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        yield lambda pixels: change(sam.image_encoder, pixels)

    return build


SAME = built(lambda encoder, pixels: encoder(pixels))
DOUBLE = built(lambda encoder, pixels: 2 * encoder(pixels))


def test_rows_hold_ratio_share_and_error_against_the_unmodified_model(bench: EncoderBench) -> None:
    peer = Peer("double", "torch", DOUBLE)
    recipe = Recipe.of([SDPAttention(), CastDtype()])
    rows: list[Any] = list(bench.rows(plan([recipe], [1, 3], CPU, [peer])))
    assert [(row.what, row.batch_size) for row in rows] == [
        ("unmodified", 1),
        ("eager bfloat16", 1),
        ("eager bfloat16", 3),
        ("recipe", 1),
        ("recipe", 3),
        ("double", 3),
    ]
    for row in rows:
        assert row.note == ""
        assert row.ratio == pytest.approx(rows[0].milliseconds / row.milliseconds)
        assert row.images_per_second == pytest.approx(1e3 / row.milliseconds)
        operations = row.images_per_second * bench.setting.image_tflop
        assert row.share == pytest.approx(operations / bench.setting.matmul_tflops)
    unmodified, *halves, double = rows
    assert unmodified.error == 0
    errors = [half.error for half in halves]
    assert 1e-4 < min(errors) <= max(errors) < 1e-1
    assert double.error == pytest.approx(1)


def test_an_embedding_past_the_recipes_limit_is_a_row_that_failed(bench: EncoderBench) -> None:
    within, past = (Entry("row", 1, DOUBLE, most_error=limit) for limit in (1.01, 0.5))
    _, kept, failed = bench.rows([Entry("base", 1, SAME), within, past])
    assert kept.note == ""
    assert kept.error == pytest.approx(1)
    assert (failed.note, failed.milliseconds) == (
        "SamoptError: its embedding errs by 1.0e+00, more than the recipe's 0.5",
        None,
    )
    limited = Recipe([Step(SDPAttention())], Budget(embedding_error=0.25))
    assert [entry.most_error for entry in plan([limited], [1, 2], CPU)][-2:] == [0.25, 0.25]


def test_figures_are_per_image(bench: EncoderBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_second(encoder: Encoder, pixels: Tensor) -> Timed:
        return Timed(encoder(pixels).detach(), seconds=0.5, spread=0.25, first_seconds=9.0, peak_gib=2.0)

    monkeypatch.setattr(samopt.bench, "timed", half_a_second)
    _, row = bench.rows([Entry("base", 1, SAME), Entry("row", 4, SAME)])
    assert (row.milliseconds, row.images_per_second, row.ratio) == (125, 8, 4)
    assert (row.spread, row.first_seconds, row.peak_gib) == (0.25, 9, 2)


def test_timed_tells_the_first_call_from_the_others() -> None:
    calls: list[Tensor] = []

    def slow_at_first(pixels: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        calls.append(pixels)
        time.sleep(0.002 if len(calls) > 1 else 0.2)
        return pixels + len(calls)

    found = timed(slow_at_first, torch.zeros(2))
    assert found.output.tolist() == [1, 1]
    assert found.first_seconds >= 0.2 > found.seconds >= 0.002
    assert len(calls) == 3 + samopt.timing.REPEATS


def test_what_all_rows_share(bench: EncoderBench) -> None:
    side, width = 4, 64  # of the token grid, and of tokens and output
    blocks = 0
    for edge in (14, side):  # attention on a window, padding included, and on all of the image
        tokens = edge * edge
        attention = 4 * tokens * width * width + 2 * tokens * tokens * width + 2 * tokens * edge * width
        blocks += attention + 8 * side * side * width * width
    embedding, neck = side * side * width * 3 * 16 * 16, side * side * width * width * (1 + 9)
    assert bench.setting.image_tflop * 1e12 == pytest.approx(2 * (embedding + blocks + neck))
    assert bench.setting.matmul_tflops > 0
    assert {"samopt", "python", "torch", "threads", "system"} <= set(bench.setting.versions)


def test_the_plan_on_a_gpu() -> None:
    lossless, half = Recipe([Step(SDPAttention())], name="lossless"), Recipe([Step(CastDtype("float16"))], name="half")
    peer = Peer("peer", "torch", SAME)
    entries = plan([lossless, half], [4, 1, 32, 4], CUDA, [peer])
    assert [(entry.what, entry.batch_size) for entry in entries if entry.tf32] == [
        ("unmodified, TF32", 1),
        ("unmodified, TF32", 4),
    ]
    assert [(entry.what, entry.batch_size) for entry in entries if not entry.tf32] == [
        ("unmodified", 1),
        ("eager bfloat16", 1),
        ("eager bfloat16", 4),
        ("eager float16", 1),
        ("eager float16", 4),
        *(("lossless", size) for size in (4, 1, 32)),
        *(("half", size) for size in (4, 1, 32)),
        ("peer", 4),
    ]


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"), [([1, 16, 32], [], [16]), ([32, 64], [], [32]), ([1], [2, 4, 2], [2, 4])]
)
def test_batch_sizes_of_peers(sizes: list[int], asked: list[int], expected: list[int]) -> None:
    entries = plan([Recipe.of([SDPAttention()])], sizes, CPU, [Peer("peer", "torch", SAME)], asked)
    assert [entry.batch_size for entry in entries if entry.what == "peer"] == expected


def test_tf32_is_for_its_rows_only(bench: EncoderBench) -> None:
    seen = []

    def look(encoder: Any, pixels: Tensor) -> Tensor:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return encoder(pixels)

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for allowed in (False, True):
        seen.clear()
        list(bench.rows([Entry("row", 1, built(look), tf32=allowed)]))
        assert set(seen) == {("high", True) if allowed else ("highest", False)}
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_row_that_fails_is_a_note_and_the_others_go_on(bench: EncoderBench) -> None:
    def fail(encoder: Any, pixels: Tensor) -> Tensor:
        raise ValueError("no kernel [image]\nand a long story")

    spoiled = built(lambda encoder, pixels: encoder(pixels) / 0)
    entries = [Entry("base", 1, SAME), Entry("peer", 2, built(fail)), Entry("spoiled", 1, spoiled)]
    base, failed, infinite, last = bench.rows([*entries, Entry("last", 2, SAME)])
    assert failed == Row("peer", 2, note="ValueError: no kernel [image]")
    assert infinite.note == "SamoptError: its embedding holds NaN or infinity"
    assert infinite.milliseconds is None
    assert base.note == last.note == ""
    assert last.error == pytest.approx(0, abs=1e-5)


def test_a_base_that_fails_is_an_error(bench: EncoderBench) -> None:
    with pytest.raises(ZeroDivisionError):
        list(bench.rows([Entry("base", 1, built(lambda encoder, pixels: encoder(pixels[: 1 // 0])))]))


def test_a_recipe_that_loses_a_step_is_no_row(bench: EncoderBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.passes.compile, "_cpp_compiler", lambda: None)
    recipe = Recipe([Step(HoistRelPos()), Step(Compile(), required=False)])
    row = list(bench.rows(plan([recipe], [1], CPU)))[-1]
    assert row.note.startswith("SamoptError: Compile")
    assert "found no C++ compiler" in row.note


@pytest.mark.usefixtures("kernels_anywhere")
def test_narrow_norms_are_verified_like_wide_ones_and_may_be_left_alone(
    bench: EncoderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    recipe = Recipe([Step(CastDtype()), Step(TritonLayerNorm(1024), required=False), Step(Compile(), required=False)])
    monkeypatch.setattr(Compile, "requires", refuse)
    stood = samopt.bench.verified(recipe, CPU)
    assert stood.steps == recipe.steps[:2], "the pass as it was, not as it was verified"
    rows = list(bench.rows(plan([stood], [1], CPU)))
    assert [row.note for row in rows] == [""] * len(rows)


def refuse(self: Compile, model: Any) -> None:
    raise Unsupported("there is no compiler")


def test_a_pass_undone_as_not_faster_is_a_remark_of_a_row_decided_at_its_batch_size(
    bench: EncoderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samopt.speed, "median_seconds", counted_seconds)
    recipe = Recipe([Step(SDPAttention()), Step(MoreWork(), keep="if-faster")])
    rows = list(bench.rows(plan([recipe], [1, 2], CPU)))[-2:]
    for row, size in zip(rows, (1, 2), strict=True):
        assert row.note == ""
        assert row.milliseconds
        assert row.remark.startswith("without MoreWork(emulated=False), not faster: encoder blocks: ")
        assert row.remark.endswith(f"at batch {size}")


def test_what_is_kept_only_if_faster_is_verified_whatever_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_nothing(*_: object) -> list[float]:
        raise AssertionError("something was timed")

    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    monkeypatch.setattr(samopt.speed, "median_seconds", time_nothing)
    recipe = Recipe([Step(MoreWork(), keep="if-faster"), Step(Exact(1.5), on_fail="drop", keep="if-faster")])
    assert samopt.bench.verified(recipe, CPU).steps == recipe.steps[:1], "to be judged on the model that is timed"


def test_what_quantises_is_verified_each_alone_and_takes_the_others_place(
    bench: EncoderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    steps = [
        Step(pass_, required=False, on_fail="drop") for pass_ in (Float8Dynamic(("lin1",)), Int8Dynamic(("lin1",)))
    ]
    recipe = samopt.bench.verified(Recipe(steps, Budget(0, 0, 0, 1, 1.0)), CPU)
    assert recipe.steps == tuple(steps)
    *_, row = bench.rows(plan([recipe], [1], CPU))
    assert (row.note, row.remark) == ("", "")
    assert row.error is not None
    assert row.error > 1e-3


def test_each_row_starts_without_what_the_last_one_held(bench: EncoderBench) -> None:
    alive: list[weakref.ref[Any]] = []

    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        assert [reference() for reference in alive] == [None] * len(alive)
        model = random_sam(img_size=64)
        model.image_encoder.circle = [model]  # only the collector of cycles frees it
        alive.append(weakref.ref(model))
        yield model.image_encoder
        if len(alive) == 2:
            raise ValueError("after use")

    gc.disable()
    try:
        rows = list(bench.rows([Entry("row", 1, build)] * 4))
    finally:
        gc.enable()
    assert [row.note for row in rows] == ["", "ValueError: after use", "", ""]


def test_compiled_rows_need_a_compiler_switched_on() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(InvalidInput, match="TORCH_COMPILE_DISABLE"):
        EncoderBench("vit_b", CPU)


def test_random_models_have_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(segment_anything.sam_model_registry, "small", lambda: random_sam(img_size=64))
    sam: Sam = random_model("small", seed=0)
    positions = [p for name, p in sam.image_encoder.named_parameters() if "rel_pos" in name or "pos_embed" in name]
    assert positions
    assert all(bool(position.abs().max() > 0) for position in positions)
