"""Batches are brought to the compiled sizes, and nobody but the clock can tell."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from segment_anything.modeling import ImageEncoderViT
from torch import Tensor, nn

from samopt.passes import CastDtype, Compile, HoistRelPos, SDPAttention
from samopt.passes.batches import Batches, encode, fill_up, run_as
from tests.compilations import compilations
from tests.models import random_sam
from tests.numerics import assert_bit_equal, relative_error
from tests.stand_in import StandIn

Scope = Literal["block", "encoder"]
SCOPES: list[Scope] = ["block", "encoder"]
GRAPHS = {"block": 4, "encoder": 1}  # of one batch size: patch embedding, windowed and global block, neck


pytestmark = pytest.mark.usefixtures("dynamo_only")


def compiled(scope: Scope, sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[Any, Any]:
    """An encoder compiled for a few batch sizes, and the unmodified one."""
    sam = random_sam()
    before = copy.deepcopy(sam.image_encoder)
    Compile(scope, batch_sizes=sizes)(sam)
    return sam.image_encoder, before


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """A batch of another size is summed in another order, so that the last bits may differ."""
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("scope", SCOPES)
def test_batches_of_any_size_compile_for_the_given_sizes_only(scope: Scope) -> None:
    ours, before = compiled(scope)
    images = torch.randn(9, 3, 64, 64)
    with torch.no_grad():
        for batch in (3, 1, 2, 4, 5, 6, 7, 9):
            features = ours(images[:batch])
            assert_same(features, before(images[:batch]))
            assert features.untyped_storage().nbytes() == features.nbytes, "no filling is kept"
    assert compilations() == 3 * GRAPHS[scope]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_filled_batch_in_inference_mode_is_of_the_kind_of_a_full_one(scope: Scope, inside: bool) -> None:
    ours, before = compiled(scope, (4,))
    with torch.inference_mode(inside):
        images = torch.randn(4, 3, 64, 64)
    with torch.inference_mode():
        for batch in (4, 3):
            features = ours(images[:batch])
            assert features.is_inference()
            assert_same(features, before(images[:batch]))
    assert compilations() == GRAPHS[scope]


@pytest.mark.parametrize("scope", SCOPES)
def test_strides_do_not_compile_anew(scope: Scope) -> None:
    ours, before = compiled(scope, (2,))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for batch in (images, images.to(memory_format=torch.channels_last), images.mT):
            assert_same(ours(batch), before(batch))
    assert compilations() == GRAPHS[scope]


def test_pieces_are_of_the_largest_size_and_the_rest_is_filled_with_zeros() -> None:
    seen: list[Tensor] = []

    def call(pixels: Tensor) -> Tensor:
        seen.append(pixels)
        return pixels.flatten(1)[:, :2]

    images = torch.randn(15, 3, 4, 4)
    features = encode(Batches((2, 6)), nn.Identity(), call, images)
    assert_bit_equal(features, images.flatten(1)[:, :2])
    assert [len(pixels) for pixels in seen] == [6, 6, 6]
    assert_bit_equal(torch.cat(seen)[:15], images)
    assert not seen[-1][3:].any()
    seen.clear()
    assert len(encode(Batches((2, 6)), nn.Identity(), call, images[:7])) == 7
    assert [len(pixels) for pixels in seen] == [6, 2]


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [2]), (2, [2]), (3, [6]), (6, [6]), (7, [6, 2]), (12, [6, 6]), (15, [6, 6, 6])]
)
def test_the_sizes_that_images_run_as(count: int, expected: list[int]) -> None:
    assert run_as(count, (2, 6)) == expected


def test_a_full_piece_is_not_copied() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert fill_up(images, 2) is images


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_filled_batch_requires_a_gradient_only_where_one_is_wanted(size: int, inside: bool) -> None:
    images = torch.randn(2, 3, 4, 4).requires_grad_()
    (piece,) = images.split(2)
    assert fill_up(piece, size).requires_grad
    with torch.inference_mode(inside), torch.no_grad():
        (piece,) = images.split(2)
        pixels = fill_up(piece, size)
        assert (pixels.requires_grad, pixels.is_inference()) == (False, False)
        assert not torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # as below
@pytest.mark.parametrize("scope", SCOPES)
def test_without_gradients_it_does_not_matter_whether_the_images_require_them(scope: Scope) -> None:
    ours, before = compiled(scope, (4,))
    images = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        for batch in (images, images.clone().requires_grad_(), images[:3], images[:3].clone().requires_grad_()):
            assert_same(ours(batch), before(batch))
    assert compilations() == GRAPHS[scope]


@pytest.mark.parametrize("scope", SCOPES)
def test_an_empty_batch_fails_as_in_the_unmodified_encoder(scope: Scope) -> None:
    ours, before = compiled(scope)
    for encoder in (before, ours):
        with torch.no_grad(), pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            encoder(torch.randn(0, 3, 64, 64))


# TorchDynamo's own, of an input that is no leaf: it hides the warning where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_of_a_filled_batch(scope: Scope) -> None:
    ours, before = compiled(scope)
    gradients = []
    for encoder in (ours, before):
        images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        encoder(images).square().sum().backward()
        gradients.append(images.grad)
    assert relative_error(*gradients) < 1e-5


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", ["", "blocks.1"])
def test_a_hook_sees_what_it_sees_in_the_unmodified_encoder(scope: Scope, where: str) -> None:
    ours, before = compiled(scope, (1, 2))
    images = torch.randn(3, 3, 64, 64)
    seen: list[torch.Size] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.extend((args[0].shape, output.shape))
        return output + 1

    with torch.no_grad():
        if not where:  # PyTorch may not see a hook that is put inside what was compiled already
            assert_same(ours(images), before(images))
        handles = [encoder.get_submodule(where).register_forward_hook(hook) for encoder in (before, ours)]
        expected, found = before(images), ours(images)
        assert_same(found, expected)
        assert seen[2:] == seen[:2]
        for handle in handles:
            handle.remove()
        assert relative_error(before(images), expected) > 0.01
        assert_same(ours(images), before(images))


def test_a_hook_on_all_modules_keeps_the_batch_whole() -> None:
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        encode(Batches((4,)), nn.Identity(), nn.Identity(), torch.randn(3, 3, 4, 4))
    finally:
        handle.remove()
    assert seen == [3]


@pytest.mark.parametrize("scope", SCOPES)
def test_threads_get_the_answers_of_one(scope: Scope) -> None:
    sam = random_sam()
    for rewrite in (HoistRelPos(), SDPAttention(), CastDtype(), Compile(scope, batch_sizes=(1, 2, 4))):
        rewrite(sam)
    images = torch.randn(7, 3, 64, 64)

    @torch.no_grad()
    def answers(batches: list[int]) -> list[Tensor]:
        return [sam.image_encoder(images[:batch]) for batch in batches]

    batches = [3, 7, 1, 5, 2, 6]
    with ThreadPoolExecutor(2) as pool:
        there = [pool.submit(answers, order) for order in (batches, batches[::-1])]
        forwards, backwards = (future.result() for future in there)
    expected = answers(batches)
    assert_bit_equal(forwards, expected)
    assert_bit_equal(backwards[::-1], expected)


def test_threads_do_not_share_a_filled_batch() -> None:
    both_filled = threading.Barrier(2, timeout=10)

    def call(pixels: Tensor) -> Tensor:
        both_filled.wait()
        return 2 * pixels

    images = torch.randn(2, 3, 3, 4, 4)
    batches = Batches((4,))
    with ThreadPoolExecutor(2) as pool:
        doubled = list(pool.map(lambda batch: encode(batches, nn.Identity(), call, batch), images))
    assert_bit_equal(doubled, list(2 * images))


def test_an_encoder_with_other_code_is_compiled_and_takes_its_batches_as_they_come() -> None:
    class Other(ImageEncoderViT):  # type: ignore[misc]
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = super().forward(x)
            return features, features.mean(0)

    for scope in SCOPES:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        sam = random_sam()
        sam.image_encoder.__class__ = Other
        before = copy.deepcopy(sam.image_encoder)
        result = Compile(scope, batch_sizes=(4,))(sam)
        (skip,) = result.skipped
        assert skip.fqn == "image_encoder"
        assert skip.reason.startswith("it takes its batches as they come, without CUDA graphs: its forward is not")
        assert len(result.sites) == (4 if scope == "block" else 1)
        pixels = torch.randn(3, 3, 64, 64)
        with torch.no_grad():
            for ours, theirs in zip(sam.image_encoder(pixels), before(pixels), strict=True):
                assert_same(ours, theirs)
        assert compilations() == GRAPHS[scope]


# With CUDA graphs, on a stand-in for the GPU


@pytest.mark.parametrize("scope", SCOPES)
def test_every_size_is_captured_once_and_features_stay(scope: Scope, on_stand_in: StandIn) -> None:
    sam = random_sam()
    before = copy.deepcopy(sam.image_encoder)
    Compile(scope, batch_sizes=(1, 4), cuda_graphs=True)(sam)
    images = torch.randn(6, 3, 64, 64)
    with torch.no_grad():
        kept = [sam.image_encoder(images[:batch]) for batch in (1, 2, 3, 4, 5, 6)]
        for batch, features in enumerate(kept, start=1):
            assert_same(features, before(images[:batch]))
            assert features.untyped_storage().nbytes() == features.nbytes
    assert on_stand_in.captured == [1, 4]


def test_pixels_are_cast_on_the_way_into_a_graph(on_stand_in: StandIn) -> None:
    sam = random_sam()
    CastDtype()(sam)
    before = copy.deepcopy(sam.image_encoder)
    Compile(batch_sizes=(1,), cuda_graphs=True)(sam)
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for pixels in (image, image.double()):
            assert_same(sam.image_encoder(pixels), before(image))
    assert (on_stand_in.captured, on_stand_in.dtypes) == ([1], [torch.bfloat16])
    with torch.no_grad(), pytest.raises(RuntimeError, match="should be the same"):  # as without a graph
        sam.image_encoder(torch.ones(1, 3, 64, 64, dtype=torch.uint8))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_hook_is_not_passed_by_by_a_replay(scope: Scope, on_stand_in: StandIn) -> None:
    sam = random_sam()
    Compile(scope, cuda_graphs=True)(sam)
    pixels = torch.randn(1, 3, 64, 64)
    seen: list[bool] = []
    with torch.no_grad():
        sam.image_encoder(pixels)
        sam.image_encoder(pixels)
        replays = on_stand_in.replays
        sam.image_encoder.register_forward_hook(lambda *_: seen.append(True))
        sam.image_encoder(pixels)
    assert seen == [True]
    assert on_stand_in.replays == replays == 2


def test_a_replaced_module_is_captured_anew(on_stand_in: StandIn) -> None:
    sam: Any = random_sam()
    Compile(cuda_graphs=True)(sam)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = sam.image_encoder(pixels)
        sam.image_encoder.blocks[1].mlp.act = nn.Sigmoid()  # without weights whose addresses would tell
        assert relative_error(sam.image_encoder(pixels), before) > 0.01
    assert on_stand_in.captured == [1, 1]


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_share_no_graphs(scope: Scope, on_stand_in: StandIn) -> None:
    sam = random_sam()
    Compile(scope, cuda_graphs=True)(sam)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = sam.image_encoder(pixels)
        again = copy.deepcopy(sam)
        assert all(module._compiled_call_impl is None for module in again.modules())
        assert_bit_equal(again.image_encoder(pixels), expected)
        assert on_stand_in.replays == 1
        Compile(scope, cuda_graphs=True)(again)
        assert_bit_equal(again.image_encoder(pixels), expected)
    assert on_stand_in.captured == [1, 1]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_weight_that_is_taken_away_is_captured_anew(scope: Scope, on_stand_in: StandIn) -> None:
    sam: Any = random_sam()
    Compile(scope, cuda_graphs=True)(sam)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = sam.image_encoder(pixels)
        sam.image_encoder.blocks[1].mlp.lin2.bias = None
        assert relative_error(sam.image_encoder(pixels), before) > 1e-4
    assert on_stand_in.captured == [1, 1]
