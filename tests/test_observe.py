from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

from samopt import InvalidInput, Reference, Sample
from samopt.observe import Outputs, observe
from samopt.passes import DevicePreprocess
from samopt.prompts import PromptBatch
from tests.numerics import read_only
from tests.snapshot import Snapshot


@pytest.fixture(scope="module")
def prompts() -> list[PromptBatch]:
    points = torch.tensor([[[20.0, 30.0]], [[40.0, 10.0]]])
    labels = torch.ones(2, 1, dtype=torch.int32)
    boxes = torch.tensor([[2.0, 3.0, 30.0, 40.0]])
    return [PromptBatch("point", True, points=points, labels=labels), PromptBatch("box", False, boxes=boxes)]


def test_answers_are_what_sam_predictor_answers(
    sam: Sam, pictures: Sequence[Sample], prompts: list[PromptBatch]
) -> None:
    outputs = observe(sam, pictures, lambda predictor, index: prompts)
    assert len(outputs.embeddings) == len(outputs.predictions) == len(pictures)
    predictor = SamPredictor(sam)
    for picture, embedding, answers in zip(pictures, outputs.embeddings, outputs.predictions, strict=True):
        predictor.set_image(picture.image)
        assert torch.equal(embedding, predictor.get_image_embedding())
        for batch, answer in zip(prompts, answers, strict=True):
            arguments = (batch.points, batch.labels, batch.boxes, batch.masks, batch.multimask)
            masks, iou, logits = predictor.predict_torch(*arguments)
            assert torch.equal(answer.logits, logits)
            assert torch.equal(answer.iou, iou)
            assert answer.masks.nbytes <= masks.numel() / 8 + masks.shape[2] * len(masks) * 3
            width = picture.image.shape[1]
            assert np.array_equal(np.unpackbits(answer.masks, axis=-1, count=width).astype(bool), masks.numpy())
            assert answer.choice.tolist() == iou.argmax(dim=1).tolist()
            chosen = np.unpackbits(answer.chosen(answer.choice), axis=-1, count=width)
            assert np.array_equal(chosen, masks[torch.arange(len(iou)), iou.argmax(dim=1)].numpy())


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("on_device", [False, True])
def test_a_picture_that_must_not_be_written_to(sam: Sam, pictures: Sequence[Sample], on_device: bool) -> None:
    if on_device:
        DevicePreprocess()(sam)
    fixed = [Sample(read_only(picture.image)) for picture in pictures]
    ours, theirs = (observe(sam, samples, lambda predictor, index: []) for samples in (fixed, pictures))
    assert ours.equals(theirs)


def test_many_prompts_are_answered_in_pieces(
    sam: Sam, pictures: Sequence[Sample], prompts: list[PromptBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = torch.rand(5, 1, 2, generator=torch.Generator().manual_seed(0)) * 40
    batch = PromptBatch("point", True, points=points, labels=torch.ones(5, 1, dtype=torch.int32))
    together = observe(sam, pictures[:1], lambda predictor, index: [batch]).predictions[0][0]
    monkeypatch.setattr("samopt.observe.PROMPTS", 2)
    (pieces,) = observe(sam, pictures[:1], lambda predictor, index: [batch]).predictions[0]
    torch.testing.assert_close(pieces.logits, together.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pieces.iou, together.iou, rtol=1e-4, atol=1e-5)
    assert pieces.masks.shape == together.masks.shape == (5, 3, 53, 5)


def test_observing_changes_nothing(sam: Sam, pictures: Sequence[Sample], prompts: list[PromptBatch]) -> None:
    sam.train()
    before = Snapshot(sam)
    outputs = observe(sam, pictures, lambda predictor, index: prompts)
    before.assert_unchanged(sam)
    assert not any(tensor.requires_grad for tensor in outputs.tensors())
    assert torch.is_grad_enabled()


def test_the_callback_gets_a_predictor_that_has_encoded_the_picture(sam: Sam, pictures: Sequence[Sample]) -> None:
    seen = []

    def ask(predictor: SamPredictor, index: int) -> list[PromptBatch]:
        seen.append((index, predictor.is_image_set, predictor.original_size))
        return []

    outputs = observe(sam, pictures, ask)
    assert seen == [(index, True, picture.image.shape[:2]) for index, picture in enumerate(pictures)]
    assert outputs.predictions == [[], []]


def test_every_timing_is_there_even_for_one_picture(
    sam: Sam, pictures: Sequence[Sample], prompts: list[PromptBatch]
) -> None:
    timings = observe(sam, pictures[:1], lambda predictor, index: prompts).timings
    assert min(timings.encode_seconds, timings.first_seconds, timings.decode_seconds) > 0
    assert timings.peak_bytes == 0, "on a CPU"
    assert observe(sam, pictures[:1], lambda predictor, index: []).timings.decode_seconds == 0


def test_what_cannot_be_run_is_told(sam: Sam) -> None:
    narrow = Sample(np.zeros((1, 500, 3), dtype=np.uint8), name="the sky")
    with pytest.raises(InvalidInput, match="the sky: 500 x 1 pixels are too narrow"):
        observe(sam, [narrow], lambda predictor, index: [])
    with pytest.raises(InvalidInput, match="on the meta device, without weights to measure"):
        observe(sam.to("meta"), [Sample(np.zeros((8, 8, 3), dtype=np.uint8))], lambda predictor, index: [])


@pytest.fixture
def outputs(sam: Sam, pictures: Sequence[Sample]) -> Outputs:
    return Reference.record(sam, pictures).outputs


@pytest.mark.parametrize("part", ["embedding", "logits", "iou"])
def test_one_changed_number_is_not_equal_and_one_nan_is_not_finite(outputs: Outputs, part: str) -> None:
    other = copy.deepcopy(outputs)
    assert outputs.equals(other)
    assert outputs.finite()
    last = other.predictions[-1][-1]
    tensor = {"embedding": other.embeddings[-1], "logits": last.logits, "iou": last.iou}[part]
    place = (-1,) * tensor.ndim
    tensor[place] = torch.nextafter(tensor[place], torch.tensor(torch.inf))
    assert not outputs.equals(other)
    assert other.finite()
    for value in (torch.nan, torch.inf, -torch.inf):
        tensor[place] = value
        assert not other.finite()


def test_outputs_of_other_shape_or_number_are_not_equal(outputs: Outputs) -> None:
    bare = dataclasses.replace(outputs, predictions=[])
    fewer = dataclasses.replace(bare, embeddings=outputs.embeddings[:1])
    assert not bare.equals(fewer)
    assert not fewer.equals(bare)
    narrower = dataclasses.replace(outputs, embeddings=[embedding[..., :-1] for embedding in outputs.embeddings])
    assert not outputs.equals(narrower)
