"""The kernels that upscale masks in Triton's interpreter, and the operator on a CPU, against SAM's two steps in
float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.masks import boxes_of, stability_scores
from samopt.passes.kernels import upscale_masks
from samopt.passes.kernels.upscale_masks import Frame, launch, measure, taps
from tests.numerics import relative_error

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

FRAMES = {
    "larger": ((16, 16), Frame(64, (64, 43), (150, 101))),
    "smaller": ((16, 16), Frame(64, (40, 64), (13, 21))),
    "as large as the model sees it": ((16, 16), Frame(64, (64, 64), (64, 64))),
    "narrow": ((16, 16), Frame(64, (1, 64), (2, 200))),
    "one pixel": ((16, 16), Frame(64, (64, 64), (1, 1))),
    "few logits": ((4, 4), Frame(16, (16, 9), (37, 21))),
}


def random_logits(low: tuple[int, int], count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, *low, generator=torch.Generator().manual_seed(1)).to(dtype)


def truth(logits: Tensor, frame: Frame) -> Tensor:
    """As `Sam.postprocess_masks` has it."""
    square = F.interpolate(logits[None].double(), (frame.img_size, frame.img_size), mode="bilinear")
    seen = square[..., : frame.input_size[0], : frame.input_size[1]]
    return F.interpolate(seen, frame.original_size, mode="bilinear")[0]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", FRAMES)
def test_the_kernel_upscales(case: str, dtype: torch.dtype) -> None:
    low, frame = FRAMES[case]
    logits = random_logits(low, dtype=dtype)
    upscaled = launch(logits, frame)
    assert upscaled.dtype == torch.float32
    assert relative_error(upscaled, truth(logits, frame)) < 3e-7


@interpreted
@pytest.mark.parametrize("case", FRAMES)
def test_the_kernel_makes_masks_of_those_that_are_wanted(case: str) -> None:
    low, frame = FRAMES[case]
    logits = random_logits(low)
    wanted = torch.tensor([True, False, True])
    masks = launch(logits, frame, 0.1, wanted)
    assert masks.dtype == torch.bool
    assert torch.equal(masks[wanted], truth(logits, frame)[wanted] > 0.1)


@interpreted
@pytest.mark.parametrize("case", FRAMES)
def test_the_kernel_measures_what_is_wanted(case: str) -> None:
    low, frame = FRAMES[case]
    logits = random_logits(low, count=4)
    logits[2] = -9  # no mask
    wanted = torch.tensor([True, False, True, True])
    found = measure(logits, frame, 0.1, 0.5, wanted)
    upscaled = truth(logits, frame)
    inner, outer = ((upscaled > limit).sum((1, 2)) for limit in (0.6, -0.4))
    assert torch.equal(found[wanted, 0], inner[wanted].int())
    assert torch.equal(found[wanted, 1], outer[wanted].int())
    assert torch.equal(found[wanted, 2:].long(), boxes_of(upscaled > 0.1)[wanted])
    assert not found[1].any()
    scores = found[wanted, 0] / found[wanted, 1]
    torch.testing.assert_close(scores, stability_scores(upscaled, 0.1, 0.5)[wanted], equal_nan=True)


@interpreted
def test_a_mask_is_made_by_as_many_programs_as_it_has_lines_for() -> None:
    low, frame = (2 * upscale_masks.LINES + 5, 16), Frame(64, (64, 20), (71, 5))
    logits = random_logits(low, count=1)
    assert relative_error(launch(logits, frame), truth(logits, frame)) < 3e-7
    found = measure(logits, frame, 0.0, 1.0, torch.ones(1, dtype=torch.bool))
    assert torch.equal(found[:, 2:].long(), boxes_of(truth(logits, frame) > 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1200, 1800), (534, 800), (1024, 1024), (37, 2000), (100, 67), (1, 1)])
def test_a_gpu_upscales_and_measures(size: tuple[int, int], dtype: torch.dtype) -> None:
    longest = max(size)
    seen = max(1, round(1024 * size[0] / longest)), max(1, round(1024 * size[1] / longest))
    frame = Frame(1024, seen, size)
    logits = random_logits((256, 256), count=5, dtype=dtype).cuda()
    expected = truth(logits, frame)
    upscaled = launch(logits, frame)
    assert relative_error(upscaled, expected) < 3e-7
    wanted = torch.tensor([True, False, True, True, True], device="cuda")
    assert torch.equal(launch(logits, frame, 0.1, wanted)[wanted], (upscaled > 0.1)[wanted])
    found = measure(logits, frame, 0.1, 0.5, wanted)
    for column, limit in ((0, 0.6), (1, -0.4)):
        assert torch.equal(found[wanted, column], (upscaled > limit).sum((1, 2))[wanted].int())
    assert torch.equal(found[wanted, 2:].long(), boxes_of(upscaled > 0.1)[wanted])


@interpreted
def test_no_masks_are_none() -> None:
    frame = FRAMES["larger"][1]
    none, nothing = torch.empty(0, 16, 16), torch.empty(0, dtype=torch.bool)
    assert launch(none, frame).shape == (0, 150, 101)
    assert measure(none, frame, 0.0, 1.0, nothing).shape == (0, 6)


@pytest.mark.parametrize("case", FRAMES)
def test_the_operator_on_a_cpu_upscales(case: str) -> None:
    low, frame = FRAMES[case]
    logits = random_logits(low, dtype=torch.float16)
    arguments = (logits, frame.img_size, frame.input_size, frame.original_size)
    upscaled = torch.ops.samopt.upscale_masks(*arguments)
    assert relative_error(upscaled, truth(logits, frame)) < 3e-5  # float32 rounds the places of pixels, too
    torch.library.opcheck(torch.ops.samopt.upscale_masks.default, arguments)


@pytest.mark.parametrize(
    ("low", "img_size", "seen", "size"), [(256, 1024, 683, 1200), (256, 1024, 1024, 534), (4, 16, 1, 3)]
)
def test_taps_are_those_of_two_interpolations(low: int, img_size: int, seen: int, size: int) -> None:
    table = torch.from_numpy(taps(low, img_size, seen, size)).double()
    dense = torch.zeros(size, low, dtype=torch.float64)
    first = table[:, :1].long()
    dense.scatter_(1, first + torch.arange(3), table[:, 1:])
    square = F.interpolate(torch.eye(low, dtype=torch.float64)[None], img_size, mode="linear")[..., :seen]
    expected = F.interpolate(square, size, mode="linear")[0].T
    assert int(first.max()) <= low - 3
    torch.testing.assert_close(dense, expected, atol=1e-7, rtol=0)
