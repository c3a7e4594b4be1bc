"""The passes that quantise, on small Sams: sites, what is fused around them, what is loaded, replaced and refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import (
    AccuracyError,
    AlreadyApplied,
    Budget,
    InvalidInput,
    NoSites,
    Pass,
    Recipe,
    Sample,
    Site,
    Skip,
    Step,
    optimize,
    report,
)
from samopt.passes import (
    CastDtype,
    Compile,
    Float8Dynamic,
    HoistRelPos,
    Int8Dynamic,
    LinearGELU,
    LinearPatchEmbed,
    SDPAttention,
    SemiSparse,
    TritonAttention,
    TritonLayerNorm,
    quantization,
    quantized_linear,
)
from samopt.passes.kernels.quantized_rows import LIMITS, Rows, quantize_rows, quantized
from samopt.passes.quantized_linear import QuantizedLinear
from samopt.rebind import set_module
from samopt.samples import scene_samples
from tests.models import random_sam
from tests.numerics import assert_bit_equal, relative_error
from tests.snapshot import Snapshot

PASSES: dict[str, Callable[..., Pass]] = {"int8": Int8Dynamic, "float8": Float8Dynamic}
DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
ERROR = {"int8": 1.5e-2, "float8": 8e-2}  # of an embedding, on random weights of small Sams
each = pytest.mark.parametrize("name", PASSES)
KERNELS = (TritonAttention(), LinearGELU(), TritonLayerNorm(0))
BEFORE = pytest.mark.parametrize("before", [(), KERNELS], ids=["alone", "after the kernels"])


@pytest.fixture(autouse=True)
def _without_gradients(kernels_anywhere: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def cast_sam(img_size: int = 80, **sizes: Any) -> Sam:
    sam = random_sam(img_size, **{"window": 3, **sizes})
    CastDtype()(sam)
    return sam


def rewritten(sam: Any, *passes: Pass) -> Any:
    ours = copy.deepcopy(sam)
    for pass_ in passes:
        pass_(ours)
    return ours


def pixels(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 80, 80, generator=torch.Generator().manual_seed(0))


def names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def found(pass_: Pass, model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    items = list(pass_.match(model))
    return [x for x in items if isinstance(x, Site)], {x.fqn: x.reason for x in items if isinstance(x, Skip)}


# What it rewrites


@each
def test_the_encoders_linear_layers_and_the_blocks_around_them(name: str) -> None:
    sam = random_sam()
    sites, skipped = found(PASSES[name](), sam)
    blocks = [f"image_encoder.blocks.{index}" for index in (0, 1)]
    linears = [f"{block}.{part}" for block in blocks for part in ("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")]
    assert [site.fqn for site in sites] == [*linears, *blocks]
    assert not skipped
    assert all(site.facts["emulated"] for site in sites), "there is no GPU here"
    ours = rewritten(sam, PASSES[name]())
    assert names(ours) == set(linears)


@each
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("lin1",), {"image_encoder.blocks.0.mlp.lin1", "image_encoder.blocks.1.mlp.lin1"}),
        (("image_encoder.blocks.1.attn.*",), {f"image_encoder.blocks.1.attn.{part}" for part in ("qkv", "proj")}),
    ],
)
def test_layers_by_role_and_by_name(name: str, layers: tuple[str, ...], expected: set[str]) -> None:
    sam = random_sam()
    ours = rewritten(sam, PASSES[name](layers))
    assert names(ours) == expected
    assert (
        relative_error(ours.image_encoder(pixels(1)[..., :64, :64]), sam.image_encoder(pixels(1)[..., :64, :64])) < 0.1
    )


@each
def test_the_decoder_where_it_is_asked_for(name: str) -> None:
    sites, skipped = found(PASSES[name](("decoder",)), random_sam())
    assert all(site.fqn.startswith("mask_decoder.") for site in sites)
    assert len(sites) > 20
    assert any("no multiples of 16" in reason for reason in skipped.values()), "the last layers give 4 or 8 numbers"


@each
def test_a_word_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="'qvk' is no role"):
        PASSES[name](("qvk",))(random_sam())
    with pytest.raises(InvalidInput, match=r"Dynamic: layers=\(\) leaves nothing to do"):
        PASSES[name](())


def test_what_is_quantised_stays_as_it_is() -> None:
    ours = rewritten(random_sam(), Float8Dynamic())
    with pytest.raises(NoSites, match=r"^Int8Dynamic found .*: its weights are float8 already \(8 modules\)$"):
        Int8Dynamic()(ours)
    with pytest.raises(AlreadyApplied):
        Float8Dynamic()(ours)


# What it computes


@each
@BEFORE
@pytest.mark.parametrize("rel_pos_first", [False, True])
def test_the_embedding_errs_by_the_quantisation_alone(name: str, before: tuple[Pass, ...], rel_pos_first: bool) -> None:
    sam = cast_sam()
    first = (HoistRelPos(), SDPAttention()) if rel_pos_first else ()
    ours = rewritten(sam, *first, *before, PASSES[name]())
    error = relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels()))
    assert 1e-3 < error < ERROR[name]


@each
@pytest.mark.parametrize("without", ["attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2"])
def test_any_layer_may_be_left_out(name: str, without: str) -> None:
    sam = cast_sam()
    roles = tuple(role for role in ("qkv", "proj", "lin1", "lin2") if not without.endswith(role))
    ours = rewritten(sam, *KERNELS, PASSES[name](roles))
    assert relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels())) < ERROR[name]


def test_layers_of_an_mlp_may_be_of_two_dtypes() -> None:
    sam = cast_sam()
    ours = rewritten(sam, *KERNELS, Float8Dynamic(("lin1",)), Int8Dynamic(("lin2",)))
    seen: list[Any] = []
    for block in ours.image_encoder.blocks:
        block.mlp.lin2.register_forward_pre_hook(lambda _, args: seen.append(args[0].values.dtype))
    assert relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels())) < ERROR["float8"]
    assert seen == [torch.int8] * 2, "rows of another dtype are nothing that a kernel multiplies"


@each
def test_after_the_kernels_inputs_are_quantised_by_what_precedes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[torch.Size] = []

    def watch(x: Tensor, dtype: torch.dtype) -> Any:
        alone.append(x.shape)
        return quantize_rows(x, dtype)

    monkeypatch.setattr(quantized_linear, "quantize_rows", watch)
    rewritten(cast_sam(), *KERNELS, PASSES[name]()).image_encoder(pixels(1))
    assert len(alone) == {"int8": 2, "float8": 0}[name], "what the attention gives to proj, by a kernel of its own"
    alone.clear()
    rewritten(cast_sam(), PASSES[name]()).image_encoder(pixels(1))
    assert len(alone) == 4, "SAM's own attention takes no quantised rows: qkv and proj quantise theirs"


@each
@BEFORE
@pytest.mark.parametrize(
    "part", ["norm1", "norm2", "attn", "mlp", "attn.proj", "mlp.act", "attn.qkv", "mlp.lin1", "mlp.lin2"]
)
def test_what_is_put_in_a_parts_place_later_is_run(name: str, before: tuple[Pass, ...], part: str) -> None:
    class Halved(nn.Module):
        """Another module, which computes what was there from what it is given in full precision."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            assert not isinstance(x, Rows), "quantised for a module that is no longer there"
            return 0.5 * self.inner(x)

    sam = cast_sam()
    ours = rewritten(sam, *before, PASSES[name]())
    for model in (ours, sam):
        for block, plain in zip(model.image_encoder.blocks, cast_sam().image_encoder.blocks, strict=True):
            set_module(block, part, Halved(plain.get_submodule(part)))
    assert relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels())) < ERROR[name]


@each
@BEFORE
def test_zero_and_constant_pictures_give_finite_embeddings(name: str, before: tuple[Pass, ...]) -> None:
    ours = rewritten(cast_sam(), *before, PASSES[name]())
    for value in (0.0, 3.0):
        assert ours.image_encoder(torch.full((1, 3, 80, 80), value)).isfinite().all()


@each
@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2"])
def test_a_layer_of_zeros_gives_zeros(name: str, layer: str) -> None:
    sam = cast_sam()
    for parameter in sam.image_encoder.blocks[0].get_submodule(layer).parameters():
        parameter.zero_()
    ours = rewritten(sam, *KERNELS, PASSES[name]())
    assert relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels())) < ERROR[name]


@each
def test_blocks_of_one_kind_compile_once_without_a_break(name: str, dynamo_only: None) -> None:
    torch._dynamo.utils.counters.clear()
    ours = rewritten(cast_sam(depth=6, global_blocks=(2, 5)), LinearPatchEmbed(), *KERNELS, PASSES[name]())
    expected = ours.image_encoder(pixels())
    Compile()(ours)
    assert_bit_equal(ours.image_encoder(pixels()), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # patch embedding, windowed, global, neck


# torchao


@pytest.mark.filterwarnings("ignore:Deprecation. PlainLayout:UserWarning")  # torchao 0.17, of its own code
@pytest.mark.parametrize("before", [(), KERNELS[:2]], ids=["alone", "after the kernels"])
def test_torchao_is_given_the_layers_asked_for_and_no_others(before: tuple[Pass, ...]) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    sam = cast_sam()
    ours = rewritten(sam, *before)
    result = Int8Dynamic(("lin1", "proj"), kernel="torchao")(ours)
    asked = [f"image_encoder.blocks.{index}.{part}" for index in (0, 1) for part in ("attn.proj", "mlp.lin1")]
    assert [site.fqn for site in result.sites] == asked
    linears = {name: module for name, module in ours.named_modules() if isinstance(module, nn.Linear)}
    assert [name for name, module in linears.items() if isinstance(module.weight, torchao.Int8Tensor)] == asked
    assert relative_error(ours.image_encoder(pixels()), sam.image_encoder(pixels())) < ERROR["int8"]


@pytest.mark.filterwarnings("ignore:Deprecation. PlainLayout:UserWarning")  # likewise
@pytest.mark.parametrize("then", [Float8Dynamic(), SemiSparse()], ids=str)
def test_what_torchao_quantised_stays_as_it_is(then: Pass) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    ours = rewritten(cast_sam(), Int8Dynamic(kernel="torchao"))
    with pytest.raises(NoSites, match=r"its weights are torchao's Int8Tensor already \(8 modules\)"):
        then(ours)


# Bounds of what a layer gives


def test_the_bound_is_reached_by_the_worst_row_and_by_no_other() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norm, linear = nn.LayerNorm(64, eps=0.0), nn.Linear(64, 32)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = torch.randn(1000, 64)
    bound = float(quantization.largest(linear, norm))
    assert linear(norm(x)).abs().max() < bound
    # Without the bias of the norm, the row that is worst for a channel lies along its weights, but for their mean.
    norm.bias.zero_()
    linear.bias.zero_()
    linear.weight.copy_(linear.weight - (linear.weight * norm.weight).mean(1, keepdim=True) / norm.weight)
    worst = linear(norm(linear.weight * norm.weight)).diagonal()
    expected = 64**0.5 * (linear.weight * norm.weight).norm(dim=1)
    assert torch.allclose(worst, expected, rtol=1e-4)
    worst_of_all = float(expected.max()) * (1 + quantization.ROUNDING)
    assert float(quantization.largest(linear, norm)) == pytest.approx(worst_of_all, rel=1e-5)


def test_the_bound_counts_the_padding_too() -> None:
    norm, linear = nn.LayerNorm(16), nn.Linear(16, 16)
    linear.weight.fill_(-0.01)
    norm.bias.fill_(100.0)
    linear.bias.fill_(16.0)  # it cancels the norm's bias
    assert quantization.largest(linear, norm) >= 16


def test_float8_results_stay_below_their_largest_value() -> None:
    sam = cast_sam()
    ours = rewritten(sam, *KERNELS, Float8Dynamic())
    for block in ours.image_encoder.blocks:
        for part, linear in ((block.attn, block.attn.proj), (block.mlp, block.mlp.lin2)):
            seen: list[Tensor] = []
            linear.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].values.float().abs().max()))
            ours.image_encoder(pixels())
            assert 4 < seen[0] < 448, f"{type(part).__name__}: of 448, and not so little that precision is lost"


# What is loaded, copied and undone


@each
@BEFORE
def test_another_checkpoint_loads_and_is_what_runs(name: str, before: tuple[Pass, ...]) -> None:
    ours, other = rewritten(cast_sam(seed=0), *before, PASSES[name]()), cast_sam(seed=1)
    expected = rewritten(other, *before, PASSES[name]())
    wanted = expected.image_encoder(pixels())
    state = random_sam(80, window=3, seed=1).state_dict()
    # Meta's checkpoint has no scales: they are made of its weights.
    ours.load_state_dict(state)
    assert relative_error(ours.image_encoder(pixels()), wanted) < 2e-2, "bounds are of weights quantised meanwhile"
    fresh = rewritten(cast_sam(seed=2), *before, PASSES[name]())
    fresh.load_state_dict(expected.state_dict())
    assert relative_error(fresh.image_encoder(pixels()), wanted) < 2e-2
    assert fresh.state_dict().keys() == expected.state_dict().keys()


@each
@BEFORE
def test_a_model_without_memory_is_filled_by_a_checkpoint(name: str, before: tuple[Pass, ...]) -> None:
    expected, ours = rewritten(cast_sam(), *before, PASSES[name]()), cast_sam().to("meta")
    for pass_ in (*before, PASSES[name]()):
        pass_(ours)
    ours.load_state_dict(expected.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in ours.image_encoder.buffers())
    assert relative_error(ours.image_encoder(pixels()), expected.image_encoder(pixels())) < 2e-2


@each
def test_a_state_keeps_the_keys_and_shapes_and_adds_scales(name: str) -> None:
    sam = cast_sam()
    before = {key: value.shape for key, value in sam.state_dict().items()}
    ours = rewritten(sam, *KERNELS, PASSES[name]())
    after = {key: value.shape for key, value in ours.state_dict().items()}
    scales = {f"{layer}.weight_scale": (before[f"{layer}.weight"][0],) for layer in names(ours)}
    assert after == {**before, **scales}
    weights = {ours.state_dict()[f"{layer}.weight"].dtype for layer in names(ours)}
    assert weights == {DTYPES[name]}


@each
@BEFORE
def test_undo_puts_back_what_was_there_bit_for_bit(name: str, before: tuple[Pass, ...]) -> None:
    sam = rewritten(cast_sam(), *before)
    known, expected = Snapshot(sam), sam.image_encoder(pixels())
    result = PASSES[name]()(sam)
    sam.image_encoder(pixels())
    result.undo()
    known.assert_unchanged(sam)
    assert_bit_equal(sam.image_encoder(pixels()), expected)


@each
@BEFORE
def test_what_is_copied_or_saved_computes_the_same(name: str, before: tuple[Pass, ...]) -> None:
    ours, file = rewritten(cast_sam(), *before, PASSES[name]()), io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    expected = ours.image_encoder(pixels())
    for again in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert_bit_equal(again.image_encoder(pixels()), expected)
        for tensor in again.state_dict().values():
            tensor.zero_()
    assert_bit_equal(ours.image_encoder(pixels()), expected)


@each
def test_an_optimised_model_refuses_a_later_cast(name: str) -> None:
    ours = optimize(random_sam(80, window=3), [CastDtype(), *KERNELS, PASSES[name]()], verify="off")
    with pytest.raises(InvalidInput, match="an optimised model keeps its dtypes"):
        ours.half()


@each
def test_print_shows_what_each_layer_became(name: str) -> None:
    words = str(rewritten(random_sam(), PASSES[name]()).image_encoder.blocks[0])
    kind = str(DTYPES[name]).removeprefix("torch.")
    assert words.count(f"bias=True, {kind} weights by channel, {kind} inputs by token)") == 4


# Quantisation that is broken


def _scale_of_zero(x: Tensor, dtype: torch.dtype) -> Rows:
    rows = SOUND(x, dtype)
    return Rows(rows.values, torch.zeros_like(rows.scales))


def _saturated(x: Tensor, dtype: torch.dtype) -> Rows:
    rows = SOUND(x * 40, dtype)
    values = (x * 40 / (rows.scales / 40)).clamp(-LIMITS[dtype], LIMITS[dtype])
    return Rows(values.to(dtype), rows.scales / 40)


def _nan(x: Tensor, dtype: torch.dtype) -> Rows:
    rows = SOUND(x, dtype)
    return Rows(rows.values, torch.full_like(rows.scales, torch.nan))


def _float16_overflow(x: Tensor, dtype: torch.dtype) -> Rows:
    rows = SOUND(x, dtype)
    return Rows(rows.values, (rows.scales * 1e6).half().float())


SOUND = quantized


# Both passes quantise by one function; only where it saturates do their dtypes differ.
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("int8", _scale_of_zero),
        ("int8", _saturated),
        ("float8", _saturated),
        ("int8", _nan),
        ("float8", _float16_overflow),
    ],
)
def test_broken_quantisation_is_refused_by_name_and_leaves_the_model(
    name: str, broken: Callable[..., Rows], tiny256: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    sam = copy.deepcopy(tiny256)
    known = Snapshot(sam)
    monkeypatch.setattr(quantized_linear, "quantized", broken)
    with pytest.raises(AccuracyError, match=type(PASSES[name]()).__name__):
        optimize(sam, [PASSES[name]()], samples=pictures, inplace=True)
    known.assert_unchanged(sam)


@each
def test_weights_that_turn_nan_are_refused(
    name: str, tiny256: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(linear: Any, dtype: torch.dtype) -> QuantizedLinear:
        new = QuantizedLinear(linear, dtype)
        new.weight_scale[5] = torch.nan
        return new

    sam = copy.deepcopy(tiny256)
    known = Snapshot(sam)
    monkeypatch.setattr(quantization, "QuantizedLinear", spoil)
    with pytest.raises(AccuracyError, match=f"{type(PASSES[name]()).__name__}.*the outputs hold NaN or infinity"):
        optimize(sam, [PASSES[name](("lin2",))], samples=pictures, inplace=True)
    known.assert_unchanged(sam)


# On trained weights


@pytest.mark.parametrize(("name", "least"), [("int8", 0.993), ("float8", 0.987)])
def test_masks_of_the_embedded_model_stay(name: str, least: float, tiny256: Sam) -> None:
    """At 256 px, where a pixel at a mask's border weighs four times what it weighs at 1024."""
    free = Budget(mean_iou=0, kind_mean_iou=0, min_iou=0, truth_drop=1)
    recipe = Recipe([Step(HoistRelPos()), Step(SDPAttention()), Step(PASSES[name]())], free)
    ours = optimize(tiny256, recipe, samples=scene_samples(4, 256), verify="end")
    agreement = report(ours).steps[-1].agreement
    assert agreement is not None
    assert agreement.masks is not None
    assert agreement.masks.mean_iou >= least
