from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from samopt import Agreement, Budget, InvalidInput, Numerics
from samopt.gate import FLOAT32_NOISE, TF32_NOISE, failure
from samopt.observe import Timings
from samopt.verify import KindAgreement

BUDGET = Budget(mean_iou=0.9, kind_mean_iou=0.8, min_iou=0.5, truth_drop=0.1, embedding_error=0.2)
SAME = KindAgreement((1.0,), 0.0, None, None)


def agreement(*ious: float, error: float = 0.0, logits: float = 0.0, **changes: Any) -> Agreement:
    """Agreement with these mask IoUs, all of one kind of prompt."""
    masks = KindAgreement(ious or (1.0,), 0.0, None, None)
    made = Agreement(masks, {"point": masks}, error, logits, False, True, Timings(0.1, 0.1, 0.1, 0))
    return dataclasses.replace(made, **changes)


UNMODIFIED = agreement(equal=True)


@pytest.mark.parametrize("numerics", Numerics)
def test_what_changed_nothing_may_stand(numerics: Numerics) -> None:
    assert failure(numerics, True, UNMODIFIED, UNMODIFIED, BUDGET) is None


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("masks", [SAME, None])
def test_nan_always_fails(numerics: Numerics, masks: KindAgreement | None) -> None:
    after = agreement(finite=False, masks=masks)
    assert failure(numerics, False, UNMODIFIED, after, BUDGET) == "the outputs hold NaN or infinity"


def test_exact_is_bit_equal_to_the_step_before() -> None:
    drifted = agreement(0.95, error=0.01)
    assert failure(Numerics.EXACT, True, drifted, drifted, BUDGET) is None
    reason = failure(Numerics.EXACT, False, UNMODIFIED, UNMODIFIED, BUDGET)
    assert reason is not None
    assert "not bit-equal" in reason


@pytest.mark.parametrize("figure", ["error", "logits"])
def test_rounding_may_double_the_error_of_the_step_before(figure: str) -> None:
    before = agreement(**{figure: 0.01})
    assert failure(Numerics.ROUNDING, False, before, agreement(**{figure: 0.0199}), BUDGET) is None
    reason = failure(Numerics.ROUNDING, False, before, agreement(**{figure: 0.0201}), BUDGET)
    assert reason is not None
    assert {"error": "embedding error", "logits": "logit error"}[figure] in reason
    assert "from 1.00e-02 to 2.01e-02" in reason


def test_rounding_is_granted_the_noise_of_float32_and_no_more() -> None:
    assert failure(Numerics.ROUNDING, False, UNMODIFIED, agreement(error=FLOAT32_NOISE * 0.9), BUDGET) is None
    assert failure(Numerics.ROUNDING, False, UNMODIFIED, agreement(error=FLOAT32_NOISE * 1.1), BUDGET) is not None


@pytest.mark.parametrize("numerics", [Numerics.ROUNDING, Numerics.LOSSY])
@pytest.mark.parametrize(
    ("after", "figure"),
    [
        (agreement(0.89, 0.89), "mean mask IoU 0.89 is below the budget's 0.9 (mean_iou)"),
        (agreement(*[1.0] * 9, 0.49), "minimum mask IoU 0.49 is below the budget's 0.5 (min_iou)"),
        (
            agreement(1.0, kinds={"box": KindAgreement((0.79,), 0.0, None, None)}),
            "mean mask IoU of box prompts 0.79 is below the budget's 0.8 (kind_mean_iou)",
        ),
        (
            agreement(masks=KindAgreement((1.0,), 0.0, 0.69, 0.8)),
            "ground-truth mIoU 0.69 is below the budget's 0.7 (truth_drop)",
        ),
    ],
)
def test_over_the_budget_names_the_figure_and_the_budget(numerics: Numerics, after: Agreement, figure: str) -> None:
    assert failure(numerics, False, UNMODIFIED, after, BUDGET) == figure


@pytest.mark.parametrize(
    "after",
    [
        agreement(0.91, 0.9),
        agreement(*[1.0] * 9, 0.5),
        agreement(1.0, kinds={"box": KindAgreement((0.8,), 0.0, None, None)}),
        agreement(masks=KindAgreement((1.0,), 1.0, 0.71, 0.8)),
        agreement(masks=KindAgreement((1.0,), 0.0, 0.95, 0.8)),
        agreement(error=1.0, logits=1.0),  # masks count where there are masks
    ],
)
def test_within_the_budget_may_stand(after: Agreement) -> None:
    assert failure(Numerics.LOSSY, False, UNMODIFIED, after, BUDGET) is None


def test_untrained_weights_are_held_to_the_embedding_error() -> None:
    before = agreement(masks=None, kinds={})
    within, beyond = (dataclasses.replace(before, embedding_error=error) for error in (0.19, 0.21))
    assert failure(Numerics.LOSSY, False, before, within, BUDGET) is None
    reason = failure(Numerics.LOSSY, False, before, beyond, BUDGET)
    assert reason == "embedding error 2.10e-01 is above 2.00e-01"
    assert failure(Numerics.ROUNDING, False, before, within, BUDGET) is not None, "a class still holds"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Budget) if field.name != "masks"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), True, "0.9", [0.9]])
def test_a_budget_is_a_number_from_0_to_1(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"accuracy budget: {name} must be a number from 0 to 1, not "):
        Budget(**{name: value})


def test_a_budget_of_masks_is_yes_or_no() -> None:
    no_number: Any = 1
    with pytest.raises(InvalidInput, match="masks must be true or false, not 1"):
        Budget(masks=no_number)
    assert Budget(mean_iou=1, embedding_error=None, masks=False).mean_iou == 1


def test_the_newer_precision_setting_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    rounded = agreement(error=TF32_NOISE * 0.9)
    assert failure(Numerics.ROUNDING, False, UNMODIFIED, rounded, BUDGET) is not None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert failure(Numerics.ROUNDING, False, UNMODIFIED, rounded, BUDGET) is None
