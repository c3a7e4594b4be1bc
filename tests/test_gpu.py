"""What only a GPU can show: the recipes' accuracy on CUDA, no synchronisation, and CUDA graphs that keep features."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from segment_anything.modeling import Sam

import samopt
from samopt.passes import CastDtype, Compile, HoistRelPos, SDPAttention, WhereIndexing
from samopt.recipe import built_in
from samopt.samples import scene_samples
from samopt.tiny import load_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def sam() -> Sam:
    return load_tiny().to("cuda")


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", built_in())
def test_recipes_keep_their_budget(sam: Sam, recipe: str) -> None:
    fast = samopt.optimize(sam, recipe, samples=scene_samples(4))
    rows = samopt.report(fast).steps
    assert [row.status for row in rows] == ["applied"] * len(rows)


def test_no_synchronisation_in_encoder_and_prompt_encoder(sam: Sam) -> None:
    sam.requires_grad_(False)
    pixels = torch.randn(1, 3, 1024, 1024, device="cuda")
    points = torch.rand(5, 2, 2, device="cuda") * 1024
    labels = torch.tensor([[1, 0]], device="cuda").expand(5, -1)

    def run() -> None:
        sam.image_encoder(pixels)
        sam.prompt_encoder((points, labels), None, None)

    run()
    with synchronising_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        run()
    for rewrite in (HoistRelPos(), WhereIndexing(), SDPAttention(), CastDtype()):
        rewrite(sam)
    run()
    with synchronising_is_an_error():
        run()


# PyTorch's own: its CUDA graph trees capture an empty graph to set up their memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@torch.no_grad()
def test_cuda_graphs_keep_earlier_features(sam: Sam) -> None:
    for rewrite in (HoistRelPos(), SDPAttention(), CastDtype(), Compile(scope="encoder", cuda_graphs=True)):
        rewrite(sam)
    images = torch.randn(4, 1, 3, 1024, 1024, device="cuda")
    features = [sam.image_encoder(image) for image in images]
    kept = [feature.clone() for feature in features]
    for image in reversed(images):
        sam.image_encoder(image)
    assert all(map(torch.equal, features, kept))
    again = [sam.image_encoder(image) for image in images]
    assert all(map(torch.equal, again, kept))


def test_moves_between_devices(sam: Sam) -> None:
    fast = samopt.optimize(sam.cpu(), [HoistRelPos(), SDPAttention(), CastDtype()], verify="off").to("cuda")
    assert {tensor.device.type for tensor in (*fast.parameters(), *fast.buffers())} == {"cuda"}
    assert samopt.verify(fast, samopt.Reference.record(sam.to("cuda"), scene_samples(1))).finite
