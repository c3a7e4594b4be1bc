from __future__ import annotations

import pytest
import torch
from segment_anything.modeling import Sam

from samopt import NoSites, Unsupported
from samopt.passes import UpscaleMasks
from samopt.passes.upscale_masks import upscales_in_one_step
from tests.models import random_sam


@pytest.fixture
def sam(monkeypatch: pytest.MonkeyPatch) -> Sam:
    """A model where the pass thinks that there is a GPU; the operator has code for a CPU."""
    monkeypatch.setattr("samopt.passes.upscale_masks.cannot_run", lambda device: None)
    return random_sam()


@pytest.mark.parametrize("sizes", [((64, 40), (100, 63)), ((64, 64), (20, 20))])
def test_masks_are_those_of_the_unmodified_model(sam: Sam, sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    logits = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = sam.postprocess_masks(logits, *sizes)
    assert not upscales_in_one_step(sam)
    result = UpscaleMasks()(sam)
    assert upscales_in_one_step(sam)
    torch.testing.assert_close(sam.postprocess_masks(logits, *sizes), expected, atol=1e-6, rtol=0)
    assert sam.postprocess_masks(logits.half(), *sizes).dtype == torch.float16
    result.undo()
    assert not upscales_in_one_step(sam)


def test_other_code_is_left_alone(sam: Sam) -> None:
    sam.postprocess_masks = lambda masks, *sizes: masks
    with pytest.raises(NoSites, match="its postprocess_masks was replaced"):
        UpscaleMasks()(sam)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Unsupported, match="need a GPU"):
        UpscaleMasks()(random_sam())
