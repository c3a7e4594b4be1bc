from __future__ import annotations

import copy

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor

from samopt import optimize, report
from samopt.fingerprint import _digest, fingerprint
from samopt.passes import CastDtype, Float8Dynamic, HoistRelPos
from tests.models import random_sam


def test_it_is_that_of_the_weights(sam: Sam) -> None:
    assert len(fingerprint(sam)) == 64
    assert fingerprint(copy.deepcopy(sam)) == fingerprint(sam)
    assert fingerprint(random_sam(seed=1)) != fingerprint(sam)


def test_a_change_in_place_is_seen(sam: Sam) -> None:
    before = fingerprint(sam)
    with torch.no_grad():
        sam.mask_decoder.iou_token.weight[0, 0] += 1
    assert fingerprint(sam) != before


def test_optimised_models_keep_it_until_they_get_other_weights(sam: Sam) -> None:
    fast = optimize(sam, [HoistRelPos(), CastDtype(), Float8Dynamic()], verify="off")
    assert fingerprint(fast) == fingerprint(sam)
    assert fingerprint(copy.deepcopy(fast)) == fingerprint(sam)
    fast.load_state_dict(random_sam(seed=1).state_dict(), strict=False)
    assert fingerprint(fast) not in (fingerprint(sam), fingerprint(random_sam(seed=1)))


def test_the_weights_are_read_once_for_all_runs_on_the_same_model(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def digest(state: dict[str, Tensor]) -> str:
        read.append(str(state["mask_decoder.iou_token.weight"].dtype))
        return _digest(state)

    monkeypatch.setattr("samopt.fingerprint._digest", digest)
    before = fingerprint(sam)
    for _ in range(2):
        assert report(optimize(sam, [CastDtype()], verify="off")).model_digest == before
    assert read == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]
    with torch.no_grad():
        sam.mask_decoder.iou_token.weight[0, 0] += 1
    assert report(optimize(sam, [CastDtype()], verify="off")).model_digest == fingerprint(sam) != before


def test_without_values_there_is_none(sam: Sam) -> None:
    assert fingerprint(sam.to("meta")) == ""
