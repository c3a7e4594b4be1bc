"""What a model answers through each of Meta's interfaces, and how far from the unmodified model's answer that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

from samopt import Sample
from samopt.prompts import box_of, choose_objects

# Built-in recipes that promise the unmodified model's masks. Not "max", whose steps on a CPU are those of "fast"; nor
# "blog", which makes weights sparse and promises only its own loose budget. tests/test_recipes.py holds both to that.
RECIPES = ("exact", "fast")
KINDS = ("point", "points", "box", "points + box", "mask", "mask + points", "boxes")


@dataclass(frozen=True)
class Answer:
    """The masks for one prompt.

    Attributes:
        masks: bool [C, H, W], at the picture's size.
        iou: predicted IoU, float32 [C].
        low_res: float32 [C, h, w].
        logits: what `masks` are thresholded from, float32 [C, H, W].
        truth: the object that was prompted, bool [H, W].
    """

    masks: NDArray[np.bool_]
    iou: NDArray[np.float32]
    low_res: NDArray[np.float32]
    logits: NDArray[np.float32]
    truth: NDArray[np.bool_]


@dataclass(frozen=True)
class Prompts:
    """The prompts for one object of a picture, in its pixels: arguments of `SamPredictor.predict`."""

    truth: NDArray[np.bool_]
    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    box: NDArray[np.float64]
    mask: NDArray[np.float32]

    def arguments(self, kind: str) -> dict[str, Any]:
        """The arguments for a prompt of one of `KINDS` but "boxes"."""
        one: dict[str, Any] = {"point_coords": self.points[:1], "point_labels": self.labels[:1]}
        several: dict[str, Any] = {"point_coords": self.points, "point_labels": self.labels}
        box: dict[str, Any] = {"box": self.box}
        mask: dict[str, Any] = {"mask_input": self.mask}
        return {
            "point": one,
            "points": several,
            "box": box,
            "points + box": several | box,
            "mask": mask,
            "mask + points": mask | several,
        }[kind]


def prompts_for(predictor: SamPredictor, sample: Sample, count: int) -> list[Prompts]:
    """Prompts for objects of a picture that `predictor`, of the unmodified model, has encoded."""
    assert sample.masks is not None
    assert sample.points is not None
    found = []
    for index in choose_objects(sample.masks, count):
        truth, point = sample.masks[index], sample.points[index]
        beside = np.argwhere(~truth)[:, ::-1]
        beside = beside[np.abs(beside - point).sum(axis=1).argmin()]
        second = np.argwhere(truth)[len(np.argwhere(truth)) // 3][::-1]
        box = box_of(truth)
        _, _, low_res = predictor.predict(box=box, multimask_output=False)
        points, labels = np.stack([point, second, beside]).astype(float), np.array([1, 1, 0])
        found.append(Prompts(truth, points, labels, box, low_res))
    return found


def predict(predictor: SamPredictor, kind: str, multimask: bool, objects: Sequence[Prompts]) -> Iterator[Answer]:
    """What SamPredictor answers to prompts of a kind, one object after the other, or all boxes at once."""
    if kind == "boxes":
        boxes = torch.as_tensor(np.stack([prompt.box for prompt in objects]), device=predictor.device)
        transformed = predictor.transform.apply_boxes_torch(boxes, predictor.original_size)
        arguments = (None, None, transformed, None, multimask)
        columns = [tensor.numpy() for tensor in predictor.predict_torch(*arguments)]
        columns.append(predictor.predict_torch(*arguments, return_logits=True)[0].numpy())
        for masks, scores, low_res, logits, prompt in zip(*columns, objects, strict=True):
            yield Answer(masks, scores, low_res, logits, prompt.truth)
        return
    for prompt in objects:
        given = prompt.arguments(kind) | {"multimask_output": multimask}
        logits = predictor.predict(**given, return_logits=True)[0]
        masks, scores, low_res = predictor.predict(**given)
        yield Answer(masks, scores, low_res, logits, prompt.truth)


def call(sam: Sam, samples: Sequence[Sample], objects: Sequence[Sequence[Prompts]], multimask: bool) -> list[Answer]:
    """What `sam(batched_input)` answers to pictures of several shapes, each with another kind of prompt."""
    predictor = SamPredictor(sam)
    batch: list[dict[str, Any]] = []
    for index, (sample, prompts) in enumerate(zip(samples, objects, strict=True)):
        size = sample.image.shape[:2]
        pixels = torch.as_tensor(predictor.transform.apply_image(sample.image)).permute(2, 0, 1)
        record: dict[str, Any] = {"image": pixels, "original_size": size}
        if index % 3 != 1:
            points = torch.as_tensor(np.stack([prompt.points for prompt in prompts]))
            record["point_coords"] = predictor.transform.apply_coords_torch(points, size)
            record["point_labels"] = torch.as_tensor(np.stack([prompt.labels for prompt in prompts]))
        if index % 3 != 0:
            boxes = torch.as_tensor(np.stack([prompt.box for prompt in prompts]))
            record["boxes"] = predictor.transform.apply_boxes_torch(boxes, size)
        if index % 3 == 2:
            record["mask_inputs"] = torch.as_tensor(np.stack([prompt.mask for prompt in prompts]))
        batch.append(record)
    answers = []
    for record, output, prompts in zip(batch, sam(batch, multimask), objects, strict=True):
        low_res = output["low_res_logits"]
        logits = sam.postprocess_masks(low_res, record["image"].shape[-2:], record["original_size"])
        columns = (output["masks"].numpy(), output["iou_predictions"].numpy(), low_res.numpy(), logits.numpy())
        for masks, scores, low, full, prompt in zip(*columns, prompts, strict=True):
            answers.append(Answer(masks, scores, low, full, prompt.truth))
    return answers


def iou(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Intersection over union of two masks; two empty ones agree fully."""
    union = (one | other).sum()
    return float((one & other).sum() / union) if union else 1.0


def truth_iou(answers: Sequence[Answer]) -> float:
    """Mean IoU of the chosen masks with ground truth."""
    return float(np.mean([iou(answer.masks[answer.iou.argmax()], answer.truth) for answer in answers]))


def assert_holds(recipe: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """Asserts that answers under a recipe are as near to the unmodified model's as the recipe promises.

    "hoisted", which is HoistRelPos and WhereIndexing, promises the same bits; "exact" the same pixels but where the
    reference is undecided; the others a mask IoU, of the mask that the reference chose: 0.995 over all kinds of prompt
    (which a test over all of them holds), so not much less over one kind, and 0.9 for each mask.
    """
    assert len(ours) == len(theirs) > 0
    for mine, reference in zip(ours, theirs, strict=True):
        for name in ("masks", "iou", "low_res", "logits"):
            values, expected = getattr(mine, name), getattr(reference, name)
            assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
            assert np.isfinite(values).all()
            assert recipe != "hoisted" or np.array_equal(values, expected), f"{name} is not bit-equal"
        assert np.array_equal(mine.masks, mine.logits > 0)
        if recipe == "exact":
            decided = np.abs(reference.logits) > 1e-3 * reference.logits.std()
            assert not (decided & (mine.masks != reference.masks)).any()
    ious = chosen_ious(ours, theirs)
    assert np.mean(ious) >= (0.9999 if recipe in ("hoisted", "exact") else 0.99), f"mean of {ious}"
    assert min(ious) >= 0.9


def chosen_ious(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[float]:
    """IoU of the masks whose index the reference chose, answer by answer."""
    pairs = zip(ours, theirs, strict=True)
    return [iou(mine.masks[index], other.masks[index]) for mine, other in pairs for index in [other.iou.argmax()]]
