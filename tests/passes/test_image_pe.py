from __future__ import annotations

import copy
import pickle

import pytest
import torch
from segment_anything.modeling import Sam

from samopt import AlreadyApplied, NoSites
from samopt.passes import HoistImagePE
from samopt.passes.image_pe import BUFFER
from tests.models import random_sam


@pytest.fixture
def sam() -> Sam:
    return random_sam()


def test_positions_are_those_of_the_unmodified_encoder_and_computed_once(
    sam: Sam, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sam.prompt_encoder.get_dense_pe()
    HoistImagePE()(sam)
    monkeypatch.setattr(type(sam.prompt_encoder.pe_layer), "forward", None)
    found = sam.prompt_encoder.get_dense_pe()
    assert torch.equal(found, expected)
    assert found is sam.prompt_encoder.get_dense_pe()


def test_a_newly_loaded_matrix_is_used(sam: Sam) -> None:
    other = random_sam()
    other.prompt_encoder.pe_layer.positional_encoding_gaussian_matrix.mul_(2)
    HoistImagePE()(sam)
    sam.load_state_dict(other.state_dict())
    assert torch.equal(sam.prompt_encoder.get_dense_pe(), other.prompt_encoder.get_dense_pe())


def test_keys_stay_and_copies_have_their_own(sam: Sam) -> None:
    keys = list(sam.state_dict())
    HoistImagePE()(sam)
    assert list(sam.state_dict()) == keys
    for other in (copy.deepcopy(sam), pickle.loads(pickle.dumps(sam))):
        assert torch.equal(other.prompt_encoder.get_dense_pe(), sam.prompt_encoder.get_dense_pe())
        assert getattr(other.prompt_encoder, BUFFER) is not getattr(sam.prompt_encoder, BUFFER)


def test_twice_says_so_and_undo_puts_sams_code_back(sam: Sam) -> None:
    before = sam.prompt_encoder
    result = HoistImagePE()(sam)
    with pytest.raises(AlreadyApplied):
        HoistImagePE()(sam)
    result.undo()
    assert sam.prompt_encoder is before


def test_other_code_is_left_alone(sam: Sam) -> None:
    sam.prompt_encoder.pe_layer.forward = lambda size: torch.zeros(1)
    with pytest.raises(NoSites, match="pe_layer: its forward was replaced"):
        HoistImagePE()(sam)
