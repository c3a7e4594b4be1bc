from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from torch import nn

import samopt.speed
from samopt import (
    AlreadyApplied,
    Budget,
    InvalidInput,
    Pass,
    Recipe,
    Reference,
    SamoptError,
    Sample,
    Step,
    optimize,
    report,
    verify,
)
from samopt.passes import CastDtype, Compile, HoistRelPos, LinearPatchEmbed, SDPAttention
from samopt.report import ATTRIBUTE
from samopt.samples import scene_samples
from samopt.verify import OBJECTS
from tests.snapshot import Snapshot
from tests.toys import NECK, Exact, LessWork, Lossy, MoreWork, Nested, Refuses, Root, Rounding, counted_seconds

FLOAT: list[Pass] = [LinearPatchEmbed(), HoistRelPos(), SDPAttention()]


def statuses(model: nn.Module) -> list[str]:
    return [step.status for step in report(model).steps]


# What comes back


def test_a_copy_is_optimised_and_the_argument_left_as_it_was(sam: Sam, pictures: list[Sample]) -> None:
    sam.train()
    sam.image_encoder.neck[0].weight.requires_grad_(False)
    sam.image_encoder.register_forward_hook(hook)
    before = Snapshot(sam)
    fast = optimize(sam, FLOAT, samples=pictures)
    before.assert_unchanged(sam)
    assert fast is not sam
    assert statuses(fast) == ["applied"] * 3
    assert not fast.training
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    assert fast.image_encoder._forward_hooks


def hook(module: nn.Module, args: Any, output: Any) -> None:
    """Does nothing, importable by name."""


def test_in_place_the_argument_itself_is_optimised(sam: Sam, pictures: list[Sample]) -> None:
    sam.train()
    reference = Reference.record(sam, pictures)
    weight, value = sam.image_encoder.pos_embed, sam.image_encoder.pos_embed.detach().clone()
    assert optimize(sam, FLOAT, samples=pictures, inplace=True) is sam
    assert statuses(sam) == ["applied"] * 3
    assert sam.image_encoder.pos_embed is weight
    assert torch.equal(weight, value)
    assert not sam.training
    assert not any(parameter.requires_grad for parameter in sam.parameters())
    assert not verify(sam, reference).equal


@pytest.mark.parametrize("passes", [FLOAT, [*FLOAT, CastDtype()]], ids=["float32", "bfloat16"])
def test_class_attributes_and_state_dict_stay(sam: Sam, pictures: list[Sample], passes: list[Any]) -> None:
    fast = optimize(sam, [Step(pass_, on_fail="drop") for pass_ in passes], samples=pictures, verify="off")
    assert type(fast) is type(sam)
    names = [fqn for fqn, _ in sam.named_modules()]
    assert [fqn for fqn, _ in fast.named_modules()] == names
    for fqn in names:
        ours, theirs = fast.get_submodule(fqn), sam.get_submodule(fqn)
        assert type(ours) is type(theirs)
        assert set(dir(theirs)) <= set(dir(ours))
        added = {name for name in vars(ours).keys() - vars(theirs).keys() if not name.startswith("_")}
        assert added <= {"forward", "predict_masks"}, "nothing new to see but its methods"
    shapes = {key: value.shape for key, value in sam.state_dict().items()}
    assert {key: value.shape for key, value in fast.state_dict().items()} == shapes
    fast.load_state_dict(sam.state_dict())


def test_the_result_does_what_a_sam_does(sam: Sam, pictures: list[Sample]) -> None:
    fast = optimize(sam, [HoistRelPos()], samples=pictures)
    predictors = [SamPredictor(model) for model in (sam, fast)]
    answers = []
    for predictor in predictors:
        predictor.set_image(pictures[0].image)
        answers.append(predictor.predict(np.array([[10.0, 12.0]]), np.array([1])))
    for ours, theirs in zip(*answers, strict=True):
        assert np.array_equal(ours, theirs)
    image = torch.zeros(3, 64, 48)
    batch = [{"image": image, "original_size": (30, 40), "boxes": torch.tensor([[1.0, 2.0, 30.0, 40.0]])}]
    with torch.no_grad():
        (mine,), (other,) = fast(batch, multimask_output=True), sam(batch, multimask_output=True)
    assert all(torch.equal(mine[key], other[key]) for key in ("masks", "iou_predictions", "low_res_logits"))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_answer_the_same(sam: Sam, pictures: list[Sample], again: Callable[[Sam], Sam]) -> None:
    passes: list[Pass | Step] = [*FLOAT, Step(CastDtype(), on_fail="drop"), Nested(), Root()]
    fast = optimize(sam, passes, verify="off")
    other = again(fast)
    reference = Reference.record(fast, pictures)
    assert verify(other, reference).equal
    assert report(other) == report(fast)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert verify(fast, reference).equal, "they share nothing"
    assert not verify(other, reference).equal


def test_an_optimised_model_is_not_called_unmodified(sam: Sam, pictures: list[Sample]) -> None:
    first = optimize(sam, [HoistRelPos()], samples=pictures)
    before = Snapshot(first)
    with pytest.raises(AlreadyApplied, match="came out of"):
        optimize(first, [SDPAttention()], samples=pictures)
    before.assert_unchanged(first)


def test_threads_share_a_model(sam: Sam, pictures: list[Sample]) -> None:
    fast = optimize(sam, [*FLOAT, CastDtype()], verify="off")
    reference = Reference.record(fast, pictures)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(reference.observe, [fast] * 8))
    assert all(outputs.equals(reference.outputs) for outputs in answers)


# Moving and casting


def test_it_moves_between_devices(sam: Sam) -> None:
    fast = optimize(sam, [*FLOAT, CastDtype()], verify="off")
    dtypes = {name: tensor.dtype for name, tensor in fast.state_dict().items()}
    assert fast.cpu() is fast
    moved = fast.to("meta")
    assert moved is fast
    assert all(tensor.is_meta for tensor in (*moved.parameters(), *moved.buffers())), "tables of passes too"
    assert {name: tensor.dtype for name, tensor in fast.state_dict().items()} == dtypes
    assert all(tensor.device.type == "cpu" for tensor in sam.state_dict().values())


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta", torch.float16),
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.type(torch.float16),
        lambda model: model.float(),
    ],
)
def test_casting_is_a_clear_error_before_anything_changed(sam: Sam, cast: Callable[[Sam], Any]) -> None:
    fast = optimize(sam, [CastDtype()], verify="off")
    for model in (fast, copy.deepcopy(fast)):
        before = Snapshot(model)
        with pytest.raises(InvalidInput, match=r"an optimised model keeps its dtypes \(.*CastDtype"):
            cast(model)
        before.assert_unchanged(model)


def test_casting_to_the_dtype_it_has_is_no_error(sam: Sam) -> None:
    fast = optimize(sam, FLOAT, verify="off")
    assert fast.float() is fast
    assert fast.to(torch.float32) is fast


# How it is measured


def test_each_pass_is_measured_after_it_ran(sam: Sam, pictures: list[Sample]) -> None:
    made = report(optimize(sam, [Exact(), Rounding(1 + 2**-21), Root(factor=1.0)], samples=pictures))
    assert made.baseline is not None
    assert (made.baseline.equal, made.baseline.embedding_error) == (True, 0.0)
    first, second, third = (step.agreement for step in made.steps)
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.equal
    assert second.embedding_error == pytest.approx(2**-21, rel=0.1)
    assert not second.equal
    assert third.embedding_error == second.embedding_error, "against the unmodified model, not the step before"


def test_measured_at_the_end_only_the_last_applied_entry_has_figures(sam: Sam, pictures: list[Sample]) -> None:
    steps: list[Pass | Step] = [Exact(), Rounding(1 + 2**-21), Step(Refuses(), required=False)]
    made = report(optimize(sam, steps, samples=pictures, verify="end"))
    assert [step.status for step in made.steps] == ["applied", "applied", "skipped"]
    assert [step.agreement is not None for step in made.steps] == [False, True, False]
    assert made.steps[1].agreement is not None
    assert made.steps[1].agreement.embedding_error > 0


def test_nothing_is_run_when_measuring_is_off(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> None:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(type(sam.image_encoder), "forward", run)
    made = report(optimize(sam, [Exact(), Lossy(-1.0)], verify="off"))
    assert made.baseline is None
    assert [step.agreement for step in made.steps] == [None, None]
    assert all(step.seconds > 0 for step in made.steps)


def test_samples_are_drawn_where_none_are_given(tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    one_small_scene = functools.partial(scene_samples, 1, 256)
    monkeypatch.setattr(sys.modules["samopt.verify"], "scene_samples", one_small_scene)
    made = report(optimize(tiny256, FLOAT, verify="end"))
    assert made.baseline is not None
    assert len(made.baseline.kinds["point"].ious) <= OBJECTS, "the objects of one scene"
    measured = made.steps[-1].agreement
    assert measured is not None
    for agreement in (made.baseline, measured):
        assert agreement.masks is not None
        assert agreement.masks.truth is not None
        assert agreement.masks.truth > 0.5
        assert agreement.masks.mean_iou > 0.999


def test_nothing_is_printed_without_a_terminal(
    sam: Sam, pictures: list[Sample], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    optimize(sam, [Exact(), Lossy()], samples=pictures)
    assert capfd.readouterr() == ("", "")


# Entries kept only if they make this model faster here

ANY = Budget(mean_iou=0.0, min_iou=0.0, kind_mean_iou=0.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's time is its arithmetic, counted."""
    monkeypatch.setattr(samopt.speed, "median_seconds", counted_seconds)


def if_faster(*passes: Pass) -> Recipe:
    return Recipe([Step(pass_, keep="if-faster") for pass_ in passes], ANY)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("when", ["each", "end", "off"])
def test_what_is_not_faster_is_undone_and_what_is_stays(sam: Sam, pictures: list[Sample], when: Any) -> None:
    fast = optimize(sam, if_faster(MoreWork(), LessWork()), samples=pictures, verify=when)
    more, less = report(fast).steps
    assert (more.status, less.status) == ("undone", "applied")
    assert more.speed is not None
    assert less.speed is not None
    assert more.reason == f"not faster: {more.speed}"
    assert str(more.speed).startswith("encoder blocks: ")
    assert less.reason == ""
    assert more.speed.after > more.speed.before == less.speed.before, "the second starts without the first"
    # Two blocks of 16 tokens x 64: an MLP more in each, of 2 products of 64 x 256.
    assert more.speed.after - more.speed.before == pytest.approx(2 * 2 * 2 * 16 * 64 * 256 / 1e9)
    assert less.speed.batch_size == 1
    assert (more.agreement is not None) is (when == "each")
    expected = Reference.record(optimize(sam, [LessWork()], verify="off"), pictures)
    assert verify(fast, expected).equal


def test_an_undone_pass_is_no_step_that_the_next_is_held_to(
    sam: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samopt.speed, "median_seconds", lambda calls, device: [1.0] * len(calls))
    steps = [Step(LessWork(), keep="if-faster"), Step(Exact())]
    undone, exact = report(optimize(sam, Recipe(steps, ANY), samples=pictures)).steps
    assert (undone.status, exact.status) == ("undone", "applied")
    assert undone.agreement is not None
    assert exact.agreement is not None
    assert undone.agreement.embedding_error > 0 == exact.agreement.embedding_error


def test_what_is_emulated_is_not_even_tried(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was applied")

    monkeypatch.setattr(MoreWork, "rewrite", refuse)
    passes = [Step(LessWork(emulated=True)), Step(MoreWork(emulated=True), keep="if-faster")]
    kept, undone = report(optimize(sam, passes, verify="off")).steps
    assert (kept.status, kept.emulated) == ("applied", True)
    assert (undone.status, undone.reason) == ("undone", "emulated on cpu, so not faster")
    assert undone.speed is None


def test_what_leaves_the_blocks_alone_or_has_none_to_time_is_kept(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.speed, "median_seconds", None)
    made = report(optimize(sam, if_faster(Exact()), verify="off"))
    (row,) = made.steps
    assert (row.status, row.speed) == ("applied", None)
    assert row.reason == "its sites are outside the encoder's blocks: not timed, kept"
    assert row.reason in " ".join(str(made).split())
    (row,) = report(optimize(copy.deepcopy(sam).to("meta"), if_faster(MoreWork()), verify="off")).steps
    assert (row.status, row.reason) == ("applied", "nothing takes time on the meta device: not timed, kept")
    sam.image_encoder.blocks = nn.ModuleList()
    (row,) = report(optimize(sam, if_faster(Exact()), verify="off")).steps
    assert (row.status, row.reason) == ("applied", "the image encoder has no blocks to time: not timed, kept")


@pytest.mark.usefixtures("dynamo_only")
def test_compiling_is_timed_against_blocks_that_are_not_compiled(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Any, device: torch.device) -> list[float]:
        return [2.0 if isinstance(call.func, nn.Module) else 1.0 for call in calls]

    monkeypatch.setattr(samopt.speed, "median_seconds", timed)
    monkeypatch.setattr(Compile, "requires", lambda self, model: None)
    less, compiling = report(optimize(sam, if_faster(LessWork(), Compile()), verify="off")).steps
    assert less.speed is not None
    assert (less.speed.before, less.speed.after) == (2.0, 2.0), "two blocks, compiled either way"
    assert less.status == "undone"
    assert compiling.speed is not None
    assert (compiling.speed.before, compiling.speed.after) == (4.0, 2.0)
    assert compiling.status == "applied"


@pytest.mark.usefixtures("counted")
def test_the_batch_size_is_what_was_asked_for(sam: Sam) -> None:
    one, three = (
        report(optimize(sam, if_faster(LessWork()), verify="off", batch_size=size)).steps[0].speed for size in (1, 3)
    )
    assert one is not None
    assert three is not None
    assert (one.batch_size, three.batch_size) == (1, 3)
    assert (one.before, one.after) == pytest.approx((three.before, three.after)), "per image"


@pytest.mark.parametrize("when", ["each", "off"])
def test_blocks_that_cannot_be_timed(
    sam: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch, when: Any
) -> None:
    def fail(*_: Any) -> list[float]:
        raise torch.OutOfMemoryError("no room\nfor that")

    monkeypatch.setattr(samopt.speed, "median_seconds", fail)
    before = Snapshot(sam)
    recipe = Recipe([Step(HoistRelPos()), Step(LessWork(), keep="if-faster")], ANY)
    with pytest.raises(
        SamoptError,
        match=r"^LessWork\(.*\) failed while blocks were timed at batch_size=2: OutOfMemoryError: no room \(",
    ):
        optimize(sam, recipe, samples=pictures, inplace=True, verify=when, batch_size=2)
    before.assert_unchanged(sam)
    optional = Recipe([Step(LessWork(), required=False, keep="if-faster"), Step(Exact())], ANY)
    fast = optimize(sam, optional, samples=pictures, verify=when)
    row = report(fast).steps[0]
    assert (row.status, row.reason) == ("skipped", "it could not be timed: OutOfMemoryError: no room")
    assert verify(fast, Reference.record(sam, pictures)).equal


def test_real_times_are_shown(tiny256: Sam) -> None:
    made = report(optimize(tiny256, if_faster(SDPAttention()), verify="off"))
    speed = made.steps[0].speed
    assert speed is not None
    assert speed.before > 0 < speed.after
    assert (made.steps[0].status == "applied") is speed.faster
    assert str(speed) in " ".join(str(made).split())


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sam": nn.Linear(1, 1)}, "Linear is no Sam"),
        ({"verify": "always"}, "verify must be 'each', 'end' or 'off', not 'always'"),
        ({"verify": True}, "verify must be 'each', 'end' or 'off', not True"),
        ({"batch_size": 0}, "batch_size must be a number of images, 1 or more, not 0"),
        ({"batch_size": True}, "batch_size must be a number of images, 1 or more, not True"),
        ({"batch_size": 1.5}, r"batch_size must be a number of images, 1 or more, not 1\.5"),
        ({"samples": []}, "samples is empty"),
        ({"samples": "no/such/folder"}, "no/such/folder: there is no such image file"),
        ({"samples": [np.zeros((4, 4), dtype=np.uint8)]}, "sample 0: an image must be"),
    ],
)
def test_a_bad_argument_is_told_before_anything_is_copied(
    sam: Sam, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(copy, "deepcopy", None)
    before = Snapshot(sam)
    with pytest.raises(InvalidInput, match=message):
        optimize(**{"sam": sam, "recipe": [Exact()], **arguments})
    before.assert_unchanged(sam)
    assert ATTRIBUTE not in vars(sam)
    with pytest.raises(SamoptError, match="has no report"):
        report(sam)
    assert sam.get_submodule(NECK)
