from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any, Literal

import pytest
import torch
from segment_anything.modeling import Sam
from segment_anything.utils.onnx import SamOnnxModel
from torch import Tensor, nn

from samopt import NoSites, Pass, Site, Skip, Unsupported, clone, rebind
from samopt.passes import (
    CastDtype,
    Compile,
    FusedMaskDecoder,
    ImageToToken,
    Int8Dynamic,
    SDPAttention,
    SemiSparse,
)
from samopt.passes.kernels.image_to_token import image_to_token
from samopt.rebind import set_module
from tests.compilations import compilations
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding, relative_error
from tests.snapshot import Snapshot

Half = Literal["bfloat16", "float16"]
STEP = "cross_attn_image_to_token"
OTHERS: list[tuple[Pass, ...]] = [(), (SDPAttention(encoder=False),), (SDPAttention(encoder=False), FusedMaskDecoder())]

pytestmark = pytest.mark.usefixtures("kernels_anywhere")


class Decode(nn.Module):
    """A mask decoder as a module of tensors only."""

    def __init__(self, sam: Any) -> None:
        super().__init__()
        self.decoder = sam.mask_decoder

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self.decoder(*inputs, True))


def cast_sam(dtype: Half = "bfloat16", **sizes: Any) -> Sam:
    sam = random_sam(**sizes)
    CastDtype(dtype, encoder=False)(sam)
    return sam


def rewritten(model: Any, *passes: Pass) -> Any:
    ours = copy.deepcopy(model)
    for pass_ in passes or (ImageToToken(),):
        pass_(ours)
    return ours


def inputs(prompts: int = 3, tokens: int = 2, *, masks: bool = False, images: int = 1) -> list[Tensor]:
    """An image's embedding and positions, sparse and dense prompts."""
    generator = torch.Generator().manual_seed(prompts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dense = normal(prompts, 64, 4, 4) if masks else normal(1, 64, 1, 1).expand(prompts, -1, 4, 4)
    return [normal(images, 64, 4, 4), normal(1, 64, 4, 4), normal(prompts, tokens, 64), dense]


@torch.no_grad()
def answer(sam: Any, given: list[Tensor] | None = None) -> list[Tensor]:
    return list(sam.mask_decoder(*(given or inputs()), True))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The batches of image tokens, positions and prompts in every call of the operator."""
    found: list[tuple[int, ...]] = []

    def spied(*given: Any) -> Tensor:
        assert len({tensor.dtype for tensor in given[:10]}) == 1
        assert all(tensor.is_contiguous() for tensor in given[:2])
        found.append(tuple(tensor.shape[0] for tensor in given[:3]))
        out: Tensor = image_to_token(*given)
        return out

    monkeypatch.setattr("samopt.passes.image_to_token.image_to_token", spied)
    return found


# What it computes


@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
def test_errs_like_the_unmodified_decoder(masks: bool, dtype: Half, others: tuple[Pass, ...]) -> None:
    class Layers(nn.Module):
        """The transformer's layers, whose last step is rewritten."""

        def __init__(self, sam: Sam) -> None:
            super().__init__()
            self.transformer = sam.mask_decoder.transformer

        def forward(self, *inputs: Tensor) -> list[Tensor]:
            return list(self.transformer(*inputs))

    sam = cast_sam(dtype)
    image, positions, sparse, _ = inputs(7, 5)
    image = image if masks else image.expand(7, -1, -1, -1)
    given = [
        x.to(getattr(torch, dtype)) for x in (image.expand(7, -1, -1, -1), positions.expand(7, -1, -1, -1), sparse)
    ]
    assert_rounding(Layers(sam), Layers(rewritten(sam, *others, ImageToToken())), given)


def test_the_decoders_last_steps_are_the_operator_and_what_is_shared_stays_one(seen: list[tuple[int, ...]]) -> None:
    sam = cast_sam()
    answer(rewritten(sam), inputs(5))
    assert seen == [(5, 5, 5)] * 2
    seen.clear()
    ours = rewritten(sam, FusedMaskDecoder(), ImageToToken())
    answer(ours, inputs(5))
    answer(ours, inputs(5, masks=True))
    answer(ours, inputs(5, images=5))
    answer(ours, inputs(1, images=3))
    assert seen == [(1, 1, 5), (5, 1, 5)] + [(5, 1, 5)] * 4 + [(3, 1, 3)] * 2


@pytest.mark.parametrize("passes", list(itertools.permutations([*OTHERS[2], ImageToToken()])), ids=str)
def test_with_other_passes_in_any_order(passes: tuple[Pass, ...], seen: list[tuple[int, ...]]) -> None:
    sam = cast_sam()
    wanted = answer(rewritten(sam, *OTHERS[2], ImageToToken()))
    seen.clear()
    assert_bit_equal(answer(rewritten(sam, *passes)), wanted)
    assert seen == [(1, 1, 3), (3, 1, 3)]


# Where it applies


def test_on_a_cpu_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        Unsupported, match="Triton kernels need a GPU and the model is on cpu; leave image_to_token out"
    ):
        ImageToToken()(cast_sam())


def reason(model: nn.Module) -> str:
    """Why the first layer is left out."""
    found = next(iter(ImageToToken().match(model)))
    assert isinstance(found, Skip)
    return found.reason


def test_sites_are_the_layers() -> None:
    sam = cast_sam()
    layers = [f"transformer.layers.{index}" for index in (0, 1)]
    assert list(ImageToToken().match(sam)) == [Site(f"mask_decoder.{layer}") for layer in layers]
    assert list(ImageToToken().match(sam.mask_decoder)) == [Site(layer) for layer in layers]


def test_what_does_not_fit_is_a_skip() -> None:
    with pytest.raises(NoSites, match="its weights are float32: apply CastDtype first"):
        ImageToToken()(random_sam())
    assert reason(cast_sam(decoder_width=96)).startswith("its tokens have 96 channels, which is no power of two")

    def changed(part: str, change: Any) -> str:
        sam = cast_sam()
        change(sam.mask_decoder.transformer.layers[0].get_submodule(part))
        return reason(sam)

    def replace(part: Any) -> None:
        part.forward = lambda *_: None

    assert changed("", replace) == "its forward was replaced on this module"
    assert changed(STEP, replace).startswith(f"{STEP}: its forward was replaced")
    assert changed("norm4", replace).startswith("norm4: its forward was replaced")
    unbiased = f"{STEP}.q_proj is no plain linear layer with a bias"
    assert changed(f"{STEP}.q_proj", lambda part: part.register_parameter("bias", None)) == unbiased
    assert changed("norm4", lambda part: part.register_parameter("bias", None)).startswith("norm4 is not over the chan")
    sam = cast_sam()
    sam.mask_decoder.transformer.layers[0].cross_attn_image_to_token.num_heads = 3
    assert reason(sam) == "its 3 heads are no power of two"
    assert len(rewritten(sam).mask_decoder.transformer.layers) == 2


# What changes later


def test_undo_puts_back_what_was_there() -> None:
    sam = cast_sam()
    before, expected = Snapshot(sam), answer(sam)
    result = ImageToToken()(sam)
    assert not torch.equal(answer(sam)[0], expected[0])
    result.undo()
    before.assert_unchanged(sam)
    assert_bit_equal(answer(sam), expected)


def test_copies_pickles_and_other_checkpoints() -> None:
    sam, other = cast_sam(), cast_sam(seed=1)
    ours = rewritten(sam)
    expected = answer(ours)
    assert ours.state_dict().keys() == sam.state_dict().keys()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bit_equal(answer(again), expected)
    for assign in (False, True):
        ours.load_state_dict(other.state_dict(), assign=assign)
        assert_bit_equal(answer(ours), answer(rewritten(other)))


class Loud(nn.Module):
    """A module around another, whose results it makes much larger."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        out: Tensor = 100 * self.inner(*args, **kwargs)
        return out


def loud(self: Any, x: Tensor) -> Tensor:
    return 100 * type(self).forward(self, x)


def rebound(module: Any) -> Any:
    """As a pass of the user's own would do it."""
    new = clone(module)
    rebind(new, "forward", loud)
    return new


@pytest.mark.parametrize(
    ("part", "put"),
    [
        *((part, Loud) for part in (STEP, f"{STEP}.q_proj", f"{STEP}.out_proj", "norm4")),
        *((part, rebound) for part in (f"{STEP}.q_proj", f"{STEP}.out_proj", "norm4")),
    ],
)
def test_a_part_put_there_later_is_used(part: str, put: Any, seen: list[tuple[int, ...]]) -> None:
    sam = cast_sam()
    ours = rewritten(sam)
    for model in (sam, ours):
        layer = model.mask_decoder.transformer.layers[0]
        set_module(layer, part, put(layer.get_submodule(part)))
    wanted = answer(sam)
    assert relative_error(answer(ours), wanted) < 0.02
    assert seen == [(3, 3, 3)], "only the other layer's step is the operator"
    assert relative_error(answer(rewritten(cast_sam())), wanted) > 0.04


def test_hooks_are_called_as_in_sam(seen: list[tuple[int, ...]]) -> None:
    def calls(model: Sam) -> list[str]:
        names = {module: name for name, module in model.mask_decoder.named_modules()}
        found: list[str] = []
        handles = [module.register_forward_hook(lambda module, *_: found.append(names[module])) for module in names]
        answer(model)
        for handle in handles:
            handle.remove()
        return found

    sam = cast_sam()
    ours = rewritten(sam)
    assert calls(ours) == calls(sam)
    assert seen == []
    answer(ours)
    assert len(seen) == 2


@pytest.mark.parametrize("part", [STEP, f"{STEP}.q_proj", f"{STEP}.out_proj", "norm4"])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_single_hook_is_enough(before: bool, part: str, seen: list[tuple[int, ...]]) -> None:
    ours = rewritten(cast_sam())
    module = ours.mask_decoder.transformer.layers[1].get_submodule(part)
    called: list[nn.Module] = []
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(lambda module, *_: called.append(module))
    answer(ours)
    assert called == [module]
    assert len(seen) == 1
    handle.remove()
    answer(ours)
    assert len(called) == 1
    assert len(seen) == 3


@pytest.mark.parametrize(
    "quantise", [Int8Dynamic(("decoder",)), Int8Dynamic(("decoder",), kernel="torchao"), SemiSparse(("decoder",))]
)
def test_layers_quantised_or_made_sparse_later_are_used(quantise: Pass, seen: list[tuple[int, ...]]) -> None:
    if getattr(quantise, "kernel", None) == "torchao":
        pytest.importorskip("torchao")
    sam = cast_sam()
    sparse = isinstance(quantise, SemiSparse)
    ours, alone = rewritten(sam, ImageToToken(), quantise), rewritten(sam, quantise)
    assert relative_error(answer(ours), answer(alone)) < (0.05 if sparse else 1e-2)
    assert len(seen) == (2 if sparse else 0), "weights of zeros and others are read as they are"


@torch.no_grad()
def test_in_float32_and_under_autocast_it_is_sams_own_step(seen: list[tuple[int, ...]]) -> None:
    ours = rewritten(cast_sam())
    assert_bit_equal(answer(ours.float()), answer(cast_sam().float()))
    sam = cast_sam("float16")
    image, positions, tokens = (
        torch.randn(1, 16, 64).half(),
        torch.randn(1, 16, 64).half(),
        torch.randn(1, 3, 64).half(),
    )
    layer, own = (model.mask_decoder.transformer.layers[0] for model in (rewritten(sam), sam))
    for norm in (module for part in (layer, own) for module in part.modules() if isinstance(module, nn.LayerNorm)):
        norm.float()  # autocast leaves norms alone on a CPU, and half precision meets float32 in the sums
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bit_equal(layer(tokens, image, tokens, positions), own(tokens, image, tokens, positions))
    assert seen == []


def test_metas_onnx_wrapper_takes_a_copy_in_float32(seen: list[tuple[int, ...]]) -> None:
    ours = rewritten(cast_sam(), FusedMaskDecoder(), ImageToToken())
    ours.mask_decoder.float()
    embedding, points, labels = torch.randn(1, 64, 4, 4), torch.tensor([[[20.0, 30.0]]]), torch.ones(1, 1)
    given = embedding, points, labels, torch.randn(1, 1, 16, 16), torch.ones(1), torch.tensor([64.0, 48.0])
    masks, *_ = SamOnnxModel(ours, return_single_mask=False)(*given)
    assert masks.shape == (1, 4, 64, 48)
    assert seen == []


# Compiled


@pytest.mark.usefixtures("dynamo_only")
@torch.no_grad()
def test_it_compiles_twice_for_any_number_of_prompts_and_tokens() -> None:
    sam = rewritten(cast_sam(), *OTHERS[2], ImageToToken())
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    torch._dynamo.utils.counters.clear()
    for masks in (False, True):
        before = compilations()
        for prompts, tokens in ((2, 2), (1, 2), (4, 4), (1, 80), (7, 80), (64, 3), (1024, 2)):
            given = inputs(prompts, tokens, masks=masks)
            assert_bit_equal(answer(ours, given), answer(sam, given))
        assert compilations() == before + 2


@torch.no_grad()
def test_it_is_exported_as_the_operator() -> None:
    ours = rewritten(cast_sam(), *OTHERS[2], ImageToToken())
    program = torch.export.export(Decode(ours), tuple(inputs()), strict=False)
    found = [node.target for node in program.graph.nodes].count(torch.ops.samopt.image_to_token.default)
    assert found == 2
    assert_bit_equal(program.module()(*inputs()), answer(ours))
