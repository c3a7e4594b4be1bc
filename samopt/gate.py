"""What a pass may cost, and the check that it cost no more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from samopt.base import Numerics
from samopt.errors import InvalidInput
from samopt.verify import Agreement

# What float32 sums in another order may differ by, relative; with TF32 products, whose inputs have 11 bits, more.
FLOAT32_NOISE, TF32_NOISE = 1e-4, 1e-2


@dataclass(frozen=True)
class Budget:
    """What a recipe may cost, all its passes together, against the unmodified model.

    Attributes:
        mean_iou: least mean mask IoU with the unmodified model, over all prompts.
        kind_mean_iou: least mean of every single kind of prompt.
        min_iou: least IoU of any single mask.
        truth_drop: most loss of ground-truth mIoU, where there is ground truth.
        embedding_error: most relative error of the image embedding, for untrained weights, whose masks mean nothing;
            None lets `optimize` take 1.1 times that of the unmodified encoder in eager half precision.
        masks: False says the weights are untrained, so that only embeddings are held to the budget.
    """

    mean_iou: float = 0.995
    kind_mean_iou: float = 0.99
    min_iou: float = 0.9
    truth_drop: float = 0.002
    embedding_error: float | None = None
    masks: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "masks":
                if not isinstance(value, bool):
                    raise InvalidInput(f"accuracy budget: masks must be true or false, not {value!r}")
            elif value is None and field.name == "embedding_error":
                continue
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InvalidInput(f"accuracy budget: {field.name} must be a number from 0 to 1, not {value!r}")


def failure(numerics: Numerics, unchanged: bool, before: Agreement, after: Agreement, budget: Budget) -> str | None:
    """Why a pass may not stand, or None.

    Args:
        numerics: the pass's class, to which it is held against the step before.
        unchanged: whether the outputs after the pass are bit-equal to those before it.
        before: agreement with the unmodified model before the pass.
        after: the same after it.
        budget: what all passes so far may cost together.
    """
    if not after.finite:
        return "the outputs hold NaN or infinity"
    if numerics is Numerics.EXACT and not unchanged:
        return "it is to be exact, and the outputs are not bit-equal to those before it"
    if numerics is Numerics.ROUNDING and (reason := _beyond_rounding(before, after)):
        return reason
    if after.masks is None:
        limit = budget.embedding_error
        if numerics is Numerics.LOSSY and limit is not None and after.embedding_error > limit:
            return f"embedding error {after.embedding_error:.2e} is above {limit:.2e}"
        return None
    return _over_budget(after, budget)


def _beyond_rounding(before: Agreement, after: Agreement) -> str | None:
    floor = _float32_noise()
    for name in ("embedding_error", "logit_error"):
        was, now = getattr(before, name), getattr(after, name)
        limit = max(2 * was, floor)
        if now > limit:
            label = name.replace("_", " ")
            return f"it is only to round, and the {label} rose from {was:.2e} to {now:.2e} (at most {limit:.2e})"
    return None


def _float32_noise() -> float:
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was chosen through torch.backends.….fp32_precision instead
        exact = False
    return FLOAT32_NOISE if exact else TF32_NOISE


def _over_budget(after: Agreement, budget: Budget) -> str | None:
    assert after.masks is not None
    figures = [
        ("mean_iou", "mean mask IoU", after.masks.mean_iou, budget.mean_iou),
        ("min_iou", "minimum mask IoU", after.masks.min_iou, budget.min_iou),
        *(
            ("kind_mean_iou", f"mean mask IoU of {kind} prompts", of.mean_iou, budget.kind_mean_iou)
            for kind, of in after.kinds.items()
        ),
    ]
    if after.masks.truth is not None and after.masks.reference_truth is not None:
        least = after.masks.reference_truth - budget.truth_drop
        figures.append(("truth_drop", "ground-truth mIoU", after.masks.truth, least))
    for key, name, value, least in figures:
        if value < least:
            return f"{name} {value:.5g} is below the budget's {least:.5g} ({key})"
    return None
