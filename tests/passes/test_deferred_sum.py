from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from samopt import NoSites, Pass, Site, Skip, Step, optimize, report
from samopt.passes import (
    CastDtype,
    Compile,
    DeferredSum,
    Float8Dynamic,
    Int8Dynamic,
    TritonAttention,
    TritonLayerNorm,
)
from samopt.passes.encoder_block import Unsummed
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding

PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def rewritten(sam: Sam, *passes: Pass) -> Any:
    ours = copy.deepcopy(sam)
    for pass_ in (*passes, DeferredSum()):
        pass_(ours)
    return ours


@contextmanager
def calls(model: Any) -> Iterator[list[tuple[bool, bool]]]:
    """Of each call of a block: whether it was given terms and not their sum, and whether it gave terms."""
    seen: list[tuple[bool, bool]] = []

    def spied(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, **options: Any) -> Any:
            out = forward(x, **options)
            seen.append((isinstance(x, Unsummed), isinstance(out, Unsummed)))
            return out

        return call

    inner = [(block, block._call_impl) for block in model.image_encoder.blocks]
    for block, forward in inner:
        block._compiled_call_impl = spied(forward)
    yield seen
    for block, _ in inner:
        block._compiled_call_impl = None


@torch.no_grad()
@pytest.mark.parametrize("sizes", [{"depth": 3}, {"depth": 2}, {"depth": 3, "window": 3}], ids=str)
def test_the_encoder_gives_the_same_bits(sizes: dict[str, Any]) -> None:
    sam = random_sam(**sizes)
    ours = rewritten(sam)
    with calls(ours) as seen:
        found = ours.image_encoder(PIXELS)
    assert_bit_equal(found, sam.image_encoder(PIXELS))
    depth = sizes["depth"]
    assert seen == [(True, index < depth - 1) for index in range(depth)]


@torch.no_grad()
def test_without_a_position_embedding() -> None:
    sam = random_sam(depth=3)
    sam.image_encoder.pos_embed = None
    ours = rewritten(sam)
    with calls(ours) as seen:
        found = ours.image_encoder(PIXELS)
    assert_bit_equal(found, sam.image_encoder(PIXELS))
    assert seen == [(False, True), (True, True), (True, False)]


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_norms_kernel_adds_up_too(dtype: torch.dtype) -> None:
    sam = random_sam(depth=3)
    sam.image_encoder.to(dtype)
    for passes in itertools.permutations([TritonLayerNorm(), DeferredSum()]):
        ours = copy.deepcopy(sam)
        for pass_ in passes:
            pass_(ours)
        assert_rounding(sam.image_encoder, ours.image_encoder, [PIXELS.to(dtype)])
        assert vars(ours.image_encoder.blocks[1])["_samopt_sum_norm"].func.__module__ == "samopt.passes.layer_norm"


@torch.no_grad()
@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("quantize", [Int8Dynamic(), Float8Dynamic()], ids=["int8", "float8"])
def test_the_norm_that_quantises_adds_up_too(quantize: Pass) -> None:
    sam = random_sam(depth=3)
    for pass_ in (CastDtype(), TritonAttention()):
        pass_(sam)
    with_sums, with_terms = copy.deepcopy(sam), rewritten(sam)
    for model in (with_sums, with_terms):
        quantize(model)
    found, expected = with_terms.image_encoder(PIXELS), with_sums.image_encoder(PIXELS)
    # The norm is that of the sum before it is rounded to bfloat16: some values fall to the next one of 256.
    assert 0 < (found - expected).norm() / expected.norm() < 0.05
    name = vars(with_terms.image_encoder.blocks[1])["_samopt_sum_norm"].func.__module__
    assert name == "samopt.passes.quantization"


def hook_block(sam: Any, see: Callable[..., None]) -> Any:
    return sam.image_encoder.blocks[1].register_forward_hook(see)


def hook_before_block(sam: Any, see: Callable[..., None]) -> Any:
    return sam.image_encoder.blocks[1].register_forward_pre_hook(lambda module, given: see(module, given, given[0]))


def hook_norm(sam: Any, see: Callable[..., None]) -> Any:
    return sam.image_encoder.blocks[2].norm1.register_forward_hook(see)


def hook_everything(sam: Any, see: Callable[..., None]) -> Any:
    blocks = set(sam.image_encoder.blocks)
    return register_module_forward_hook(
        lambda module, given, out: see(module, given, out) if module in blocks else None
    )


@torch.no_grad()
@pytest.mark.parametrize("hook", [hook_block, hook_before_block, hook_norm, hook_everything])
def test_hooks_see_what_they_see_in_the_unmodified_model(hook: Callable[..., Any]) -> None:
    sam = random_sam(depth=4)
    ours = rewritten(sam)
    seen: list[list[Tensor]] = []
    for model in (sam, ours):
        found: list[Tensor] = []
        handle = hook(model, lambda module, given, out, found=found: found.extend([given[0], out]))
        model.image_encoder(PIXELS)
        handle.remove()
        seen.append(found)
    assert seen[0]
    assert_bit_equal(seen[1], seen[0])


def test_backward_hooks_see_what_they_see_in_the_unmodified_model() -> None:
    sam = random_sam(depth=3)
    ours = rewritten(sam)
    seen: list[list[Tensor]] = []
    for model in (sam, ours):
        found: list[Tensor] = []
        model.image_encoder.blocks[1].register_full_backward_hook(
            lambda module, into, out, found=found: found.extend([*into, *out])
        )
        model.image_encoder(PIXELS).sum().backward()
        seen.append(found)
    assert len(seen[0]) == 2
    assert_bit_equal(seen[1], seen[0])


@torch.no_grad()
def test_a_block_called_alone_is_given_and_gives_sums() -> None:
    sam = random_sam()
    tokens = torch.randn(1, 4, 4, 64)
    assert_bit_equal(rewritten(sam).image_encoder.blocks[0](tokens), sam.image_encoder.blocks[0](tokens))


class Doubled(nn.Module):
    """What a user may put in the place of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@torch.no_grad()
@pytest.mark.parametrize("patched", [False, True], ids=["another module", "another forward"])
def test_blocks_beside_a_foreign_one_are_given_and_give_sums(patched: bool) -> None:
    sam = random_sam(depth=4)
    ours = rewritten(sam)
    for model in (sam, ours):
        if patched:
            model.image_encoder.blocks[1].forward = Doubled().forward
        else:
            model.image_encoder.blocks[1] = Doubled()
    assert_bit_equal(ours.image_encoder(PIXELS), sam.image_encoder(PIXELS))


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_undo(copied: Callable[[Any], Any]) -> None:
    sam = random_sam()
    expected = sam.image_encoder(PIXELS)
    ours = copy.deepcopy(sam)
    result = DeferredSum()(ours)
    assert {site.fqn for site in result.sites} == {"image_encoder", "image_encoder.blocks.0", "image_encoder.blocks.1"}
    again = copied(ours)
    with calls(again) as seen:
        assert_bit_equal(again.image_encoder(PIXELS), expected)
    assert any(given for given, _ in seen)
    result.undo()
    with calls(ours) as seen:
        assert_bit_equal(ours.image_encoder(PIXELS), expected)
    assert not any(given for given, _ in seen)


def test_an_encoder_that_is_not_sams_is_left_alone() -> None:
    sam = random_sam()
    sam.image_encoder.forward = lambda x: x
    assert list(DeferredSum().match(sam)) == [Skip("image_encoder", "its forward was replaced on this module")]
    sam = random_sam(depth=3)
    sam.image_encoder.blocks[1].forward = lambda x: x
    foreign = Skip("image_encoder.blocks.1", "its forward was replaced on this module")
    blocks = [Site("image_encoder.blocks.0"), Site("image_encoder.blocks.2")]
    assert list(DeferredSum().match(sam)) == [Site("image_encoder"), *blocks, foreign]


def test_a_single_block_has_nothing_to_leave_to_another() -> None:
    with pytest.raises(NoSites, match="it has no two blocks of SAM's code, of which one could leave its sum"):
        DeferredSum()(random_sam(depth=1, global_blocks=()))


def test_it_is_kept_where_only_what_is_faster_is() -> None:
    made = report(optimize(random_sam(), [Step(DeferredSum(), keep="if-faster")], verify="off"))
    assert made.steps[0].reason == "its gain is between the encoder's blocks: not timed, kept"


@pytest.mark.usefixtures("dynamo_only")
def test_compiled_blocks_are_of_four_kinds_however_many_there_are() -> None:
    torch._dynamo.utils.counters.clear()
    sam = random_sam(depth=8, global_blocks=(3, 7), window=3)
    ours = rewritten(sam, CastDtype())
    plain = copy.deepcopy(ours)
    Compile("block")(ours)
    with torch.no_grad():
        assert_bit_equal(ours.image_encoder(PIXELS), plain.image_encoder(PIXELS))
        ours.image_encoder(PIXELS)
    kinds = 4  # the first, windowed, global, and the last
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds + 2  # patch embedding and neck
