from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from segment_anything.utils.onnx import SamOnnxModel
from torch import Tensor, nn

from samopt import InvalidInput, NoSites, clone
from samopt.passes import CastDtype, FusedMaskDecoder, HoistRelPos, LinearPatchEmbed, SDPAttention
from tests.models import random_sam
from tests.numerics import assert_bit_equal, relative_error

HALF: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")


def onnx_inputs(embeddings: Tensor) -> tuple[Tensor, ...]:
    points, labels = torch.tensor([[[20.0, 30.0], [50.0, 41.5]]]), torch.tensor([[1.0, 0.0]])
    mask, has_mask = torch.randn(1, 1, 16, 16), torch.ones(1)
    return embeddings, points, labels, mask, has_mask, torch.tensor([64.0, 48.0])


@pytest.mark.parametrize("dtype", HALF)
def test_borders_are_float32(dtype: Literal["bfloat16", "float16"]) -> None:
    sam = random_sam()
    CastDtype(dtype)(sam)
    for part, held in (
        (sam.image_encoder, getattr(torch, dtype)),
        (sam.mask_decoder, getattr(torch, dtype)),
        (sam.prompt_encoder, torch.float32),
    ):
        assert {parameter.dtype for parameter in part.parameters()} == {held}
    embeddings = sam.image_encoder(torch.randn(2, 3, 64, 64))
    sparse, dense = torch.randn(3, 2, 64), torch.randn(3, 64, 4, 4)
    dense_pe = sam.prompt_encoder.get_dense_pe()
    outputs = sam.mask_decoder(embeddings[:1], dense_pe, sparse, dense, multimask_output=True)
    direct = sam.mask_decoder.predict_masks(
        image_embeddings=embeddings[:1],
        image_pe=dense_pe,
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
    )
    assert {tensor.dtype for tensor in (embeddings, *outputs, *direct)} == {torch.float32}
    assert_bit_equal([tensor[:, 1:] for tensor in direct], outputs)


def test_prompt_encoder_is_not_touched() -> None:
    sam = random_sam()
    before = dict(sam.prompt_encoder.named_modules()), list(sam.prompt_encoder.parameters())
    CastDtype()(sam)
    assert dict(sam.prompt_encoder.named_modules()) == before[0]
    assert all(mine is theirs for mine, theirs in zip(sam.prompt_encoder.parameters(), before[1], strict=True))


@pytest.mark.parametrize("dtype", HALF)
@torch.no_grad()
def test_errs_like_a_plain_cast(dtype: Literal["bfloat16", "float16"]) -> None:
    sam = random_sam(80, width=96, heads=3, window=2)
    half = getattr(torch, dtype)
    pixels = torch.randn(2, 3, 80, 80)
    plain_encoder = copy.deepcopy(sam.image_encoder).to(half)
    plain_decoder = copy.deepcopy(sam.mask_decoder).to(half)
    truth = copy.deepcopy(sam).double()
    sam_prompts = sam.prompt_encoder.get_dense_pe(), torch.randn(3, 2, 64), torch.randn(3, 64, 5, 5)

    def decode(decoder: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        given = (tensor.to(dtype) for tensor in (torch.ones(1, 64, 5, 5), *sam_prompts))
        return list(decoder(*given, multimask_output=True))

    CastDtype(dtype)(sam)
    encoded, decoded = truth.image_encoder(pixels.double()), decode(truth.mask_decoder, torch.float64)
    plain = relative_error(plain_encoder(pixels.to(half)), encoded)
    assert 0 < relative_error(sam.image_encoder(pixels), encoded) <= 1.1 * plain
    plain = relative_error(decode(plain_decoder, half), decoded)
    assert 0 < relative_error(decode(sam.mask_decoder, torch.float32), decoded) <= 1.1 * plain


@pytest.mark.parametrize("dtype", HALF)
@torch.no_grad()
def test_with_the_other_passes_errs_like_a_plain_cast(dtype: Literal["bfloat16", "float16"]) -> None:
    encoder = random_sam(80, width=96, heads=3, depth=4, window=2, global_blocks=(1, 3)).image_encoder
    plain = copy.deepcopy(encoder).to(getattr(torch, dtype))
    pixels = torch.randn(4, 3, 80, 80)
    truth = copy.deepcopy(encoder).double()(pixels.double())
    for pass_ in (LinearPatchEmbed(), HoistRelPos(), SDPAttention(), CastDtype(dtype)):
        pass_(encoder)
    limit = 1.1 * relative_error(plain(pixels.to(getattr(torch, dtype))), truth)
    assert relative_error(encoder(pixels), truth) <= limit


def test_original_weights_stay() -> None:
    sam = random_sam()
    weights = {name: (parameter, parameter.clone()) for name, parameter in sam.named_parameters()}
    modules = dict(sam.named_modules())
    result = CastDtype()(sam)
    result.undo()
    assert dict(sam.named_modules()) == modules
    for name, parameter in sam.named_parameters():
        assert parameter is weights[name][0]
        assert_bit_equal(parameter, weights[name][1])


def test_a_later_cast_is_followed() -> None:
    """Plain `.float()` on a cast model works: the border asks the weights for their dtype at each call."""
    sam = random_sam()
    pixels = torch.randn(1, 3, 64, 64)
    CastDtype()(sam)
    rounded = {name: parameter.float() for name, parameter in sam.named_parameters()}
    sam.float()
    plain = random_sam(seed=1)
    plain.load_state_dict({**sam.state_dict(), **rounded})
    assert_bit_equal(sam.image_encoder(pixels), plain.image_encoder(pixels))


@pytest.mark.parametrize(("encoder", "decoder"), [(True, False), (False, True)])
def test_options_choose_encoder_or_decoder(encoder: bool, decoder: bool) -> None:
    sam = random_sam()
    result = CastDtype(encoder=encoder, decoder=decoder)(sam)
    assert [site.fqn for site in result.sites] == (["image_encoder"] if encoder else ["mask_decoder"])
    assert (sam.image_encoder.neck[0].weight.dtype == torch.bfloat16) is encoder
    assert (sam.mask_decoder.mask_tokens.weight.dtype == torch.bfloat16) is decoder


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16, torch.float64])
def test_other_weights_than_float32_are_a_skip(held: torch.dtype) -> None:
    sam = random_sam()
    sam.mask_decoder.to(held)
    result = CastDtype()(clone(sam))
    assert [skip.fqn for skip in result.skipped] == ["mask_decoder"]
    sam.image_encoder.to(held)
    with pytest.raises(NoSites, match=f"rewrite: its weights are {held}, not float32 "):
        CastDtype()(sam)


def test_mixed_weights_are_a_skip() -> None:
    sam = random_sam()
    sam.image_encoder.neck.bfloat16()
    with pytest.raises(NoSites, match=r"image_encoder: its weights are torch\.bfloat16, torch\.float32, not float32"):
        CastDtype(decoder=False)(sam)


@pytest.mark.parametrize("value", ["float32", "bf16", torch.bfloat16])
def test_other_dtypes_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="option dtype must be one of 'bfloat16', 'float16'"):
        CastDtype(value)  # type: ignore[arg-type]


def test_onnx_wrapper_calls_past_the_forward() -> None:
    sam = random_sam()
    embeddings = sam.image_encoder(torch.randn(1, 3, 64, 64)).detach()
    inputs = onnx_inputs(embeddings)
    plain = SamOnnxModel(sam, return_single_mask=False)(*inputs)
    CastDtype("float16")(sam)
    ours = SamOnnxModel(sam, return_single_mask=False)(*inputs)
    assert {tensor.dtype for tensor in ours} == {torch.float32}
    assert 0 < relative_error(ours[2], plain[2]) < 2**-6


def test_autocast_and_gradients_do_not_matter_to_the_borders() -> None:
    sam = random_sam()
    CastDtype()(sam)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain = sam.image_encoder(pixels)
    assert_bit_equal(sam.image_encoder(pixels), plain)
    with torch.inference_mode():
        assert_bit_equal(sam.image_encoder(pixels), plain)


def test_prompt_coordinates_keep_their_precision() -> None:
    """Two points whose coordinates are one number in bfloat16 get two answers, as in the unmodified model."""
    sam: Sam = random_sam(1024, width=32, depth=1, window=4, global_blocks=())
    CastDtype(encoder=False)(sam)
    one, other = (
        sam.prompt_encoder((torch.tensor([[[600.0, x]]]), torch.ones(1, 1)), None, None)[0] for x in (700.0, 701.0)
    )
    assert torch.tensor(700.0).bfloat16() == torch.tensor(701.0).bfloat16()
    assert one.dtype == torch.float32
    assert not torch.equal(one, other)


def test_no_prompts_at_all() -> None:
    """Meta's own decoder refuses them; the fused one does not."""
    sam = random_sam()
    FusedMaskDecoder()(sam)
    CastDtype()(sam)
    prompts = sam.prompt_encoder(None, torch.zeros(0, 4), None)
    masks, iou = sam.mask_decoder(torch.randn(1, 64, 4, 4), sam.prompt_encoder.get_dense_pe(), *prompts, True)
    assert (masks.shape, iou.shape) == ((0, 3, 16, 16), (0, 3))


def test_predictor_keeps_float32_features() -> None:
    sam = random_sam()
    CastDtype()(sam)
    predictor = SamPredictor(sam)
    predictor.set_torch_image(torch.zeros(1, 3, 64, 48), (128, 96))
    assert predictor.get_image_embedding().dtype == torch.float32
    _, iou, logits = predictor.predict_torch(torch.tensor([[[3.0, 4.0]]]), torch.ones(1, 1))
    assert iou.dtype == logits.dtype == torch.float32
