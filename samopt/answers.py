"""What a model answered on one drawn scene when it was saved, to tell whether it still does when it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samopt.base import Numerics
from samopt.errors import AccuracyError
from samopt.gate import Budget, failure
from samopt.observe import Outputs, Prediction
from samopt.report import Report
from samopt.samples import Sample, scene_samples
from samopt.verify import PLACED, Reference, compare

EVERY = 4  # rows and columns of the embedding: one of so many is kept, as it is the largest of the answers
SIZE = 256  # of the scene, in pixels
ROUNDED = 0.08  # what the embedding may err by where masks mean nothing: float8, rounded elsewhere, comes near


def record(model: nn.Module) -> dict[str, Tensor]:
    """What a model answers: the embedding of a small scene; logits, predicted IoU and masks by kind of prompt."""
    outputs = _reference(model).outputs
    found = {"embedding": _part(outputs.embeddings[0])}
    for index, answer in enumerate(outputs.predictions[0]):
        found |= {f"{index}.logits": answer.logits, f"{index}.iou": answer.iou}
        found[f"{index}.masks"] = torch.from_numpy(answer.masks)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def check(model: nn.Module, recorded: Mapping[str, Tensor], budget: Budget, report: Report) -> str:
    """Holds a loaded model to what it answered when it was saved.

    Args:
        model: as loaded.
        recorded: from `record`.
        budget: how far its answers may be from those, where they are not the same bits.
        report: for the error.

    Returns:
        What was found, in words.

    Raises:
        AccuracyError: its answers are further away.
    """
    now = _reference(model)
    count = len(now.outputs.predictions[0])
    answers = [
        Prediction(recorded[f"{at}.logits"], recorded[f"{at}.iou"], recorded[f"{at}.masks"].numpy())
        for at in range(count)
    ]
    before = Outputs([recorded["embedding"]], [answers], now.outputs.timings)
    outputs = dataclasses.replace(now.outputs, embeddings=[_part(now.outputs.embeddings[0])])
    agreement = compare(outputs, dataclasses.replace(now, outputs=before, trained=True))
    if agreement.masks is None or (agreement.masks.reference_truth or 0) < PLACED:
        agreement = compare(outputs, dataclasses.replace(now, outputs=before, trained=False))
    if agreement.equal:
        return "verified: its answers are those it gave when it was saved, bit for bit"
    if budget.embedding_error is None:
        budget = dataclasses.replace(budget, embedding_error=ROUNDED)
    reason = failure(Numerics.LOSSY, False, agreement, agreement, budget)
    if reason is not None:
        raise AccuracyError(f"the loaded model answers otherwise than when it was saved: {reason}", report)
    return f"verified against its answers when it was saved: {agreement}"


def _part(embedding: Tensor) -> Tensor:
    return embedding[..., ::EVERY, ::EVERY]


def _reference(model: Any) -> Reference:
    (scene,) = scene_samples(1, SIZE)
    assert scene.masks is not None
    assert scene.points is not None
    largest = int(np.argmax(scene.masks.sum(axis=(1, 2))))
    one = Sample(scene.image, scene.masks[largest : largest + 1], scene.points[largest : largest + 1], scene.name)
    return Reference.record(model, [one])
