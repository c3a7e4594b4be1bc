"""Which rows benchmarks have, and which passes stand verification before they are timed."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam

import samopt.speed
from samopt.base import Pass
from samopt.bench import Bench, Entry
from samopt.bench_model import BenchModel
from samopt.bench_plan import Verified, forgiving, introductions, side_by_side, verified, waterfall
from samopt.errors import AccuracyError, Unsupported
from samopt.gate import Budget
from samopt.passes import (
    CastDtype,
    Compile,
    Float8Dynamic,
    HoistRelPos,
    Int8Dynamic,
    SDPAttention,
    TritonAttention,
    TritonLayerNorm,
)
from samopt.peers import Peer
from samopt.recipe import Recipe, Step
from samopt.samples import scene_samples
from samopt.tiny import load_tiny
from tests.benches import CPU, CUDA, SAME, small_bench, small_model
from tests.toys import Exact, Lossy, MoreWork


@pytest.fixture(autouse=True)
def one_small_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is verified on, unless a test says otherwise."""
    monkeypatch.setattr(sys.modules["samopt.verify"], "scene_samples", lambda: scene_samples(1, 256))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return small_bench(monkeypatch)


def test_the_plan_on_a_gpu() -> None:
    lossless, half = Recipe([Step(SDPAttention())], name="lossless"), Recipe([Step(CastDtype("float16"))], name="half")
    peer = Peer("peer", "torch", SAME)
    entries = side_by_side([Verified(lossless, {}), Verified(half, {})], [4, 1, 32, 4], CUDA, [peer])
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
    entries = side_by_side(
        [Verified(Recipe.of([SDPAttention()]), {})], sizes, CPU, [Peer("peer", "torch", SAME)], asked
    )
    assert [entry.batch_size for entry in entries if entry.what == "peer"] == expected


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.slow
def test_narrow_norms_are_verified_like_wide_ones_and_may_be_left_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    recipe = Recipe([Step(CastDtype()), Step(TritonLayerNorm(1024), required=False), Step(Compile(), required=False)])
    monkeypatch.setattr(Compile, "requires", refuse)
    stood = verified(recipe, CPU)
    assert stood.steps == recipe.steps[:2], "the pass as it was, not as it was verified"
    rows = list(bench.rows(side_by_side([stood], [1], CPU)))
    assert [row.note for row in rows] == [""] * len(rows)


def refuse(self: Compile, model: Any) -> None:
    raise Unsupported("there is no compiler")


def test_what_is_kept_only_if_faster_is_verified_whatever_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_nothing(*_: object) -> list[float]:
        raise AssertionError("something was timed")

    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    monkeypatch.setattr(samopt.speed, "median_seconds", time_nothing)
    recipe = Recipe([Step(MoreWork(), keep="if-faster"), Step(Exact(1.5), on_fail="drop", keep="if-faster")])
    assert verified(recipe, CPU).steps == recipe.steps[:1], "to be judged on the model that is timed"


def test_what_quantises_is_verified_each_alone_and_takes_the_others_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=256))
    steps = [
        Step(pass_, required=False, on_fail="drop") for pass_ in (Float8Dynamic(("lin1",)), Int8Dynamic(("lin1",)))
    ]
    found = verified(Recipe(steps, Budget(0, 0, 0, 1, 1.0), bench_rows=(("float8",), ("int8",))), CPU)
    assert found.steps == tuple(steps)
    *_, row = bench.rows(side_by_side([found], [1], CPU))
    assert row.note == ""
    assert row.remark == "without int8: its weights are float8 already (2 modules)"
    assert row.error is not None
    assert row.error > 1e-3


# Verification: on which model, and what is said of what did not stand


def test_trained_weights_are_verified_themselves(tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    optimize = samopt.optimize

    def spy(sam: Any, *arguments: Any, **options: Any) -> Any:
        seen.append((sam.image_encoder.img_size, options["samples"]))
        return optimize(sam, *arguments, **options)

    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=64))
    monkeypatch.setattr("samopt.bench_plan.optimize", spy)
    scenes = scene_samples(1, 256)
    before = {name: tensor.clone() for name, tensor in tiny256.state_dict().items()}
    lossless = Recipe([Step(HoistRelPos())])
    verified(lossless, CPU, BenchModel(tiny256, "sam_tiny", "photo.pth"), scenes)
    verified(lossless, CPU, BenchModel(tiny256, "vit_b", "random"), None)
    verified(lossless, CPU)
    assert seen == [(256, scenes), (64, None), (64, None)]
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny256.state_dict().items())


def test_what_did_not_stand_is_told_where_a_recipe_is_forgiving(tiny256: Sam) -> None:
    model = BenchModel(tiny256, "sam_tiny", "sam_tiny")
    recipe = Recipe([Step(SDPAttention()), Step(TritonAttention()), Step(Lossy(-1.0))])
    scenes = scene_samples(1, 256)
    with pytest.raises(Unsupported):
        verified(recipe, CPU, model, scenes)
    found = verified(forgiving(recipe), CPU, model, scenes)
    assert [type(step.pass_) for step in found.steps] == [SDPAttention]
    assert found.lost[TritonAttention].startswith("triton_attention skipped: ")
    assert found.lost[Lossy].startswith("Lossy dropped: mean mask IoU")
    with pytest.raises(AccuracyError):
        verified(Recipe([Step(Lossy(-1.0))]), CPU, model, scenes)


# Waterfalls


DTYPE, ROPE, SDPA, COMPILE = Step(CastDtype()), Step(HoistRelPos()), Step(SDPAttention()), Step(Compile())


def names(rows: list[list[Step]]) -> list[list[str]]:
    return [[type(step.pass_).__name__ for step in row] for row in rows]


def test_steps_are_introduced_as_the_recipe_says_and_the_rest_last() -> None:
    recipe = Recipe([ROPE, SDPA, DTYPE, Step(TritonLayerNorm()), COMPILE], bench_rows=(("dtype",), ("compile", "sdpa")))
    expected = [["CastDtype"], ["Compile", "SDPAttention"], ["HoistRelPos", "TritonLayerNorm"]]
    assert names(introductions(recipe)) == expected


def test_without_rows_every_step_is_a_row_and_all_are_compiled() -> None:
    assert names(introductions(Recipe([ROPE, DTYPE, COMPILE]))) == [["Compile"], ["HoistRelPos"], ["CastDtype"]]
    assert names(introductions(Recipe([ROPE, DTYPE]))) == [["HoistRelPos"], ["CastDtype"]]


@pytest.mark.parametrize("name", ["blog", "fast", "max"])
def test_built_in_waterfalls_end_at_the_whole_recipe(name: str) -> None:
    recipe = Recipe.of(name)
    rows = introductions(recipe)
    assert len(rows) == len(recipe.bench_rows), "none of the passes was forgotten"
    assert sorted(itertools.chain(*names(rows))) == sorted(type(step.pass_).__name__ for step in recipe.steps)


def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What every row would build: the recipe, the batch size, the samples, and the kinds that it is about."""
    built: list[tuple[Any, ...]] = []

    def capture(*of: Any) -> Any:
        built.append(of)
        return SAME

    monkeypatch.setattr("samopt.bench_plan.optimised", capture)
    return built


def test_each_row_runs_the_entries_so_far_in_file_order(monkeypatch: pytest.MonkeyPatch) -> None:
    built = captured(monkeypatch)
    budget = Budget(embedding_error=0.25)
    recipe = Recipe([ROPE, SDPA, DTYPE, COMPILE], budget, "mine", "", (("dtype",), ("compile",), ("sdpa", "rel_pos")))
    found = Verified(recipe, {})
    entries = waterfall(found, small_model(), [4, 1, 4], CPU, samples="mine", peers=[Peer("peer", "torch", SAME)])
    rows = ["+ dtype", "+ compile", "+ sdpa, rel_pos"]
    sizes = [1, *[4] * 3, *[1] * 3, 4]
    assert [entry.what for entry in entries] == ["unmodified", *rows, *rows, "peer"]
    assert [entry.batch_size for entry in entries] == sizes
    assert [entry.adds for entry in entries[:4]] == [(), ("dtype",), ("compile",), ("sdpa", "rel_pos")]
    assert [entry.cumulative for entry in entries] == [False, *[True] * 6, False]
    assert {entry.most_error for entry in entries[1:7]} == {0.25}
    assert [recipe.steps for recipe, *_ in built[:3]] == [(DTYPE,), (DTYPE, COMPILE), (ROPE, SDPA, DTYPE, COMPILE)]
    assert [(size, samples) for _, size, samples, _ in built] == [(4, "mine")] * 3 + [(1, "mine")] * 3
    assert [kinds for *_, kinds in built[:3]] == [[CastDtype], [Compile], [SDPAttention, HoistRelPos]]


def test_trained_weights_are_held_to_their_masks_not_to_the_embedding(
    tiny256: Sam, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(monkeypatch)
    found = Verified(Recipe([SDPA], Budget(embedding_error=0.25)), {})
    assert waterfall(found, BenchModel(tiny256, "sam_tiny", "sam_tiny"), [1], CPU)[1].most_error is None


def test_what_did_not_stand_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    built = captured(monkeypatch)
    recipe = Recipe([ROPE, SDPA, DTYPE], bench_rows=(("rel_pos", "sdpa"), ("dtype",)))
    lost: dict[type[Pass], str] = {SDPAttention: "sdpa dropped: it rounds", CastDtype: "dtype dropped: it costs"}
    _, partly, wholly = waterfall(Verified(recipe, lost), small_model(), [1], CPU)
    assert partly.build is SAME
    assert partly.remark == "sdpa dropped: it rounds"
    assert wholly == Entry("+ dtype", 1, None, adds=("dtype",), cumulative=True, remark="dtype dropped: it costs")
    assert [recipe.steps for recipe, *_ in built] == [(ROPE,)]


@pytest.mark.usefixtures("kernels_anywhere")
def test_passes_alone_come_with_what_they_require(monkeypatch: pytest.MonkeyPatch) -> None:
    built = captured(monkeypatch)
    triton = Step(TritonAttention())
    found = Verified(Recipe([SDPA, DTYPE, triton, Step(Exact(1.0))]), {Exact: "Exact skipped: no"})
    entries = waterfall(found, small_model(), [4, 2], CPU, each=True)
    alone = [entry for entry in entries if "alone" in entry.what]
    assert [entry.what for entry in alone] == [
        "sdpa alone",
        "dtype alone",
        "triton_attention alone, with dtype",
        "Exact alone",
    ]
    assert [entry.adds for entry in alone] == [("sdpa",), ("dtype",), ("triton_attention",), ("Exact",)]
    assert {(entry.batch_size, entry.cumulative) for entry in alone} == {(2, False)}
    assert [entry.remark for entry in alone] == ["", "", "", "Exact skipped: no"]
    assert [recipe.steps for recipe, *_ in built[-3:]] == [(SDPA,), (DTYPE,), (DTYPE, triton)]


def test_a_waterfall_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samopt.bench.PHOTO", (40, 60))
    model = small_model()
    entries = waterfall(Verified(Recipe([ROPE, SDPA]), {}), model, [1, 2], CPU, each=True)
    rows = list(small_bench(monkeypatch, model, whole=True).rows(entries))
    assert [row.status for row in rows] == ["timed"] * 7
    assert all(row.whole_milliseconds for row in rows)
    assert all(row.error is not None and row.error < 1e-5 for row in rows)
