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

from samopt import AlreadyApplied, InvalidInput, Pass, Reference, SamoptError, Sample, Step, optimize, report, verify
from samopt.passes import CastDtype, HoistRelPos, LinearPatchEmbed, SDPAttention
from samopt.report import ATTRIBUTE
from samopt.samples import scene_samples
from samopt.verify import OBJECTS
from tests.snapshot import Snapshot
from tests.toys import NECK, Exact, Lossy, Nested, Refuses, Root, Rounding

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
    monkeypatch.setattr(sys.modules["samopt.optimize"], "scene_samples", one_small_scene)
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


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sam": nn.Linear(1, 1)}, "Linear is no Sam"),
        ({"verify": "always"}, "verify must be 'each', 'end' or 'off', not 'always'"),
        ({"verify": True}, "verify must be 'each', 'end' or 'off', not True"),
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
