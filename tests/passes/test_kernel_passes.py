"""The passes that call kernels, together: what is saved and loaded, undone, copied, hooked, ordered and compiled."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from segment_anything import sam_model_registry
from segment_anything.modeling import Sam
from torch import Tensor

from samopt import InvalidInput, Pass, clone, optimize, rebind
from samopt.passes import (
    CastDtype,
    Compile,
    HoistRelPos,
    LinearGELU,
    LinearPatchEmbed,
    SDPAttention,
    TritonAttention,
    TritonLayerNorm,
)
from samopt.rebind import set_module
from tests.models import random_sam
from tests.numerics import assert_bit_equal, assert_rounding
from tests.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("kernels_anywhere")

KERNEL_PASSES: tuple[Pass, ...] = (TritonAttention(), LinearGELU(), TritonLayerNorm(0))
EACH_AND_ALL = pytest.mark.parametrize("passes", [*((pass_,) for pass_ in KERNEL_PASSES), KERNEL_PASSES], ids=str)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def cast_sam(img_size: int = 80, **sizes: Any) -> Sam:
    sam = random_sam(img_size, **{"window": 3, **sizes})
    CastDtype()(sam)
    return sam


def rewritten(sam: Any, passes: tuple[Pass, ...] = KERNEL_PASSES) -> Any:
    ours = copy.deepcopy(sam)
    for pass_ in passes:
        pass_(ours)
    return ours


def random_pixels(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 80, 80, generator=torch.Generator().manual_seed(0))


@EACH_AND_ALL
def test_undo_puts_back_what_was_there_bit_for_bit(passes: tuple[Pass, ...]) -> None:
    sam = cast_sam()
    before, expected = Snapshot(sam), sam.image_encoder(random_pixels())
    results = [pass_(sam) for pass_ in passes]
    sam.image_encoder(random_pixels())
    for result in reversed(results):
        result.undo()
    before.assert_unchanged(sam)
    assert_bit_equal(sam.image_encoder(random_pixels()), expected)


@EACH_AND_ALL
def test_the_model_that_was_copied_stays_as_it_is(passes: tuple[Pass, ...]) -> None:
    sam = random_sam(80, window=3)
    before = Snapshot(sam)
    ours = optimize(sam, [CastDtype(), *passes], verify="off")
    ours.image_encoder(random_pixels())
    before.assert_unchanged(sam)


@EACH_AND_ALL
def test_another_checkpoint_loads_and_is_what_runs(passes: tuple[Pass, ...]) -> None:
    ours, other = cast_sam(seed=0), cast_sam(seed=1)
    before = {key: value.shape for key, value in ours.state_dict().items()}
    for pass_ in passes:
        pass_(ours)
    assert {key: value.shape for key, value in ours.state_dict().items()} == before
    ours.load_state_dict(other.state_dict())
    assert_bit_equal(ours.image_encoder(random_pixels()), rewritten(other, passes).image_encoder(random_pixels()))
    ours.load_state_dict(cast_sam(seed=2).state_dict(), assign=True)
    expected = rewritten(cast_sam(seed=2), passes).image_encoder(random_pixels())
    assert_bit_equal(ours.image_encoder(random_pixels()), expected)


@EACH_AND_ALL
def test_copies_and_pickles_compute_the_same(passes: tuple[Pass, ...]) -> None:
    ours = rewritten(cast_sam(), passes)
    expected = ours.image_encoder(random_pixels())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bit_equal(again.image_encoder(random_pixels()), expected)
        for parameter in again.parameters():
            parameter.zero_()
    assert_bit_equal(ours.image_encoder(random_pixels()), expected)


@EACH_AND_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_later_cast_is_followed(dtype: torch.dtype, passes: tuple[Pass, ...]) -> None:
    sam = cast_sam()
    ours = rewritten(sam, passes)
    assert_rounding(sam.to(dtype).image_encoder, ours.to(dtype).image_encoder, [random_pixels()])


@EACH_AND_ALL
def test_an_optimised_model_refuses_a_later_cast(passes: tuple[Pass, ...]) -> None:
    ours = optimize(random_sam(80, window=3), [CastDtype(), *passes], verify="off")
    expected = ours.image_encoder(random_pixels())
    with pytest.raises(InvalidInput, match="an optimised model keeps its dtypes"):
        ours.half()
    assert_bit_equal(ours.to("cpu").image_encoder(random_pixels()), expected)


def zero(self: Any, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


class Zero(torch.nn.Module):
    """In the place of any part that keeps the width of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def rebound(module: Any) -> Any:
    """As a pass of the user's own would do it."""
    new = clone(module)
    rebind(new, "forward", zero)
    return new


@pytest.mark.parametrize("put", [lambda module: Zero(), rebound], ids=["another module", "a clone, rebound"])
@pytest.mark.parametrize("part", ["attn", "norm2", "mlp.act"])
def test_what_is_put_in_a_parts_place_later_is_run(part: str, put: Any) -> None:
    plain = cast_sam()
    ours = rewritten(plain)
    for model in (ours, plain):
        for block in model.image_encoder.blocks:
            set_module(block, part, put(block.get_submodule(part)))
    assert_rounding(plain.image_encoder, ours.image_encoder, [random_pixels().bfloat16()])


def test_a_qkv_wrapped_later_is_run_as_in_the_unmodified_model() -> None:
    class Adapted(torch.nn.Module):
        """A low-rank adapter around a projection: it has no bias to read."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    plain = cast_sam()
    ours = rewritten(plain)
    for model in (ours, plain):
        for block in model.image_encoder.blocks:
            block.attn.qkv = Adapted(block.attn.qkv)
    assert_rounding(plain.image_encoder, ours.image_encoder, [random_pixels().bfloat16()])


def test_hooks_fire_once_a_forward_and_see_what_was_there() -> None:
    ours, plain = rewritten(cast_sam()), cast_sam()
    names = ("", "norm1", "attn.qkv", "attn.proj", "norm2", "mlp", "mlp.lin1", "mlp.act", "mlp.lin2")
    seen: dict[int, list[tuple[str, int]]] = {}

    def watch(model: Sam) -> list[tuple[str, int]]:
        seen[id(model)] = []
        for index, block in enumerate(model.image_encoder.blocks):
            for name in names:
                note = f"{index}.{name}"
                block.get_submodule(name).register_forward_hook(
                    lambda module, args, out, note=note: seen[id(model)].append((note, out.shape[-1]))
                )
        model.image_encoder(random_pixels())
        return seen[id(model)]

    # The fused sum and norm calls no module, and windows are not copied out: all else is in SAM's order.
    without = [event for event in watch(plain) if not event[0].endswith("norm2")]
    assert watch(ours) == without


def test_a_hook_may_change_what_a_projection_gives() -> None:
    ours = rewritten(cast_sam())
    before = ours.image_encoder(random_pixels())
    for name in ("attn.qkv", "attn.proj", "mlp.lin1"):
        handle = ours.image_encoder.blocks[0].get_submodule(name).register_forward_hook(lambda _, args, out: 2 * out)
        assert not torch.equal(ours.image_encoder(random_pixels()), before)
        handle.remove()
    assert_bit_equal(ours.image_encoder(random_pixels()), before)


def test_with_the_other_passes_of_attention_in_any_order() -> None:
    passes = (SDPAttention(), HoistRelPos(), TritonAttention(), TritonLayerNorm(0), LinearGELU())
    sam = cast_sam()
    expected = rewritten(sam, passes).image_encoder(random_pixels())
    for order in itertools.permutations(passes):
        assert_bit_equal(rewritten(sam, order).image_encoder(random_pixels()), expected)
    without = rewritten(sam, (TritonAttention(), TritonLayerNorm(0), LinearGELU()))
    assert_bit_equal(without.image_encoder(random_pixels()), expected)


def test_on_an_encoder_alone() -> None:
    encoder = cast_sam().image_encoder
    ours = rewritten(encoder)
    assert_rounding(encoder, ours, [random_pixels(1)])


@pytest.fixture
def graphs(dynamo_only: None) -> Any:
    """Counts what was compiled."""
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


@EACH_AND_ALL
@pytest.mark.parametrize("scope", ["block", "encoder"])
def test_blocks_of_one_kind_compile_once_without_a_break(
    scope: Literal["block", "encoder"], passes: tuple[Pass, ...], graphs: Any
) -> None:
    sam = cast_sam(depth=6, global_blocks=(2, 5))
    ours = rewritten(sam, (LinearPatchEmbed(), HoistRelPos(), SDPAttention(), *passes))
    expected = ours.image_encoder(random_pixels())
    Compile(scope)(ours)
    assert_bit_equal(ours.image_encoder(random_pixels()), expected)
    assert graphs["unique_graphs"] == (4 if scope == "block" else 1)  # patch embedding, windowed, global, neck


def test_inductor_code_errs_like_the_unmodified_encoder() -> None:
    torch._dynamo.reset()
    sam = cast_sam(width=32)
    ours = rewritten(sam)
    Compile("encoder")(ours)
    assert_rounding(sam.image_encoder, ours.image_encoder, [random_pixels(1)])
    torch._dynamo.reset()


def test_threads_share_a_compiled_model(graphs: Any) -> None:
    ours = rewritten(cast_sam())
    Compile(batch_sizes=(1, 2))(ours)
    batches = [random_pixels(1), random_pixels(2)]
    expected = [ours.image_encoder(pixels) for pixels in batches]

    def work(pixels: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [ours.image_encoder(pixels) for _ in range(8)]

    with ThreadPoolExecutor(2) as pool:
        for mine, theirs in zip(pool.map(work, batches), expected, strict=True):
            assert_bit_equal(mine, [theirs] * 8)


@pytest.mark.parametrize("model_type", ["vit_b", "vit_h"])
def test_on_the_meta_device_keys_shapes_and_dtypes_stay(model_type: str) -> None:
    with torch.device("meta"):
        sam = sam_model_registry[model_type]()
    CastDtype()(sam)
    before = {key: (value.shape, value.dtype) for key, value in sam.state_dict().items()}
    for pass_ in KERNEL_PASSES:
        assert len(pass_(sam).sites) == {"vit_b": 12, "vit_h": 32}[model_type]
    assert {key: (value.shape, value.dtype) for key, value in sam.state_dict().items()} == before
    assert all(parameter.is_meta for parameter in sam.parameters())
    embedding = sam.image_encoder(torch.empty(1, 3, 1024, 1024, device="meta"))
    assert embedding.shape == (1, 256, 64, 64)
