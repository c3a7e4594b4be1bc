from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from torch import nn

import samopt
from samopt import NoSites, Numerics, Reference, Sample, Site, Skip
from samopt.passes import CastDtype, DevicePreprocess
from samopt.preprocess import ATTRIBUTE, DEVICE, encoder_input
from samopt.samples import scene_samples
from tests.models import random_sam
from tests.numerics import assert_bit_equal
from tests.snapshot import Snapshot


def cropped(sample: Sample, height: int) -> Sample:
    """The upper part of a scene, and of its masks."""
    assert sample.masks is not None
    return Sample(sample.image[:height], sample.masks[:, :height], name=sample.name)


@pytest.fixture(scope="module")
def scenes() -> list[Sample]:
    """Scenes of other sizes than the model's 256, so that they are resized."""
    wide, square, small = (scene_samples(1, size)[0] for size in (400, 301, 190))
    return [cropped(wide, 290), square, small]


@pytest.fixture(scope="module")
def noisy() -> list[Sample]:
    """A picture in which a resize shows who made it."""
    return [Sample(np.random.default_rng(0).integers(0, 256, (101, 77, 3), dtype=np.uint8))]


def test_masks_stay_and_what_it_costs_is_measured(tiny256: Sam, scenes: list[Sample]) -> None:
    reference = Reference.record(tiny256, scenes)
    ours = copy.deepcopy(tiny256)
    DevicePreprocess()(ours)
    agreement = samopt.verify(ours, reference)
    assert agreement.masks is not None
    assert agreement.masks.mean_iou >= 0.995
    assert agreement.masks.min_iou >= 0.98
    assert 0 < agreement.embedding_error < 0.01, "a few pixels differ, and that is seen"
    assert samopt.verify(tiny256, reference).equal


def test_optimize_reports_it_like_any_other_pass(noisy: list[Sample]) -> None:
    budget = samopt.Budget(masks=False, embedding_error=0.05)
    recipe = samopt.Recipe([samopt.Step(DevicePreprocess())], budget)
    (step,) = samopt.report(samopt.optimize(random_sam(), recipe, samples=noisy)).steps
    assert step.status == "applied"
    assert step.numerics is Numerics.LOSSY
    assert step.agreement is not None
    assert 0 < step.agreement.embedding_error < 0.05


def test_over_a_budget_it_is_dropped(noisy: list[Sample]) -> None:
    budget = samopt.Budget(masks=False, embedding_error=0.0)
    recipe = samopt.Recipe([samopt.Step(DevicePreprocess(), on_fail="drop")], budget)
    ours = samopt.optimize(random_sam(), recipe, samples=noisy)
    assert samopt.report(ours).steps[0].status == "dropped"
    assert ATTRIBUTE not in vars(ours)


def test_the_model_is_the_site_and_undo_leaves_no_trace(sam: Sam) -> None:
    before = Snapshot(sam)
    result = DevicePreprocess()(sam)
    assert result.sites == (Site("", {"size": 64}),)
    assert vars(sam)[ATTRIBUTE] == DEVICE
    assert type(sam) is Sam
    result.undo()
    before.assert_unchanged(sam)


def test_sam_predictor_answers_as_before(sam: Sam, pictures: Sequence[Sample]) -> None:
    before = SamPredictor(sam)
    before.set_image(pictures[0].image)
    DevicePreprocess()(sam)
    after = SamPredictor(sam)
    after.set_image(pictures[0].image)
    assert_bit_equal(after.get_image_embedding(), before.get_image_embedding())


def test_copies_pickles_and_later_passes_keep_it(sam: Sam, pictures: Sequence[Sample]) -> None:
    DevicePreprocess()(sam)
    image = torch.from_numpy(pictures[0].image)
    expected = encoder_input(sam, image)[0]
    cast = copy.deepcopy(sam)
    CastDtype()(cast)
    for model in (cast, copy.deepcopy(sam), pickle.loads(pickle.dumps(sam))):
        assert vars(model)[ATTRIBUTE] == DEVICE
        assert_bit_equal(encoder_input(model, image)[0], expected)


class OtherPreprocess(Sam):  # type: ignore[misc]
    """As of a relative that takes pixels from 0 to 1."""

    def preprocess(self, x: Any) -> Any:
        return super().preprocess(x / 255)


def renamed(sam: Sam) -> nn.Module:
    sam.__class__ = OtherPreprocess
    return sam


def without(sam: Sam, name: str, value: Any) -> nn.Module:
    delattr(sam, name)
    setattr(sam, name, value)
    return sam


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sam: sam.image_encoder, "it has no image encoder that says its img_size"),
        (lambda sam: without(sam, "image_encoder", nn.Identity()), "it has no image encoder that says its img_size"),
        (lambda sam: without(sam, "pixel_mean", [0.5]), "its pixel_mean is no tensor [3, 1, 1]"),
        (lambda sam: without(sam, "pixel_std", torch.ones(1)), "its pixel_std is no tensor [3, 1, 1]"),
        (renamed, "its preprocess is not the code of segment_anything's Sam.preprocess"),
    ],
)
def test_what_is_no_sam_or_preprocesses_otherwise_is_a_skip(sam: Sam, change: Any, reason: str) -> None:
    model = change(sam)
    assert list(DevicePreprocess().match(model)) == [Skip("", reason)]
    with pytest.raises(NoSites, match="DevicePreprocess found nothing to rewrite"):
        DevicePreprocess()(model)
