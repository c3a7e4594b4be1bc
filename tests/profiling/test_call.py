"""A whole call answers what SamPredictor does, names its stages, and leaves the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

from samopt import Sample
from samopt.passes import Compile, DevicePreprocess
from samopt.profiling.call import WholeCall, named_blocks


def test_it_answers_as_samples_are_asked(sam: Sam, pictures: list[Sample]) -> None:
    call = WholeCall.of(pictures[0])
    predictor = SamPredictor(sam)
    predictor.set_image(pictures[0].image)
    expected = predictor.predict(np.array([[20.0, 26.5]]), np.array([1]))  # the middle of 40 x 53 pixels
    for ours, theirs in zip(call(sam), expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_the_point_is_on_an_object(pictures: list[Sample]) -> None:
    image = pictures[0].image
    masks = np.zeros((2, *image.shape[:2]), bool)
    masks[1, 10:21, 3:9] = True
    ((x, y),) = WholeCall.of(Sample(image, masks)).point
    assert masks[1, int(y), int(x)]
    points = np.array([[0.0, 0.0], [4.0, 11.0]])
    assert WholeCall.of(Sample(image, masks, points)).point.tolist() == [[4.0, 11.0]]
    assert WholeCall.of(Sample(image, masks[:1])).point.tolist() == [[20.0, 26.5]]


@pytest.mark.parametrize("on_device", [False, True])
def test_stages_in_their_order(sam: Sam, pictures: list[Sample], on_device: bool) -> None:
    if on_device:
        DevicePreprocess()(sam)
    before = sam.state_dict().keys(), [len(module._forward_hooks) for module in sam.modules()], vars(sam).keys()
    seen: list[str] = []

    @contextmanager
    def enter(stage: str) -> Iterator[None]:
        seen.append(stage)
        yield
        seen.append(f"/{stage}")

    WholeCall.of(pictures[1])(sam, enter)
    resized = ["preprocess", "/preprocess"] * (1 if on_device else 2)  # by PIL, and by the model
    assert seen[: len(resized) + 4] == ["set_image", *resized, "image encoder", "/image encoder", "/set_image"]
    decoding = ["prompt encoder", "prompt encoder", "mask decoder", "postprocess"]  # the second: positions of the image
    inside = [part for stage in decoding for part in (stage, f"/{stage}")]
    assert seen[len(resized) + 4 :] == ["predict", *inside, "/predict"]
    assert before == (sam.state_dict().keys(), [len(m._forward_hooks) for m in sam.modules()], vars(sam).keys())


def test_pictures_resized_on_the_device_get_the_same_answers(sam: Sam, pictures: list[Sample]) -> None:
    call = WholeCall.of(pictures[0])
    by_pil = call(sam)
    DevicePreprocess()(sam)
    for ours, theirs in zip(call(sam), by_pil, strict=True):
        assert ours.shape == theirs.shape
        assert np.allclose(ours, theirs, atol=0.01)


def test_blocks_are_named_while_the_context_lasts(sam: Sam) -> None:
    pixels = torch.zeros(1, 3, 64, 64)
    with torch.no_grad(), torch.profiler.profile() as profile, named_blocks(sam):
        sam.image_encoder(pixels)
    names = [event.name for event in profile.events() or [] if event.name.startswith("block ")]
    assert names == ["block 0", "block 1"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in sam.modules())


def test_a_block_that_fails_ends_its_range(sam: Sam) -> None:
    with named_blocks(sam), torch.profiler.profile() as profile:
        with pytest.raises(RuntimeError):
            sam.image_encoder.blocks[0](torch.zeros(1, 2, 2, 7))
        torch.zeros(1).add(1)
    events = {event.name: event for event in profile.events() or []}
    assert events["aten::add"].time_range.start > events["block 0"].time_range.end


@pytest.mark.usefixtures("dynamo_only")
def test_a_compiled_model_gets_no_hooks(sam: Sam) -> None:
    Compile()(sam)
    with named_blocks(sam):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in sam.modules())
