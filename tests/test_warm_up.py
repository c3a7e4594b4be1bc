"""What happens once happens in `warm_up`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

import samopt
from samopt.passes import Compile, HoistRelPos, WhereIndexing
from tests.compilations import compilations
from tests.stand_in import StandIn


@pytest.mark.usefixtures("dynamo_only")
def test_first_pictures_compile_and_capture_nothing(sam: Sam, on_stand_in: StandIn) -> None:
    for pass_ in (HoistRelPos(), WhereIndexing(), Compile(batch_sizes=(1, 4), cuda_graphs=True, decoder=True)):
        pass_(sam)
    image = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    state, random = sam.state_dict(), torch.get_rng_state()
    samopt.warm_up(sam, batch_sizes=(1, 3))
    compiled, captured = compilations(), list(on_stand_in.captured)
    assert compiled > 8
    assert sorted(captured) == [1, 1, 1, 1, 1, 4], "two batch sizes, and of a point and of a box encoder and decoder"
    predictor = SamPredictor(sam)
    predictor.set_image(image)
    predictor.predict(np.array([[5, 6]]), np.array([0]))
    predictor.predict(box=np.array([3, 4, 20, 30]), multimask_output=False)
    samopt.BatchPredictor(sam, batch_size=4).set_images([image] * 4)
    assert (compilations(), on_stand_in.captured) == (compiled, captured)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in sam.state_dict().items())


def test_a_model_as_it_is_may_be_warmed_up_too(sam: Sam) -> None:
    samopt.warm_up(sam)


def test_what_cannot_be_warmed_up_is_refused(sam: Sam) -> None:
    with pytest.raises(samopt.InvalidInput, match="batch sizes must be at least 1, not 2, 0"):
        samopt.warm_up(sam, batch_sizes=(2, 0))
    with pytest.raises(samopt.InvalidInput, match="is no Sam"):
        samopt.warm_up(sam.image_encoder)
