from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import samopt
from samopt import AlreadyApplied, InvalidInput, Recipe, SamoptError, Site, Skip, Step, Unsupported, optimize
from samopt.passes import (
    CastDtype,
    Compile,
    HoistRelPos,
    LinearPatchEmbed,
    SDPAttention,
)
from samopt.passes import compile as compile_pass
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


def test_where_nothing_is_compiled_there_are_batch_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pass, "_cpp_compiler", lambda: None)
    sam = random_sam()
    ours = copy.deepcopy(sam)
    result = Compile("none", batch_sizes=(1, 4), decoder=True)(ours)
    assert [site.fqn for site in result.sites] == ["image_encoder"]
    ours.image_encoder.neck = neck = Counting(ours.image_encoder.neck)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        assert (ours.image_encoder(images) - sam.image_encoder(images)).abs().max() < 1e-5
    assert neck.seen == [4]
    assert "unique_graphs" not in torch._dynamo.utils.counters["stats"]


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


# The mask decoder, see `test_decoding.py`


def test_a_prompt_encoder_with_boolean_masks_is_not_compiled() -> None:
    result = Compile(decoder=True)(random_sam())
    reasons = {skip.fqn: skip.reason for skip in result.skipped}
    assert "apply where_indexing first" in reasons["prompt_encoder"]


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
