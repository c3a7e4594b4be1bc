from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from segment_anything.utils.onnx import SamOnnxModel
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from samopt import AlreadyApplied, InvalidInput, NoSites, Pass, Skip
from samopt.passes import CastDtype, FusedMaskDecoder, Int8Dynamic, SDPAttention
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding, relative_error

PASSES: list[list[Pass]] = [
    [FusedMaskDecoder()],
    [SDPAttention(encoder=False), FusedMaskDecoder()],
    [FusedMaskDecoder(), SDPAttention(encoder=False)],
]


class Predict(nn.Module):
    """A mask decoder as a module of tensors only."""

    def __init__(self, decoder: nn.Module, multimask: bool) -> None:
        super().__init__()
        self.decoder, self.multimask = decoder, multimask

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self.decoder(*inputs, multimask_output=self.multimask))


def rewritten(model: Any, *passes: Pass) -> Any:
    ours = copy.deepcopy(model)
    for pass_ in passes or (FusedMaskDecoder(),):
        pass_(ours)
    return ours


@torch.no_grad()
def inputs(sam: Sam, kind: str, prompts: int) -> list[Tensor]:
    """What SAM's prompt encoder gives the decoder: the image's embedding and positions, sparse and dense prompts."""
    generator = torch.Generator().manual_seed(prompts)
    points = 64 * torch.rand(prompts, 2, 2, generator=generator), torch.ones(prompts, 2)
    boxes = 64 * torch.rand(prompts, 4, generator=generator)
    masks = torch.randn(prompts, 1, 16, 16, generator=generator)
    given: dict[str, Any] = {
        "points": (points, None, None),
        "boxes": (None, boxes, None),
        "points + boxes": (points, boxes, None),
    }
    given |= {"masks": (None, None, masks), "boxes + masks": (None, boxes, masks)}
    image = torch.randn(1, 64, 4, 4, generator=generator)
    return [image, sam.prompt_encoder.get_dense_pe(), *sam.prompt_encoder(*given[kind])]


@pytest.mark.parametrize("passes", PASSES, ids=str)
@pytest.mark.parametrize("prompts", [1, 7, 300])
@pytest.mark.parametrize("kind", ["points", "boxes", "points + boxes", "masks", "boxes + masks"])
def test_errs_like_the_unmodified_decoder(kind: str, prompts: int, passes: list[Pass]) -> None:
    sam = random_sam()
    ours = rewritten(sam.mask_decoder, *passes)
    for multimask in (True, False):
        # Together, as a few predicted IoUs may round well by luck: the error is of both outputs.
        assert_rounding(Predict(sam.mask_decoder, multimask), Predict(ours, multimask), inputs(sam, kind, prompts))


@pytest.mark.parametrize("passes", PASSES, ids=str)
@torch.no_grad()
def test_every_prompt_may_have_its_own_image(passes: list[Pass]) -> None:
    sam = random_sam()
    ours = rewritten(sam.mask_decoder, *passes)
    for kind in ("points", "masks"):
        _, positions, sparse, dense = inputs(sam, kind, 3)
        images = torch.randn(3, 64, 4, 4)
        for multimask in (True, False):
            found = ours(images, positions, sparse, dense, multimask)
            for index in range(3):
                one = slice(index, index + 1)
                expected = sam.mask_decoder(images[one], positions, sparse[one], dense[one], multimask)
                assert relative_error([tensor[one] for tensor in found], expected) < 1e-6


@pytest.mark.parametrize("passes", PASSES, ids=str)
@torch.no_grad()
def test_one_prompt_for_several_images_as_in_sam(passes: list[Pass]) -> None:
    sam = random_sam()
    _, positions, sparse, dense = inputs(sam, "points", 1)
    images = torch.randn(3, 64, 4, 4)
    expected = sam.mask_decoder(images, positions, sparse, dense, True)
    found = rewritten(sam.mask_decoder, *passes)(images, positions, sparse, dense, True)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert relative_error(found, expected) < 1e-6


def test_another_number_of_images_is_told() -> None:
    sam = random_sam()
    _, positions, sparse, dense = inputs(sam, "points", 3)
    with pytest.raises(InvalidInput, match="got 2 image embeddings for 3 prompts: pass one for all prompts, or one fo"):
        rewritten(sam.mask_decoder)(torch.randn(2, 64, 4, 4), positions, sparse, dense, True)


@torch.no_grad()
def shapes_in(module: nn.Module, use: Any) -> list[int]:
    """The batch of every input of a module, as `use` runs it."""
    seen: list[int] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    use()
    handle.remove()
    return seen


def test_what_is_equal_for_all_prompts_is_projected_once() -> None:
    sam = random_sam()
    ours = rewritten(sam.mask_decoder, *PASSES[1])
    layers, final = ours.transformer.layers, ours.transformer.final_attn_token_to_image

    def batches(kind: str) -> list[list[int]]:
        first, second = ((layer.cross_attn_token_to_image, layer.cross_attn_image_to_token) for layer in layers)
        image_side = [first[0].k_proj, first[0].v_proj, first[1].q_proj]
        image_side += [second[0].k_proj, second[0].v_proj, second[1].q_proj, final.k_proj]
        return [shapes_in(module, lambda: ours(*inputs(sam, kind, 5), True)) for module in image_side]

    assert batches("points") == [[1]] * 3 + [[5]] * 4
    assert batches("masks") == [[5]] * 7


def test_a_quarter_of_vit_bs_decoder_less() -> None:
    with torch.device("meta"):
        decoder = random_sam(1024, decoder_width=256).mask_decoder.requires_grad_(False)
        given = torch.empty(1, 256, 64, 64), torch.empty(1, 256, 64, 64), torch.empty(64, 2, 256)
        dense = torch.empty(1, 256, 1, 1).expand(64, -1, 64, 64)

    def count(module: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            module(*given, dense, multimask_output=True)
        return int(counter.get_total_flops())

    assert count(rewritten(decoder)) < 0.8 * count(decoder)


# With other passes


@pytest.mark.parametrize(
    "passes", list(itertools.permutations([CastDtype(encoder=False), FusedMaskDecoder(), SDPAttention(encoder=False)]))
)
@torch.no_grad()
def test_casts_at_the_borders_in_any_order(passes: Sequence[Pass]) -> None:
    sam = random_sam()
    half = rewritten(sam, CastDtype(encoder=False))
    ours = rewritten(sam, *passes)
    given = inputs(sam, "points", 7)
    truth = copy.deepcopy(sam.mask_decoder).double()(*(tensor.double() for tensor in given), True)
    found = ours.mask_decoder(*given, True)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert ours.mask_decoder.mask_tokens.weight.dtype == torch.bfloat16
    assert 2**-12 < relative_error(found, truth) <= 1.2 * relative_error(half.mask_decoder(*given, True), truth)
    layer = ours.mask_decoder.transformer.layers[0]
    use = lambda: ours.mask_decoder(*given, True)  # noqa: E731
    assert shapes_in(layer.cross_attn_token_to_image.k_proj, use) == [1], "the cast made a copy for every prompt"


@torch.no_grad()
def test_a_part_put_there_later_is_used_and_sees_what_sam_would_give_it() -> None:
    class Loud(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention
            self.seen: list[tuple[int, ...]] = []

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.seen += [q.shape[:1], k.shape[:1], v.shape[:1]]
            out: Tensor = 2 * self.attention(q, k, v)
            return out

    sam = random_sam()
    given = inputs(sam, "points", 5)
    for model in (sam, ours := rewritten(sam)):
        layer = model.mask_decoder.transformer.layers[0]
        layer.cross_attn_token_to_image = Loud(layer.cross_attn_token_to_image)
        network = model.mask_decoder.output_hypernetworks_mlps[2].layers
        network[1] = nn.Sequential(network[1], nn.Tanh())
    assert relative_error(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True)) < 1e-6
    assert ours.mask_decoder.transformer.layers[0].cross_attn_token_to_image.seen == [(5,)] * 3


@torch.no_grad()
def test_hypernetworks_quantised_later_are_used() -> None:
    sam = random_sam()
    given = inputs(sam, "points", 5)
    quantise = Int8Dynamic(layers=("*output_hypernetworks_mlps*",))
    ours = rewritten(sam, FusedMaskDecoder(), quantise)
    assert relative_error(ours.mask_decoder(*given, True), rewritten(sam, quantise).mask_decoder(*given, True)) < 1e-5
    assert relative_error(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True)) > 1e-4


@torch.no_grad()
def test_hooks_are_called_as_in_sam() -> None:
    def calls(model: Sam) -> list[str]:
        names = {module: name for name, module in model.mask_decoder.named_modules()}
        seen: list[str] = []
        handles = [module.register_forward_hook(lambda module, *_: seen.append(names[module])) for module in names]
        model.mask_decoder(*inputs(sam, "points", 2), True)
        for handle in handles:
            handle.remove()
        return seen

    sam = random_sam()
    assert calls(rewritten(sam, *PASSES[1])) == calls(sam)


@torch.no_grad()
def test_newly_loaded_weights_are_used() -> None:
    sam, other = random_sam(), random_sam(seed=1)
    given = inputs(sam, "points", 3)
    ours = rewritten(sam)
    ours.load_state_dict(other.state_dict())
    assert_bit_equal(ours.mask_decoder(*given, True), rewritten(other).mask_decoder(*given, True))


def test_copies_and_pickles() -> None:
    sam = random_sam()
    given = inputs(sam, "points", 3)
    ours = rewritten(sam, FusedMaskDecoder(), CastDtype())
    with torch.no_grad():
        expected = ours.mask_decoder(*given, True)
        for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert_bit_equal(again.mask_decoder(*given, True), expected)


# Meta's callers


def test_the_onnx_wrapper_answers_as_before() -> None:
    sam = random_sam()
    embedding = torch.randn(1, 64, 4, 4)
    points, labels = torch.tensor([[[20.0, 30.0], [50.0, 41.5]]]), torch.tensor([[1.0, 0.0]])
    given = embedding, points, labels, torch.randn(1, 1, 16, 16), torch.ones(1), torch.tensor([64.0, 48.0])
    theirs = SamOnnxModel(sam, return_single_mask=False)(*given)
    assert relative_error(SamOnnxModel(rewritten(sam), return_single_mask=False)(*given), theirs) < 1e-6


def test_the_embedded_models_masks_stay(tiny256: Sam) -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8).repeat(32, 0).repeat(32, 1)
    points = 256 * torch.rand(16, 1, 2, generator=torch.Generator().manual_seed(0))
    answers = []
    for sam in (tiny256, rewritten(tiny256, *PASSES[1])):
        predictor = SamPredictor(sam)
        predictor.set_image(image)
        answers.append(predictor.predict_torch(points, torch.ones(16, 1)))
    (mine, my_iou, _), (theirs, their_iou, _) = answers
    assert mine.shape == theirs.shape == (16, 3, 256, 256)
    assert theirs.any()
    intersection, union = ((how(mine, theirs)).sum() for how in (torch.logical_and, torch.logical_or))
    assert intersection / union >= 0.9999
    assert relative_error(my_iou, their_iou) < 1e-5


# Where it applies


def reason(model: nn.Module) -> str:
    (found,) = FusedMaskDecoder().match(model)
    assert isinstance(found, Skip)
    return found.reason


def test_other_code_is_a_skip() -> None:
    sam = random_sam()
    assert [found.fqn for found in FusedMaskDecoder().match(sam)] == ["mask_decoder"]
    assert [found.fqn for found in FusedMaskDecoder().match(sam.mask_decoder)] == [""]
    for name, told in (
        ("transformer", "transformer: its forward was replaced on this module"),
        ("transformer.layers.1", "transformer.layers.1: its forward was replaced on this module"),
        ("transformer.final_attn_token_to_image", "an attention of its transformer: its forward was replaced on this"),
    ):
        sam = random_sam()
        sam.mask_decoder.get_submodule(name).forward = lambda *_: None
        assert reason(sam).startswith(told)
    sam = random_sam()
    sam.mask_decoder.predict_masks = lambda *_: None
    with pytest.raises(NoSites, match="mask_decoder: its predict_masks was replaced on this module"):
        FusedMaskDecoder()(sam)


def test_twice_says_so_and_undo_puts_sams_code_back() -> None:
    sam = random_sam()
    given = inputs(sam, "points", 3)
    before = sam.mask_decoder
    result = FusedMaskDecoder()(sam)
    with pytest.raises(AlreadyApplied):
        FusedMaskDecoder()(sam)
    assert sam.mask_decoder is not before
    result.undo()
    assert sam.mask_decoder is before
    assert_bit_equal(sam.mask_decoder(*given, True), random_sam().mask_decoder(*given, True))
