"""What a benchmark's rows say; how fast anything is, is never asserted."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from torch import Tensor

import samopt.bench
import samopt.speed
import samopt.timing
from samopt.bench import Bench, Entry, whole_call
from samopt.bench_build import Candidate, NothingAdded, optimised, unmodified
from samopt.bench_model import BenchModel
from samopt.bench_plan import Verified, side_by_side
from samopt.bench_table import Row
from samopt.errors import InvalidInput
from samopt.gate import Budget
from samopt.passes import CastDtype, Compile, HoistRelPos, SDPAttention
from samopt.peers import Peer
from samopt.recipe import Recipe, Step
from samopt.samples import Sample, scene_samples
from samopt.timing import Encoder, Timed, timed
from tests.benches import CPU, DOUBLE, SAME, built, small_bench, small_model
from tests.models import random_sam
from tests.toys import Exact, Lossy, MoreWork, counted_seconds


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return small_bench(monkeypatch)


def plan(recipe: Recipe, batch_sizes: list[int], peers: list[Peer] | None = None) -> list[Entry]:
    """The rows of a recipe all of which stood verification."""
    return side_by_side([Verified(recipe, {})], batch_sizes, CPU, peers or [])


def test_rows_hold_ratio_share_and_error_against_the_unmodified_model(bench: Bench) -> None:
    peer = Peer("double", "torch", DOUBLE)
    recipe = Recipe.of([SDPAttention(), CastDtype()])
    rows: list[Any] = list(bench.rows(plan(recipe, [1, 3], [peer])))
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


def test_an_embedding_past_the_recipes_limit_is_a_row_that_failed(bench: Bench) -> None:
    within, past = (Entry("row", 1, DOUBLE, most_error=limit) for limit in (1.01, 0.5))
    _, kept, failed = bench.rows([Entry("base", 1, SAME), within, past])
    assert kept.note == ""
    assert kept.error == pytest.approx(1)
    assert (failed.note, failed.milliseconds) == (
        "SamoptError: its embedding errs by 1.0e+00, more than the recipe's 0.5",
        None,
    )
    limited = Recipe([Step(SDPAttention())], Budget(embedding_error=0.25))
    assert [entry.most_error for entry in plan(limited, [1, 2])][-2:] == [0.25, 0.25]


def test_figures_are_per_image(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_all_rows_share(bench: Bench) -> None:
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


def test_tf32_is_for_its_rows_only(bench: Bench) -> None:
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


def test_a_row_that_fails_is_a_note_and_the_others_go_on(bench: Bench) -> None:
    def fail(encoder: Any, pixels: Tensor) -> Tensor:
        raise ValueError("no kernel [image]\nand a long story")

    spoiled = built(lambda encoder, pixels: encoder(pixels) / 0)
    entries = [Entry("base", 1, SAME), Entry("peer", 2, built(fail)), Entry("spoiled", 1, spoiled)]
    base, failed, infinite, last = bench.rows([*entries, Entry("last", 2, SAME)])
    assert failed == Row("peer", 2, status="failed", note="ValueError: no kernel [image]")
    assert infinite.note == "SamoptError: its embedding holds NaN or infinity"
    assert infinite.milliseconds is None
    assert base.note == last.note == ""
    assert last.error == pytest.approx(0, abs=1e-5)


def test_a_base_that_fails_is_an_error(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        list(bench.rows([Entry("base", 1, built(lambda encoder, pixels: encoder(pixels[: 1 // 0])))]))


def test_a_recipe_that_loses_a_step_is_no_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.passes.compile, "_cpp_compiler", lambda: None)
    recipe = Recipe([Step(HoistRelPos()), Step(Compile(), required=False)])
    row = list(bench.rows(plan(recipe, [1])))[-1]
    assert row.note.startswith("SamoptError: compile skipped: ")
    assert "found no C++ compiler" in row.note


@pytest.mark.slow
def test_a_pass_undone_as_not_faster_is_a_remark_of_a_row_decided_at_its_batch_size(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samopt.speed, "median_seconds", counted_seconds)
    recipe = Recipe([Step(SDPAttention()), Step(MoreWork(), keep="if-faster")])
    rows = list(bench.rows(plan(recipe, [1, 2])))[-2:]
    for row, size in zip(rows, (1, 2), strict=True):
        assert row.note == ""
        assert row.milliseconds
        assert row.remark.startswith("without MoreWork: not faster: encoder blocks: ")
        assert row.remark.endswith(f"at batch {size}")


def test_each_row_starts_without_what_the_last_one_held(bench: Bench) -> None:
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
        Bench(small_model(), CPU)


# Waterfalls: what a row adds, whole calls and masks


def test_what_a_row_gains_over_the_one_before(bench: Bench) -> None:
    @contextlib.contextmanager
    def nothing(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        raise NothingAdded("not faster here")
        yield

    entries = [
        Entry("base", 1, SAME),
        Entry("+ a", 2, SAME, adds=("a",), cumulative=True),
        Entry("+ b", 2, None, adds=("b",), cumulative=True, remark="b dropped: too much"),
        Entry("+ c", 2, nothing, adds=("c",), cumulative=True, remark="d skipped"),
        Entry("+ e", 2, DOUBLE, adds=("e",), cumulative=True, remark="f dropped"),
        Entry("+ a", 1, SAME, adds=("a",), cumulative=True),
        Entry("g alone", 1, SAME, adds=("g",)),
    ]
    rows: list[Any] = list(bench.rows(entries))
    base, a, b, c, e, other, alone = rows
    assert [row.status for row in rows] == ["timed", "timed", "left out", "left out", "timed", "timed", "timed"]
    assert (b.milliseconds, b.note, b.remark) == (None, "", "b dropped: too much")
    assert c.remark == "d skipped; not faster here"
    assert (base.ratio_before, alone.ratio_before) == (None, None)
    assert a.ratio_before == pytest.approx(base.milliseconds / a.milliseconds)
    assert e.ratio_before == pytest.approx(a.milliseconds / e.milliseconds), "over the last that was timed"
    assert other.ratio_before == pytest.approx(base.milliseconds / other.milliseconds), "of its own batch size"
    assert (e.adds, e.remark) == (("e",), "f dropped")
    assert [row.whole_milliseconds for row in rows] == [None] * 7
    assert [row.mask_iou for row in rows] == [None] * 7


def test_nothing_added_is_told_by_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.speed, "median_seconds", counted_seconds)
    recipe = Recipe([Step(SDPAttention()), Step(MoreWork(), keep="if-faster")])
    with (
        pytest.raises(NothingAdded, match=r"without MoreWork.*not faster"),
        optimised(recipe, 1, adds=[MoreWork])(random_sam(), CPU),
    ):
        pass
    with optimised(recipe, 1, adds=[MoreWork, SDPAttention])(random_sam(), CPU) as candidate:
        assert isinstance(candidate, Candidate)
        assert candidate.passes == (repr(SDPAttention()),)
        assert candidate.remark.startswith("without MoreWork")


def test_whole_calls_of_random_weights_are_timed_and_masks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.bench, "PHOTO", (40, 60))
    bench = small_bench(monkeypatch, whole=True)
    rows = list(bench.rows([Entry("base", 1, unmodified), Entry("two", 2, unmodified), Entry("peer", 1, SAME)]))
    assert [bool(row.whole_milliseconds) for row in rows] == [True, True, False], "a peer is an encoder only"
    assert [row.mask_iou for row in rows] == [None] * 3
    assert bench.setting.masks.startswith("not measured, random weights")
    assert "60 x 40 pixels" in bench.setting.pictures


def test_whole_calls_are_per_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.bench, "PHOTO", (40, 60))
    seen: list[int] = []

    def half_a_second(call: Any, device: torch.device) -> tuple[float, float]:
        seen.append(len(call()))
        return 0.5, 0.0

    monkeypatch.setattr(samopt.bench, "repeated", half_a_second)
    _, row = small_bench(monkeypatch, whole=True).rows([Entry("base", 1, unmodified), Entry("row", 4, unmodified)])
    assert seen == [1, 4]
    assert row.whole_milliseconds == 125


def test_a_whole_call_answers_as_sam_predictor_does(sam: Sam, pictures: list[Sample]) -> None:
    found = whole_call(sam, [picture.image for picture in pictures])()
    predictor = SamPredictor(sam)
    for picture, masks in zip(pictures, found, strict=True):
        height, width = picture.image.shape[:2]
        predictor.set_image(picture.image)
        expected, _, _ = predictor.predict(np.array([[width / 2, height / 2]]), np.array([1]))
        assert np.array_equal(masks[0].numpy(), expected)


@pytest.mark.slow
def test_masks_are_compared_once_for_the_same_passes(tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def spy(*of: Any) -> Any:
        measured.append(of)
        return samopt.verify(*of)

    monkeypatch.setattr(samopt.bench, "verify", spy)
    scenes = scene_samples(1, 256)
    bench = small_bench(monkeypatch, BenchModel(tiny256, "sam_tiny", "sam_tiny"), samples=scenes, whole=True)
    kept, lossy = (Recipe([Step(pass_)], Budget(embedding_error=1.0)) for pass_ in (Exact(1.0), Lossy(-1.0)))
    entries = [Entry("base", 1, unmodified), *(Entry("kept", size, optimised(kept, size)) for size in (1, 2))]
    rows: list[Any] = list(bench.rows([*entries, Entry("lossy", 1, optimised(lossy, 1))]))
    base, one, two, bad = rows
    assert len(measured) == 2
    assert (base.mask_iou, base.min_iou, one.mask_iou, two.mask_iou) == (1, 1, 1, 1)
    assert base.miou == one.miou == two.miou > 0.5 > bad.miou
    assert bad.min_iou <= bad.mask_iou < 0.9
    objects = sum(int(scene.masks.any((1, 2)).sum()) for scene in scenes if scene.masks is not None)
    assert bench.setting.masks.startswith(f"{objects} on 1 pictures")


def test_pictures_are_what_is_encoded(sam: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def look(encoder: Any, pixels: Tensor) -> Any:
        seen.append(pixels)
        return encoder(pixels)

    bench = small_bench(monkeypatch, BenchModel(sam, "small", "random"), samples=pictures)
    list(bench.rows([Entry("base", 3, built(look))]))
    predictor = SamPredictor(sam)
    for pixels, picture in zip(seen[0], [*pictures, pictures[0]], strict=True):
        resized = torch.as_tensor(predictor.transform.apply_image(picture.image)).permute(2, 0, 1)
        assert torch.equal(pixels, sam.preprocess(resized)), "again from the first where there are too few"
    assert bench.setting.pictures == "2: picture 0, picture 1"
