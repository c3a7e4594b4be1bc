"""Accuracy: what the unmodified model answered, and how far a model is from it.

A `Reference` records the outputs of a model on sample pictures, under fixed prompts of every kind; no second model is
kept. Drift is measured on the mask whose index the *reference* chose, at the picture's own size: a mean over masks,
but also the worst one and the share of changed choices, as a mean hides a wholly wrong mask and a choice can flip
between two good masks. Where there is ground truth, each model's own choice is scored against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.errors import InvalidInput
from samopt.observe import Outputs, Prediction, Timings, observe
from samopt.prompts import KINDS, PromptBatch, choose_objects, make_prompts, point_grid
from samopt.samples import Sample, as_samples, scene_samples
from samopt.structure import check_sam

if TYPE_CHECKING:
    from segment_anything import SamPredictor

OBJECTS = 4  # objects per picture that get prompts
PLACED = 0.2  # a reference below this ground-truth mIoU cannot place masks: its weights are untrained


@dataclass(frozen=True)
class KindAgreement:
    """Agreement on one kind of prompt.

    Attributes:
        ious: IoU of each mask with the reference's, for the index that the reference chose.
        changed: share of prompts for which the model chose another mask.
        truth: mean IoU of the model's choices with ground truth, or None.
        reference_truth: the same of the reference's choices.
    """

    ious: tuple[float, ...]
    changed: float
    truth: float | None
    reference_truth: float | None

    @property
    def mean_iou(self) -> float:
        """Mean mask IoU with the reference."""
        return float(np.mean(self.ious))

    @property
    def p5_iou(self) -> float:
        """5th percentile of the mask IoU with the reference."""
        return float(np.percentile(self.ious, 5))

    @property
    def min_iou(self) -> float:
        """The worst mask's IoU with the reference."""
        return min(self.ious)

    def to_dict(self) -> dict[str, float | None]:
        """The figures, for JSON."""
        names = ("mean_iou", "p5_iou", "min_iou", "changed", "truth", "reference_truth")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Agreement:
    """How far a model is from the reference.

    Attributes:
        masks: over all prompts; None where the reference cannot place masks (untrained weights).
        kinds: the same per kind of prompt.
        embedding_error: norm of the difference of the image embeddings over the norm of the reference's.
        logit_error: the same for the low-resolution mask logits.
        equal: whether every output is bit-equal.
        finite: whether no output is NaN or infinite.
        timings: how long the model took.
    """

    masks: KindAgreement | None
    kinds: dict[str, KindAgreement]
    embedding_error: float
    logit_error: float
    equal: bool
    finite: bool
    timings: Timings

    def to_dict(self) -> dict[str, Any]:
        """The figures and timings, for JSON, which has no NaN: an error that is none is null."""
        errors = {name: getattr(self, name) for name in ("embedding_error", "logit_error")}
        return {
            "masks": self.masks and self.masks.to_dict(),
            "kinds": {kind: agreement.to_dict() for kind, agreement in self.kinds.items()},
            **{name: error if math.isfinite(error) else None for name, error in errors.items()},
            "equal": self.equal,
            "finite": self.finite,
            **asdict(self.timings),
        }

    def __str__(self) -> str:
        text = f"embedding error {self.embedding_error:.2e}"
        if not self.finite:
            return f"NaN or infinity in the outputs; {text}"
        if self.masks is None:
            return f"{text}; masks: not measured, untrained weights"
        text += f"; mask IoU mean {self.masks.mean_iou:.4f}, min {self.masks.min_iou:.4f}"
        text += f", {self.masks.changed:.1%} of choices changed"
        if self.masks.truth is not None:
            text += f"; ground-truth mIoU {self.masks.reference_truth:.4f} -> {self.masks.truth:.4f}"
        return text


@dataclass(frozen=True, eq=False)
class Reference:
    """What a model answered, to hold other models against. Made by `Reference.record`.

    Attributes:
        samples: the pictures.
        prompts: per picture, one batch of prompts per kind.
        truths: per picture, the ground-truth masks of the prompted objects, packed like `Prediction.masks`, or None.
        outputs: the answers.
        trained: whether masks are compared: they mean nothing where the model itself cannot place them.
    """

    samples: Sequence[Sample]
    prompts: Sequence[Sequence[PromptBatch]]
    truths: Sequence[NDArray[np.uint8] | None]
    outputs: Outputs
    trained: bool = True

    @staticmethod
    def record(
        model: nn.Module,
        samples: Any = None,
        *,
        masks: bool = True,
        kinds: Sequence[str] = KINDS,
        objects: int | None = OBJECTS,
    ) -> Reference:
        """Records the answers of `model` on `samples`.

        Args:
            model: a Sam, usually unmodified. It is not changed.
            samples: see `as_samples`; None draws four scenes with ground truth.
            masks: False says that the weights are untrained, so that only embeddings and logits are compared.
            kinds: the kinds of prompts to ask, of `samopt.prompts.KINDS`.
            objects: objects per picture to prompt for, from the smallest to the largest; None takes all of them.

        Raises:
            InvalidInput: no Sam, no usable sample, or no such kind of prompt.
        """
        check_sam(model)
        if unknown := [kind for kind in kinds if kind not in KINDS] or ([] if kinds else ["none"]):
            raise InvalidInput(f"unknown kind of prompt {unknown[0]!r}; known: {', '.join(KINDS)}")
        pictures = scene_samples() if samples is None else as_samples(samples)
        prompts: list[list[PromptBatch]] = []
        truths: list[NDArray[np.uint8] | None] = []

        def prepare(predictor: SamPredictor, index: int) -> list[PromptBatch]:
            batches, truth = _prompts_for(predictor, pictures[index], kinds, objects)
            prompts.append(batches)
            truths.append(truth)
            return batches

        outputs = observe(model, pictures, prepare)
        reference = Reference(pictures, prompts, truths, outputs, trained=masks)
        scored = compare(outputs, reference).masks
        placed = scored is not None and (scored.truth is None or scored.truth >= PLACED)
        return replace(reference, trained=placed)

    def __repr__(self) -> str:
        kinds = len({batch.kind for batches in self.prompts for batch in batches})
        return f"Reference({len(self.samples)} pictures, {kinds} kinds of prompts, trained={self.trained})"

    def observe(self, model: nn.Module) -> Outputs:
        """What another model answers to the same samples and prompts."""
        return observe(model, self.samples, lambda _, index: self.prompts[index])


def verify(model: nn.Module, reference: Reference) -> Agreement:
    """How far `model` is from `reference`, now.

    Args:
        model: a Sam. It is not changed.
        reference: recorded from the unmodified model by `Reference.record`.

    Raises:
        InvalidInput: `model` is no Sam, or `reference` no Reference.
    """
    check_sam(model)
    if not isinstance(reference, Reference):
        found = type(reference).__name__
        raise InvalidInput(f"verify needs a Reference, not {found}: make one by Reference.record(unmodified, samples)")
    return compare(reference.observe(model), reference)


def compare(outputs: Outputs, reference: Reference) -> Agreement:
    """Holds outputs on the reference's samples and prompts against the reference's own."""
    embeddings = relative_error(outputs.embeddings, reference.outputs.embeddings)
    logits = [
        [answer.logits for picture in of.predictions for answer in picture] for of in (outputs, reference.outputs)
    ]
    kinds = _compare_masks(outputs, reference) if reference.trained else {}
    return Agreement(
        masks=_pool(list(kinds.values())) if kinds else None,
        kinds=kinds,
        embedding_error=embeddings,
        logit_error=relative_error(*logits),
        equal=outputs.equals(reference.outputs),
        finite=outputs.finite(),
        timings=outputs.timings,
    )


def relative_error(values: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """|values - reference| / |reference| over all tensors together, in float64."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(values, reference, strict=True))
    norm = sum(float(b.double().square().sum()) for b in reference)
    return float(np.sqrt(difference / norm)) if norm else float(difference > 0)


def mask_iou(masks: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.float64]:
    """IoU of packed masks [B, H, W / 8], pair by pair: [B]. Two empty masks agree fully."""
    intersection = np.bitwise_count(masks & others).sum(axis=(1, 2), dtype=np.int64)
    union = np.bitwise_count(masks | others).sum(axis=(1, 2), dtype=np.int64)
    return np.where(union == 0, 1.0, intersection / np.maximum(union, 1))


def _compare_masks(outputs: Outputs, reference: Reference) -> dict[str, KindAgreement]:
    found: dict[str, list[KindAgreement]] = {}
    for index, batches in enumerate(reference.prompts):
        truth = reference.truths[index]
        for batch, mine, theirs in zip(
            batches, outputs.predictions[index], reference.outputs.predictions[index], strict=True
        ):
            found.setdefault(batch.kind, []).append(_compare_prediction(mine, theirs, truth))
    return {kind: _pool(agreements) for kind, agreements in found.items()}


def _compare_prediction(mine: Prediction, theirs: Prediction, truth: NDArray[np.uint8] | None) -> KindAgreement:
    scored = (mask_iou(p.chosen(p.choice), truth).mean().item() if truth is not None else None for p in (mine, theirs))
    ious = mask_iou(mine.chosen(theirs.choice), theirs.chosen(theirs.choice))
    return KindAgreement(tuple(ious.tolist()), float((mine.choice != theirs.choice).mean()), *scored)


def _pool(agreements: Sequence[KindAgreement]) -> KindAgreement:
    def mean(name: str) -> float | None:
        known = [(value, len(of.ious)) for of in agreements if (value := getattr(of, name)) is not None]
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None

    ious = tuple(iou for agreement in agreements for iou in agreement.ious)
    return KindAgreement(ious, mean("changed") or 0.0, mean("truth"), mean("reference_truth"))


def _prompts_for(
    predictor: SamPredictor, sample: Sample, kinds: Sequence[str], objects: int | None
) -> tuple[list[PromptBatch], NDArray[np.uint8] | None]:
    """Prompts of some kinds for a picture the predictor has encoded, and the packed truth of the prompted objects."""
    size = sample.image.shape[:2]

    def to_input(points: NDArray[np.float64]) -> Tensor:
        return torch.as_tensor(predictor.transform.apply_coords(points, size), dtype=torch.float32)

    given = sample.masks
    if given is not None and len(chosen := choose_objects(given, len(given) if objects is None else objects)):
        masks, points = given[chosen], None if sample.points is None else sample.points[chosen]
        truth = np.packbits(masks, axis=-1)
    else:
        masks, points, truth = *_find_objects(predictor, size, to_input), None
    batches = make_prompts(masks, points, to_input)
    if "mask" in kinds:
        box = next(batch for batch in batches if batch.kind == "box").to(predictor.device)
        _, _, logits = predictor.predict_torch(None, None, box.boxes, multimask_output=False)
        batches.append(PromptBatch("mask", False, masks=logits.float().cpu()))
    return [batch for batch in batches if batch.kind in kinds], truth


def _find_objects(
    predictor: SamPredictor, size: tuple[int, int], to_input: Any
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """What the model itself finds at a 3 x 3 grid of points, where a picture comes without masks."""
    points = point_grid(size, 3)
    coords = to_input(points[:, None]).to(predictor.device)
    labels = torch.ones(coords.shape[:2], dtype=torch.int32, device=predictor.device)
    masks, iou, _ = predictor.predict_torch(coords, labels)
    best = masks[torch.arange(len(iou)), iou.argmax(dim=1)].cpu().numpy()
    chosen = choose_objects(best, OBJECTS)
    if len(chosen) == 0:  # nothing found: the prompts then take the middle of the picture
        best = np.zeros((1, *size), dtype=bool)
        best[0, size[0] // 4 : -(-3 * size[0] // 4), size[1] // 4 : -(-3 * size[1] // 4)] = True
        return best, points[4:5]
    return best[chosen], points[chosen]
