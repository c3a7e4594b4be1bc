from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import samopt
from samopt import AlreadyApplied, InvalidInput, Pass, Recipe, SamoptError, Site, Skip, Step, Unsupported, optimize
from samopt.passes import (
    CastDtype,
    Compile,
    FusedMaskDecoder,
    HoistRelPos,
    LinearPatchEmbed,
    SDPAttention,
    WhereIndexing,
)
from samopt.passes import compile as compile_pass
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compiled code and the limits that the pass raises do not outlast a test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = torch._dynamo.config
    limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(limits):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_inductor_code_errs_like_the_unmodified_encoder(scope: Literal["block", "encoder"]) -> None:
    sam = random_sam(width=32)
    before = {key: value.shape for key, value in sam.state_dict().items()}
    ours = copy.deepcopy(sam)
    result = Compile(scope)(ours)
    blocks = [f"image_encoder.{name}" for name in ("patch_embed", "blocks.0", "blocks.1", "neck")]
    assert {site.fqn for site in result.sites} == {"image_encoder", *(blocks if scope == "block" else [])}
    assert {key: value.shape for key, value in ours.state_dict().items()} == before
    assert type(ours.image_encoder) is type(sam.image_encoder)
    torch.manual_seed(0)
    assert_rounding(sam.image_encoder, ours.image_encoder, [torch.randn(1, 3, 64, 64)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (4 if scope == "block" else 1)
    result.undo()
    pixels = torch.randn(1, 3, 64, 64)
    assert_bit_equal(ours.image_encoder(pixels), sam.image_encoder(pixels))


class Counting(nn.Module):
    """A module that notes the batch sizes it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, list[int]()

    def forward(self, x: Tensor) -> Any:
        self.seen.append(len(x))
        return self.inner(x)


def test_an_encoder_may_stay_as_it_is_and_have_batch_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pass, "_cpp_compiler", lambda: None)
    sam = random_sam()
    ours = copy.deepcopy(sam)
    result = Compile("none", batch_sizes=(1, 4))(ours)
    assert [site.fqn for site in result.sites] == ["image_encoder"]
    ours.image_encoder.neck = neck = Counting(ours.image_encoder.neck)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        assert (ours.image_encoder(images) - sam.image_encoder(images)).abs().max() < 1e-5
    assert neck.seen == [4]
    assert "unique_graphs" not in torch._dynamo.utils.counters["stats"]
    with pytest.raises(Unsupported, match=r"no C\+\+ compiler"):
        Compile("none", decoder=True)(random_sam())


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_every_rewrite_compiles_to_one_graph(scope: Literal["block", "encoder"]) -> None:
    sam = random_sam()
    for pass_ in (LinearPatchEmbed(), HoistRelPos(), SDPAttention(), CastDtype(), Compile(scope)):
        pass_(sam)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        sam.image_encoder(pixels)  # a graph break would raise
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (4 if scope == "block" else 1)


@pytest.mark.usefixtures("dynamo_only")
def test_blocks_of_one_kind_share_their_compilation() -> None:
    sam = random_sam(depth=6, global_blocks=(2, 5), window=3)
    for pass_ in (LinearPatchEmbed(), HoistRelPos(), SDPAttention(), CastDtype(), Compile("block")):
        pass_(sam)
    with torch.no_grad():
        sam.image_encoder(torch.randn(1, 3, 64, 64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # patch embedding, windowed, global, neck


@pytest.mark.usefixtures("dynamo_only")
def test_loaded_weights_and_rebuilt_tables_are_seen() -> None:
    sam, other = random_sam(seed=0), random_sam(seed=1)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for model in (sam, other):
            HoistRelPos()(model)
        Compile("encoder")(sam)
        sam.image_encoder(pixels)
        sam.load_state_dict(other.state_dict())
        assert_bit_equal(sam.image_encoder(pixels), other.image_encoder(pixels))


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_hitting_the_recompile_limit_is_an_error(scope: Literal["block", "encoder"]) -> None:
    sam = random_sam()
    Compile(scope, recompile_limit=2)(sam)
    # A windowed and a global block already share one piece of code.
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for batch in (1, 2):
            if scope == "encoder" or batch == 1:
                sam.image_encoder(torch.randn(batch, 3, 64, 64))
        with pytest.raises(SamoptError, match=r"may compile \(2: batch sizes.*raise Compile\(recompile_limit="):
            sam.image_encoder(torch.randn(3, 3, 64, 64))


@pytest.mark.usefixtures("dynamo_only")
def test_the_limit_is_raised_in_every_thread_and_never_lowered() -> None:
    config = torch._dynamo.config
    pixels = torch.randn(1, 3, 64, 64)

    def limits(limit: int) -> tuple[int, int]:
        sam = random_sam()
        Compile("encoder", recompile_limit=limit)(sam)
        with torch.no_grad():
            sam.image_encoder(pixels)
        return config.recompile_limit, config.accumulated_recompile_limit

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(limits, 100).result() == (100, 800)
        assert pool.submit(limits, 3).result() == (100, 800)
    here = config.recompile_limit, config.accumulated_recompile_limit
    assert limits(100) == (max(100, here[0]), max(800, here[1]))


def test_inductor_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: seen.append(options))
    Compile("encoder", mode="max-autotune")(random_sam())
    (options,) = seen
    assert options["fullgraph"] is True
    assert options["dynamic"] is False
    assert options["options"] == {
        "triton.cudagraphs": False,
        "shape_padding": False,
        **torch._inductor.list_mode_options("max-autotune-no-cudagraphs"),
    }


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def test_without_a_compiler_it_refuses_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    sam = random_sam()
    modules = dict(sam.named_modules())
    with pytest.raises(Unsupported, match=r"found no C\+\+ compiler; install g\+\+ or clang, or set CXX"):
        Compile()(sam)
    assert dict(sam.named_modules()) == modules


def test_without_a_compiler_an_optional_step_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    recipe = Recipe([Step(LinearPatchEmbed()), Step(Compile(), required=False)])
    ours = optimize(random_sam(), recipe, verify="off")
    applied, skipped = samopt.report(ours).steps
    assert applied.status == "applied"
    assert skipped.status == "skipped"
    assert "found no C++ compiler" in skipped.reason
    assert "found no C++ compiler" in str(samopt.report(ours))
    with pytest.raises(Unsupported, match=r"C\+\+ compiler"):
        optimize(random_sam(), [Compile()], verify="off")


@pytest.mark.parametrize("variable", [None, "CXX"])
def test_a_compiler_is_found_by_path_or_by_variable(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_compiler(monkeypatch)
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    if variable:
        monkeypatch.setenv(variable, str(compiler))
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_pass._cpp_compiler() == str(compiler)
    Compile().requires(random_sam())


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_says_that_it_is_not_compiled_and_can_be_again(copied: Callable[[nn.Module], Any]) -> None:
    ours: Any = optimize(random_sam(), [HoistRelPos(), Compile()], verify="off")
    assert "not compiled" not in str(samopt.report(ours))
    again = copied(ours)
    (note,) = samopt.report(again).notes
    assert note.startswith("not compiled: a copy loses its compilation")
    assert "not compiled" in str(samopt.report(again))
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_bit_equal(again.image_encoder(pixels), ours.image_encoder(pixels))
        assert len(Compile()(again).sites) == 5
        assert samopt.report(again).notes == ()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        again.image_encoder(pixels)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_nothing_but_undo_goes_on_top_of_a_compiled_model() -> None:
    sam = random_sam()
    result = Compile("encoder")(sam)
    with pytest.raises(Unsupported, match="image_encoder is compiled already; apply SDPAttention before Compile"):
        SDPAttention()(sam)
    with pytest.raises(AlreadyApplied, match="image_encoder is compiled already; undo that first"):
        Compile("encoder")(sam)
    result.undo()
    SDPAttention()(sam)


def test_cuda_graphs_where_there_is_a_gpu_and_none_where_not() -> None:
    sam = random_sam()
    Compile(cuda_graphs="auto")(sam)
    batches = sam.image_encoder._compiled_call_impl.args[0]
    assert batches.graphs is None
    with pytest.raises(InvalidInput, match="cuda_graphs must be"):
        Compile(cuda_graphs="always")  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_cuda_graphs_need_a_gpu(scope: Literal["block", "encoder"]) -> None:
    with pytest.raises(Unsupported, match="CUDA graphs need a GPU and the model is on cpu"):
        Compile(scope, cuda_graphs=True)(random_sam())


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1,), (2, 1), (1, 2, 2)])
def test_batch_sizes_are_positive_and_rise(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=rf"batch_sizes must be positive and rise, .* not {re.escape(str(sizes))}"):
        Compile(batch_sizes=sizes)


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_an_encoder_alone_compiles_in_place(scope: Literal["block", "encoder"]) -> None:
    encoder: Any = random_sam().image_encoder
    before = copy.deepcopy(encoder)
    pixels = torch.randn(3, 3, 64, 64)
    result = Compile(scope)(encoder)
    assert result.sites[0].fqn == ""
    assert len(result.sites) == (5 if scope == "block" else 1)
    _, its_encoder, call = encoder._compiled_call_impl.args
    assert its_encoder is encoder
    with torch.no_grad():
        assert_bit_equal(encoder(pixels), before(torch.cat([pixels, torch.zeros(1, 3, 64, 64)]))[:3])
        if scope == "block":
            assert call.__self__ is encoder
            with pytest.raises(AlreadyApplied, match="the model is compiled already"):
                Compile(scope)(encoder)
        result.undo()
        assert encoder._compiled_call_impl is None
        assert_bit_equal(encoder(pixels), before(pixels))


# The mask decoder


def decoder_inputs(prompts: int, tokens: int = 2, *, masks: bool = False, images: int = 1) -> list[Tensor]:
    """An image's embedding and positions, sparse and dense prompts."""
    generator = torch.Generator().manual_seed(prompts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dense = normal(prompts, 64, 4, 4) if masks else normal(1, 64, 1, 1).expand(prompts, -1, 4, 4)
    return [normal(images, 64, 4, 4), normal(1, 64, 4, 4), normal(prompts, tokens, 64), dense]


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


NOTHING: tuple[Pass, ...] = ()
EVERYTHING = (SDPAttention(encoder=False), FusedMaskDecoder(), CastDtype(encoder=False))


@pytest.mark.usefixtures("dynamo_only")
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
            before = graphs()
            # 2 prompts of 2 tokens first: sizes that are equal by chance must not be taken to be equal always.
            for prompts, tokens in ((2, 2), (1, 2), (4, 4), (7, 2), (1, 9), (64, 3), (1024, 2)):
                given = decoder_inputs(prompts, tokens, masks=masks)
                ours_found = ours.mask_decoder(*given, multimask_output=multimask)
                assert_bit_equal(ours_found, sam.mask_decoder(*given, multimask_output=multimask))
                assert not any(name.startswith("_dynamo") for tensor in given for name in vars(tensor))
            assert graphs() == before + 2


@pytest.mark.usefixtures("dynamo_only")
@torch.no_grad()
def test_a_prompt_encoder_compiles_twice_for_any_number_of_prompts() -> None:
    sam = random_sam()
    WhereIndexing()(sam)
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    for kinds in ("points", "boxes", "points boxes", "points masks"):
        before = graphs()
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
        assert graphs() == before + (0 if "masks" in kinds else 2)
    alone = ours.prompt_encoder(None, None, masks)
    assert_bit_equal(list(alone), list(sam.prompt_encoder(None, None, masks)))


def test_a_prompt_encoder_with_boolean_masks_is_not_compiled() -> None:
    result = Compile(decoder=True)(random_sam())
    reasons = {skip.fqn: skip.reason for skip in result.skipped}
    assert "apply where_indexing first" in reasons["prompt_encoder"]


@pytest.mark.usefixtures("dynamo_only")
@torch.no_grad()
def test_a_compiled_decoder_takes_an_image_for_each_prompt() -> None:
    sam = random_sam()
    FusedMaskDecoder()(sam)
    ours = copy.deepcopy(sam)
    Compile(decoder=True)(ours)
    for prompts in (3, 5, 8):
        given = decoder_inputs(prompts, images=prompts)
        assert_bit_equal(ours.mask_decoder(*given, True), sam.mask_decoder(*given, True))
    assert graphs() == 1


@pytest.mark.usefixtures("dynamo_only")
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
    assert graphs() == 0
    expected = [tensor[:, 1:] for tensor in plain]
    assert_bit_equal(ours.mask_decoder(**given, multimask_output=True), expected)
    assert graphs() == 1
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: ours.mask_decoder(**given, multimask_output=True), range(4)):
            assert_bit_equal([tensor.detach() for tensor in found], expected)


def test_the_decoder_is_compiled_on_a_gpu_or_where_asked() -> None:
    def sites(pass_: Compile, model: nn.Module) -> list[str]:
        return [found.fqn for found in pass_.match(model) if isinstance(found, Site)]

    sam = random_sam()
    assert sites(Compile(decoder=True), sam) == [*sites(Compile(), sam), "mask_decoder"]
    assert sites(Compile(decoder=False), sam) == sites(Compile(), sam)
    assert sites(Compile(decoder=True), sam.mask_decoder) == [""]
    sam.mask_decoder.predict_masks = lambda *_: None
    *_, skip = Compile(decoder=True).match(sam)
    assert isinstance(skip, Skip)
    assert skip.reason == "it is not compiled: its predict_masks was replaced on this module"


@pytest.mark.usefixtures("dynamo_only")
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
