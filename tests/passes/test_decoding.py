"""Compiled prompt encoders and mask decoders serve any number of prompts, and few of them by CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor
from torch import Tensor

from samopt import Pass, SamoptError
from samopt.passes import CastDtype, Compile, FusedMaskDecoder, HoistImagePE, SDPAttention, WhereIndexing
from samopt.passes.decoding import FEW_PROMPTS
from tests.compilations import compilations
from tests.models import random_sam
from tests.numerics import assert_bit_equal, relative_error
from tests.stand_in import StandIn

pytestmark = pytest.mark.usefixtures("dynamo_only")


def decoder_inputs(prompts: int, tokens: int = 2, *, masks: bool = False, images: int = 1) -> list[Tensor]:
    """An image's embedding and positions, sparse and dense prompts."""
    generator = torch.Generator().manual_seed(prompts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dense = normal(prompts, 64, 4, 4) if masks else normal(1, 64, 1, 1).expand(prompts, -1, 4, 4)
    return [normal(images, 64, 4, 4), normal(1, 64, 4, 4), normal(prompts, tokens, 64), dense]


NOTHING: tuple[Pass, ...] = ()
EVERYTHING = (SDPAttention(encoder=False), FusedMaskDecoder(), CastDtype(encoder=False))


@pytest.mark.parametrize(
    ("mode", "passes"), [(torch.no_grad, NOTHING), (torch.inference_mode, EVERYTHING)], ids=["sam", "rewritten"]
)
def test_a_decoder_compiles_twice_for_any_number_of_prompts(mode: Any, passes: tuple[Pass, ...]) -> None:
    sam = random_sam()
    for pass_ in passes:
        pass_(sam)
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    with mode():
        for multimask, masks in ((True, False), (False, True)):
            before = compilations()
            # 2 prompts of 2 tokens first: sizes that are equal by chance must not be taken to be equal always.
            for prompts, tokens in ((2, 2), (1, 2), (4, 4), (7, 2), (1, 9), (64, 3), (1024, 2)):
                given = decoder_inputs(prompts, tokens, masks=masks)
                ours_found = ours.mask_decoder(*given, multimask_output=multimask)
                assert_bit_equal(ours_found, sam.mask_decoder(*given, multimask_output=multimask))
                assert not any(name.startswith("_dynamo") for tensor in given for name in vars(tensor))
            assert compilations() == before + 2


@torch.no_grad()
def test_a_prompt_encoder_compiles_twice_for_any_number_of_prompts() -> None:
    sam = random_sam()
    WhereIndexing()(sam)
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    for kinds in ("points", "boxes", "points boxes", "points masks"):
        before = compilations()
        for prompts, tokens in ((2, 2), (1, 2), (7, 4), (300, 2)):
            points = 64 * torch.rand(prompts, tokens, 2), torch.randint(-1, 2, (prompts, tokens))
            boxes, masks = 64 * torch.rand(prompts, 4), torch.randn(prompts, 1, 16, 16)
            given = [
                value if name in kinds else None
                for name, value in zip(("points", "boxes", "masks"), (points, boxes, masks), strict=True)
            ]
            found = ours.prompt_encoder(*given)
            assert_bit_equal(list(found), list(sam.prompt_encoder(*given)))
            assert found[1].stride(0) == 0 or masks is given[2] or prompts == 1
        assert compilations() == before + (0 if "masks" in kinds else 2)
    alone = ours.prompt_encoder(None, None, masks)
    assert_bit_equal(list(alone), list(sam.prompt_encoder(None, None, masks)))


@torch.no_grad()
def test_a_compiled_decoder_takes_an_image_for_each_prompt() -> None:
    sam = random_sam()
    FusedMaskDecoder()(sam)
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    for prompts in (3, 5, 8):
        given = decoder_inputs(prompts, images=prompts)
        assert_bit_equal(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True))
    assert compilations() == 1


@torch.no_grad()
def test_a_compiled_decoder_serves_metas_callers() -> None:
    """SAM calls it with keyword arguments; the ONNX export calls `predict_masks`, which is not compiled."""
    sam = random_sam()
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    image, positions, sparse, dense = decoder_inputs(3)
    given = {
        "image_embeddings": image,
        "image_pe": positions,
        "sparse_prompt_embeddings": sparse,
        "dense_prompt_embeddings": dense,
    }
    plain = sam.mask_decoder.predict_masks(**given)
    assert_bit_equal(ours.mask_decoder.predict_masks(**given), plain)
    assert compilations() == 0
    expected = [tensor[:, 1:] for tensor in plain]
    assert_bit_equal(ours.mask_decoder(**given, multimask_output=True), expected)
    assert compilations() == 1
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: ours.mask_decoder(**given, multimask_output=True), range(4)):
            assert_bit_equal([tensor.detach() for tensor in found], expected)


@torch.no_grad()
def test_a_decoder_past_the_recompile_limit_is_an_error_and_a_copy_is_not_compiled() -> None:
    sam = random_sam()
    result = Compile(decoder=True, recompile_limit=2)(sam)
    decoder = sam.mask_decoder
    assert copy.deepcopy(decoder)._compiled_call_impl is None
    with torch._dynamo.config.patch(recompile_limit=2):
        for prompts in (1, 2):
            decoder(*decoder_inputs(prompts), True)
        with pytest.raises(SamoptError, match=r"may compile \(2: .*raise Compile\(recompile_limit="):
            decoder(*decoder_inputs(2), False)
    result.undo()
    assert sam.mask_decoder._compiled_call_impl is None


# With CUDA graphs, on a stand-in for the GPU


def close(ours: Any, theirs: Any) -> None:
    """A batch that is filled up is summed in another order, so that the last bits may differ."""
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.shape == wanted.shape
        assert relative_error(found, wanted) < 1e-5


def captured_decoder(*passes: Pass, scope: Literal["block", "none"] = "none") -> tuple[Any, Any]:
    """A Sam whose decoder and prompt encoder get CUDA graphs, and the same one as it is."""
    sam = random_sam()
    for pass_ in (WhereIndexing(), *passes):
        pass_(sam)
    ours = copy.deepcopy(sam)
    Compile(scope, decoder=True, cuda_graphs=True)(ours)
    return ours, sam


@pytest.mark.parametrize("passes", [NOTHING, EVERYTHING], ids=["sam", "rewritten"])
@torch.no_grad()
def test_what_comes_again_is_captured_and_answers_stay(on_stand_in: StandIn, passes: tuple[Pass, ...]) -> None:
    ours, sam = captured_decoder(*passes)
    kinds = [
        (decoder_inputs(prompts, tokens, masks=masks, images=images), multimask)
        for prompts, tokens, masks, images in ((2, 2, False, 1), (1, 3, False, 1), (7, 2, True, 1), (3, 2, False, 3))
        for multimask in (True, False)
        if images == 1 or passes
    ]
    for turn in range(3):
        answers = [ours.mask_decoder(*given, multimask) for given, multimask in kinds]
        for answer, (given, multimask) in zip(answers, kinds, strict=True):
            assert_bit_equal(list(answer), list(sam.mask_decoder(*given, multimask)))
        assert len(on_stand_in.captured) == (len(kinds) if turn else 0)
        assert on_stand_in.replays == turn * len(kinds)


@torch.no_grad()
def test_graphs_need_no_compilation(on_stand_in: StandIn) -> None:
    ours, sam = captured_decoder(*EVERYTHING)
    points = 64 * torch.rand(3, 2, 2), torch.randint(-1, 2, (3, 2))
    image, positions = torch.randn(2, 1, 64, 4, 4)
    for _ in range(3):
        given, expected = (model.prompt_encoder(points, None, None) for model in (ours, sam))
        assert_bit_equal(list(given), list(expected))
        answers = (model.mask_decoder(image, positions, *given, True) for model in (ours, sam))
        found, wanted = answers
        assert_bit_equal(list(found), list(wanted))
    assert (sorted(on_stand_in.captured), on_stand_in.replays) == ([1, 4], 4)
    assert compilations() == 0


@torch.no_grad()
def test_graphs_compile_nothing_more(on_stand_in: StandIn) -> None:
    """What a graph reads is to torch.compile what the caller gave, expanded where that was."""
    ours, _ = captured_decoder(scope="block")
    for _ in range(2):
        for prompts, tokens in ((2, 2), (1, 2), (7, 4)):
            points = 64 * torch.rand(prompts, tokens, 2), torch.randint(-1, 2, (prompts, tokens))
            sparse, dense = ours.prompt_encoder(points, None, None)
            ours.mask_decoder(torch.randn(1, 64, 4, 4), torch.randn(1, 64, 4, 4), sparse, dense, True)
    assert on_stand_in.replays == 6
    assert compilations() == 4, "two of the prompt encoder, two of the decoder"


@torch.no_grad()
def test_prompts_of_every_form_are_captured(on_stand_in: StandIn) -> None:
    ours, sam = captured_decoder()
    points, boxes = (64 * torch.rand(3, 2, 2), torch.randint(0, 2, (3, 2))), 64 * torch.rand(3, 4)
    masks = torch.randn(3, 1, 16, 16)
    forms = [(points, None, None), (None, boxes, None), (points, boxes, None), (points, None, masks)]
    for _ in range(3):
        for form in forms:
            found = ours.prompt_encoder(*form)
            assert_bit_equal(list(found), list(sam.prompt_encoder(*form)))
            assert (found[1].stride(0) == 0) == (form[2] is None), "no copy of it for every prompt"
    assert len(on_stand_in.captured) == 3, "points with and without masks are alike: masks run as they are"
    assert on_stand_in.replays == 9


@torch.no_grad()
def test_many_prompts_or_large_inputs_are_never_captured(on_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = captured_decoder()
    for _ in range(3):
        ours.mask_decoder(*decoder_inputs(FEW_PROMPTS + 1), True)
        ours.prompt_encoder((torch.empty(0, 2, 2), torch.empty(0, 2)), None, None)
    with monkeypatch.context() as little:
        little.setattr("samopt.passes.decoding.FEW_BYTES", 4 * 64 * 4 * 4 * 9)
        for _ in range(3):
            ours.mask_decoder(*decoder_inputs(8, masks=True), True)
    assert on_stand_in.captured == []
    for _ in range(3):
        ours.mask_decoder(*decoder_inputs(FEW_PROMPTS), True)
    assert on_stand_in.captured == [1]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights loaded": lambda sam: sam.load_state_dict({key: 0.5 * value for key, value in sam.state_dict().items()}),
    "weights in their place": lambda sam: sam.load_state_dict(
        {key: 0.5 * value for key, value in sam.state_dict().items()}, assign=True
    ),
    "a module replaced": lambda sam: setattr(sam.mask_decoder.transformer.layers[0].mlp, "act", torch.nn.Sigmoid()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_seen(on_stand_in: StandIn, change: str) -> None:
    ours, sam = captured_decoder()
    given = decoder_inputs(2)
    before = [ours.mask_decoder(*given, True)[0] for _ in range(2)][1]
    for model in (ours, sam):
        CHANGES[change](model)
    for _ in range(2):
        assert_bit_equal(list(ours.mask_decoder(*given, True)), list(sam.mask_decoder(*given, True)))
    assert relative_error(before, ours.mask_decoder(*given, True)[0]) > 0.01
    assert on_stand_in.captured == ([1] if change == "weights loaded" else [1, 1])


@pytest.mark.usefixtures("on_stand_in")
@pytest.mark.parametrize("cuda_graphs", [True, False])
@torch.no_grad()
def test_hooks_are_called(cuda_graphs: bool) -> None:
    """Also those that come after the compilation, in modules inside."""
    sam = random_sam()
    WhereIndexing()(sam)
    Compile(decoder=True, cuda_graphs=cuda_graphs)(sam)
    given, points = decoder_inputs(2), (torch.rand(2, 1, 2), torch.ones(2, 1))
    seen: list[str] = []
    for hooked in (False, True):
        if hooked:
            for module in (sam.mask_decoder.transformer, sam.prompt_encoder.pe_layer, sam.mask_decoder):
                module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        for _ in range(2):
            sam.prompt_encoder(points, None, None)
            answer = sam.mask_decoder(*given, True)
            assert_bit_equal(list(answer), list(copy.deepcopy(sam.mask_decoder)(*given, True)))
    once = ["TwoWayTransformer", "MaskDecoder"]
    assert seen == 2 * ["PositionEmbeddingRandom", *once, *once] or seen == 4 * once


@torch.no_grad()
def test_whatever_numbers_of_prompts_come_there_are_few_graphs(on_stand_in: StandIn) -> None:
    ours, sam = captured_decoder(*EVERYTHING)
    for prompts in (3, 4, 3, 1, 2, 2, 1, 4, 33, 64, 50):
        for images in {1, min(prompts, 4)} - ({4} if prompts > 4 else set()):
            given = decoder_inputs(prompts, images=images)
            close(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True))
    assert sorted(on_stand_in.captured) == [1, 1, 1, 1, 2, 4], "of 1, 2, 4 and 64 prompts, and of 2 and 4 images"
    for images in (3, 3, 4):  # and one prompt for all of them
        given = [decoder_inputs(1, images=images)[0], *decoder_inputs(1)[1:]]
        close(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True))
    assert len(on_stand_in.captured) == 7


@torch.no_grad()
def test_graphs_hold_so_much_memory_only(on_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samopt.passes.compile.KEPT_BYTES", 40_000)
    ours, _ = captured_decoder()
    for tokens in (1, 2, 3, 1):
        for _ in range(2):
            ours.mask_decoder(*decoder_inputs(2, tokens), True)
    assert on_stand_in.captured == [1, 1, 1, 1], "the first had gone when it came again"
    assert on_stand_in.waits == 2


def test_threads_get_the_answers_of_one(on_stand_in: StandIn) -> None:
    ours, sam = captured_decoder()
    inputs = [decoder_inputs(prompts) for prompts in (1, 2, 3, 2, 1)]

    @torch.no_grad()
    def answers(model: Any) -> list[Tensor]:
        return [answer for given in inputs for answer in model.mask_decoder(*given, True)]

    expected = answers(sam)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(answers, [ours] * 6):
            close(found, expected)
    assert sorted(on_stand_in.captured) == [1, 1, 1]


def test_a_predictor_gets_sams_masks(on_stand_in: StandIn) -> None:
    ours, sam = captured_decoder(HoistImagePE())
    image = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    predictors = [SamPredictor(model) for model in (ours, sam)]
    for predictor in predictors:
        predictor.set_image(image)
    for x in (10, 20, 30):
        found, expected = (p.predict(np.array([[x, 20]]), np.array([1]), return_logits=True) for p in predictors)
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)
    assert on_stand_in.replays >= 4
