from __future__ import annotations

import copy

import torch
from segment_anything.modeling import Sam

from samopt import optimize
from samopt.fingerprint import fingerprint
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


def test_without_values_there_is_none(sam: Sam) -> None:
    assert fingerprint(sam.to("meta")) == ""
