from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from segment_anything.modeling import Sam
from torch import nn

from samopt import Agreement, InvalidInput, Reference, Sample, verify
from samopt.observe import Outputs, Prediction, Timings
from samopt.prompts import KINDS, PromptBatch
from samopt.verify import compare, mask_iou, relative_error
from tests.snapshot import Snapshot
from tests.toys import Exact, Lossy

TIMINGS = Timings(0.1, 0.2, 0.01, 0)
SIZE = (4, 9)  # rows that fill no whole byte


def strip(start: int, stop: int) -> NDArray[np.bool_]:
    """A mask of columns [start, stop)."""
    mask = np.zeros(SIZE, dtype=np.bool_)
    mask[:, start:stop] = True
    return mask


def prediction(masks: Sequence[Sequence[NDArray[np.bool_]]], iou: Sequence[Sequence[float]]) -> Prediction:
    """Masks [B][C] of a picture, with the model's own opinion of them."""
    stacked = np.array(masks)
    logits = torch.from_numpy(stacked).float() * 2 - 1
    return Prediction(logits, torch.tensor(iou), np.packbits(stacked, axis=-1))


def outputs(*predictions: Prediction, embedding: float = 1.0) -> Outputs:
    """What a model answers on one picture."""
    return Outputs([torch.full((1, 2, 2, 2), embedding)], [list(predictions)], TIMINGS)


def reference(of: Outputs, kinds: Sequence[str], truth: NDArray[np.bool_] | None = None) -> Reference:
    picture = Sample(np.zeros((*SIZE, 3), dtype=np.uint8))
    packed = None if truth is None else np.packbits(truth, axis=-1)
    return Reference([picture], [[PromptBatch(kind, True) for kind in kinds]], [packed], of)


# Mask IoU


def test_mask_iou_is_that_of_plain_numpy() -> None:
    random = np.random.default_rng(0)
    masks, others = random.random((2, 20, 13, 21)) < random.random((2, 20, 1, 1))
    masks[:3], others[2:5] = False, False
    expected = [(a & b).sum() / (a | b).sum() if (a | b).any() else 1.0 for a, b in zip(masks, others, strict=True)]
    found = mask_iou(np.packbits(masks, axis=-1), np.packbits(others, axis=-1))
    assert np.array_equal(found, expected)
    assert found[2] == 1.0, "two empty masks agree"
    assert found[0] == 0.0, "an empty mask and one that is not do not"


# Relative error


def test_relative_error_is_pooled_over_all_tensors() -> None:
    values, truth = [torch.tensor([3.0, 0.0]), torch.tensor([1.0])], [torch.tensor([0.0, 0.0]), torch.tensor([5.0])]
    assert relative_error(values, truth) == pytest.approx(1.0)  # |(3, 0, -4)| / |(0, 0, 5)|
    assert relative_error(truth, truth) == 0.0
    assert relative_error([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == 1.0


def test_relative_error_sees_what_float32_sums_would_lose() -> None:
    truth = torch.full((1000,), 1e-20)
    assert relative_error([truth * 1.5], [truth]) == pytest.approx(0.5)


# Agreement, on answers made by hand


def test_figures_of_answers_made_by_hand() -> None:
    # Two objects, two masks each. Of the first the reference chooses mask 0, of the second mask 1.
    theirs = prediction([[strip(0, 4), strip(0, 8)], [strip(5, 6), strip(5, 9)]], [[0.9, 0.1], [0.2, 0.8]])
    # The model's mask 0 of the first is a quarter as wide, and it prefers its mask 1; of the second it agrees.
    mine = prediction([[strip(0, 1), strip(0, 8)], [strip(0, 9), strip(5, 9)]], [[0.3, 0.7], [0.2, 0.8]])
    truth = np.stack([strip(0, 4), strip(5, 9)])
    agreement = compare(
        outputs(mine, theirs, embedding=1.5), reference(outputs(theirs, theirs), ("point", "box"), truth)
    )
    point, box, masks = agreement.kinds["point"], agreement.kinds["box"], agreement.masks
    assert point.ious == (0.25, 1.0)
    assert (point.mean_iou, point.min_iou, point.changed) == (0.625, 0.25, 0.5)
    assert point.truth == pytest.approx((4 / 8 + 1) / 2), "of the model's own choices"
    assert point.reference_truth == 1.0
    assert (box.ious, box.changed, box.truth) == ((1.0, 1.0), 0.0, 1.0)
    assert masks is not None
    assert masks.ious == (0.25, 1.0, 1.0, 1.0)
    assert (masks.mean_iou, masks.min_iou, masks.changed, masks.truth) == (0.8125, 0.25, 0.25, 0.875)
    assert masks.p5_iou == pytest.approx(0.25 + 0.15 * 0.75), "interpolated between the worst two of four"
    assert agreement.embedding_error == pytest.approx(0.5)
    assert agreement.logit_error > 0
    assert agreement.finite
    assert not agreement.equal


def test_kinds_with_more_prompts_weigh_more() -> None:
    one, full, none = strip(0, 9), [[1.0]], strip(0, 0)
    theirs = outputs(prediction([[one]] * 3, full * 3), prediction([[one]], full))
    mine = outputs(prediction([[one]] * 3, full * 3), prediction([[none]], full))
    masks = compare(mine, reference(theirs, ("point", "box"), np.stack([one] * 3)[:1])).masks
    assert masks is not None
    assert masks.mean_iou == 0.75
    assert masks.truth == pytest.approx(0.75)


def test_without_truth_there_is_no_truth_figure() -> None:
    theirs = outputs(prediction([[strip(0, 3)]], [[1.0]]))
    masks = compare(theirs, reference(theirs, ("point",))).masks
    assert masks is not None
    assert masks.truth is None
    assert masks.reference_truth is None
    assert "ground-truth" not in str(compare(theirs, reference(theirs, ("point",))))


def test_untrained_weights_are_compared_by_numbers_only() -> None:
    theirs = outputs(prediction([[strip(0, 3)]], [[1.0]]))
    untrained = dataclasses.replace(reference(theirs, ("point",)), trained=False)
    agreement = compare(outputs(prediction([[strip(5, 9)]], [[1.0]]), embedding=2.0), untrained)
    assert agreement.masks is None
    assert agreement.kinds == {}
    assert agreement.embedding_error == pytest.approx(1.0)
    assert "masks: not measured, untrained weights" in str(agreement)


def test_agreement_as_text_and_json() -> None:
    theirs = outputs(prediction([[strip(0, 3)]], [[1.0]]))
    agreement = compare(theirs, reference(theirs, ("point",), strip(0, 3)[None]))
    assert "mask IoU mean 1.0000, min 1.0000, 0.0% of choices changed; ground-truth mIoU 1.0000 -> 1.0000" in str(
        agreement
    )
    figures = json.loads(json.dumps(agreement.to_dict(), allow_nan=False))
    assert figures["masks"]["mean_iou"] == figures["kinds"]["point"]["min_iou"] == 1.0
    assert figures["encode_seconds"] == TIMINGS.encode_seconds


def test_nan_is_told_and_is_still_json() -> None:
    theirs = outputs(prediction([[strip(0, 3)]], [[1.0]]))
    agreement = compare(outputs(*theirs.predictions[0], embedding=float("nan")), reference(theirs, ("point",)))
    assert not agreement.finite
    assert str(agreement).startswith("NaN or infinity in the outputs")
    assert json.loads(json.dumps(agreement.to_dict(), allow_nan=False))["embedding_error"] is None


# References and models


def test_a_model_agrees_with_itself_and_nothing_changes(sam: Sam, pictures: list[Sample]) -> None:
    sam.train()
    before = Snapshot(sam)
    recorded = Reference.record(sam, pictures)
    agreement = verify(sam, recorded)
    before.assert_unchanged(sam)
    assert agreement.equal
    assert (agreement.embedding_error, agreement.logit_error) == (0.0, 0.0)
    assert agreement.masks is not None
    assert (agreement.masks.mean_iou, agreement.masks.min_iou, agreement.masks.changed) == (1.0, 1.0, 0.0)
    assert set(agreement.kinds) == set(KINDS)
    assert verify(copy.deepcopy(sam), recorded).equal


def test_another_model_is_told_apart_in_every_kind(sam: Sam, pictures: list[Sample]) -> None:
    recorded = Reference.record(sam, pictures)
    Lossy(-1.0)(sam)
    agreement = verify(sam, recorded)
    assert not agreement.equal
    assert agreement.embedding_error == pytest.approx(2.0)
    assert agreement.logit_error > 0.01
    assert agreement.masks is not None
    assert agreement.masks.min_iou < 1
    assert {kind for kind, of in agreement.kinds.items() if of.mean_iou < 1} == set(KINDS)


def test_a_copy_that_only_rounds_differs_but_little(sam: Sam, pictures: list[Sample]) -> None:
    recorded = Reference.record(sam, pictures)
    Exact(1 + 2**-20)(sam)
    agreement = verify(sam, recorded)
    assert not agreement.equal
    assert agreement.embedding_error == pytest.approx(2**-20, rel=0.1)


def truths(masks: Any) -> list[Sample]:
    return [Sample(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8), masks)]


def test_prompts_come_from_the_truth_where_there_is_some(sam: Sam) -> None:
    masks = np.zeros((2, 48, 64), dtype=np.bool_)
    masks[0, 3:9, 5:12] = True  # and the second object is not to be seen
    recorded = Reference.record(sam, truths(masks))
    assert [batch.kind for batch in recorded.prompts[0]] == list(KINDS)
    assert recorded.truths[0] is not None
    assert np.array_equal(recorded.truths[0], np.packbits(masks[:1], axis=-1))
    box = next(batch.boxes for batch in recorded.prompts[0] if batch.kind == "box")
    assert box is not None
    assert box.tolist() == [[5.0, 3.0, 11.0, 8.0]], "at the model's 64 pixels"


@pytest.mark.parametrize("masks", [None, np.zeros((0, 48, 64), dtype=np.bool_), np.zeros((2, 48, 64), dtype=np.bool_)])
def test_a_picture_without_objects_gets_prompts_all_the_same(sam: Sam, masks: Any) -> None:
    recorded = Reference.record(sam, truths(masks))
    assert [batch.kind for batch in recorded.prompts[0]] == list(KINDS)
    assert recorded.truths == [None]
    assert verify(sam, recorded).equal


def test_a_model_that_finds_nothing_gets_the_middle_of_the_picture(sam: Sam) -> None:
    class Blind(type(sam)):  # type: ignore[misc]
        mask_threshold = float("inf")

    sam.__class__ = Blind
    recorded = Reference.record(sam, truths(None))
    box = next(batch.boxes for batch in recorded.prompts[0] if batch.kind == "box")
    assert box is not None
    assert box.tolist() == [[16.0, 12.0, 47.0, 35.0]]
    agreement = verify(sam, recorded)
    assert agreement.masks is not None
    assert agreement.masks.mean_iou == 1.0, "empty masks agree"


def test_weights_that_cannot_place_masks_are_called_untrained(sam: Sam, pictures: list[Sample]) -> None:
    speck = np.zeros((1, 48, 64), dtype=np.bool_)
    speck[0, 20, 30] = True
    assert not Reference.record(sam, truths(speck)).trained
    assert Reference.record(sam, pictures).trained, "without truth nobody can tell"
    assert not Reference.record(sam, pictures, masks=False).trained, "but it may be said"
    assert verify(sam, Reference.record(sam, pictures, masks=False)).masks is None


def test_the_embedded_model_is_called_trained(tiny256: Sam) -> None:
    recorded = Reference.record(tiny256)
    assert recorded.trained
    assert len(recorded.samples) > 1
    masks = compare(recorded.outputs, recorded).masks
    assert masks is not None
    assert masks.truth is not None
    assert masks.truth == masks.reference_truth
    assert masks.truth > 0.5


def test_kinds_and_objects_may_be_chosen(sam: Sam) -> None:
    masks = np.zeros((6, 48, 64), dtype=np.bool_)
    for index in range(5):  # and the last one is not to be seen
        masks[index, 3 : 9 + index, 5 * index : 5 * index + 9] = True
    recorded = Reference.record(sam, truths(masks), kinds=("box", "mask"), objects=None)
    assert [batch.kind for batch in recorded.prompts[0]] == ["box", "mask"]
    agreement = verify(sam, dataclasses.replace(recorded, trained=True))
    assert agreement.equal
    assert [len(of.ious) for of in agreement.kinds.values()] == [5, 5]
    two = Reference.record(sam, truths(masks), objects=2).truths[0]
    assert two is not None
    assert len(two) == 2


def test_bad_arguments_are_named(sam: Sam, pictures: list[Sample]) -> None:
    with pytest.raises(InvalidInput, match="Linear is no Sam"):
        Reference.record(nn.Linear(1, 1), pictures)
    with pytest.raises(InvalidInput, match="samples is empty"):
        Reference.record(sam, [])
    with pytest.raises(InvalidInput, match="unknown kind of prompt 'words'; known: point, points"):
        Reference.record(sam, pictures, kinds=("box", "words"))
    with pytest.raises(InvalidInput, match="Linear is no Sam"):
        verify(nn.Linear(1, 1), Reference.record(sam, pictures))
    not_recorded: Any = pictures
    with pytest.raises(InvalidInput, match=r"verify needs a Reference, not list: make one by Reference\.record"):
        verify(sam, not_recorded)
    assert isinstance(verify(sam, Reference.record(sam, pictures)), Agreement)
