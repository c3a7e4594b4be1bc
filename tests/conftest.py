"""Fixtures that several test files share."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # Triton, which torchvision imports, reads it then: its kernels run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

from segment_anything.modeling import Sam
from torch import nn

from samopt import Sample, optimize
from samopt.passes import (
    Compile,
    HoistRelPos,
    WhereIndexing,
    image_to_token,
    layer_norm,
    linear_gelu,
    triton_attention,
    tuned_linear,
    upscale_masks,
)
from tests.models import random_sam
from tests.stand_in import StandIn
from tests.toy_graphs import refuse_original


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models run several times faster on one thread than on threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> None:
    """`optimize` and benchmarks collect garbage: what is there before a file's tests need not be gone through again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny256() -> Sam:
    """The embedded model at 256 px, with its trained weights. Shared: do not change it."""
    from samopt.tiny import load_tiny

    return load_tiny(img_size=256)


@pytest.fixture(scope="session")
def optimised(tiny256: Sam) -> Callable[[str], Sam]:
    """The embedded model at 256 px under a recipe, made once: a name, "hoisted", or "unmodified". Shared like it."""

    @functools.cache
    def optimised(recipe: str) -> Sam:
        if recipe == "unmodified":
            return tiny256
        return optimize(tiny256, [HoistRelPos(), WhereIndexing()] if recipe == "hoisted" else recipe, verify="off")

    return optimised


@pytest.fixture
def every_warning() -> Iterator[None]:
    """PyTorch warns each time, also of what it warns of once in a process: an earlier test may have had that."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compiled code, counts of it and the limits that `Compile` raises do not outlast a test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = torch._dynamo.config
    limits = {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(limits):
        yield
    torch._dynamo.reset()


@pytest.fixture
def dynamo_only(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without TorchInductor: graphs are captured and guarded as ever, and run without generated code."""
    original = nn.Module.compile

    def without_inductor(module: nn.Module, *, fullgraph: bool, dynamic: bool, **_: Any) -> None:
        original(module, backend="eager", fullgraph=fullgraph, dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", without_inductor)


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What `Compile(cuda_graphs=True)` captures with, here where there is no GPU."""
    device = StandIn()
    monkeypatch.setattr(Compile, "requires", lambda self, model: None)
    monkeypatch.setattr("samopt.passes.cuda_graphs.Cuda", lambda module: device)
    return device


@pytest.fixture
def kernels_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes for a GPU apply on any device, to norms of any width: their operators compute on a CPU too."""
    for module, question in (
        (image_to_token, "cannot_run"),
        (triton_attention, "cannot_run"),
        (layer_norm, "cannot_run"),
        (upscale_masks, "cannot_run"),
        (linear_gelu, "no_gpu"),
        (tuned_linear, "no_gpu"),
    ):
        monkeypatch.setattr(module, question, lambda *_: None)
    monkeypatch.setattr(layer_norm.TritonLayerNorm.__init__, "__defaults__", (0,))  # in recipes, too


@pytest.fixture
def sam() -> Sam:
    """A small Sam with random weights, of the test's own."""
    return random_sam()


@pytest.fixture(scope="session")
def pictures() -> list[Sample]:
    """Two pictures of a few flat squares, one upright and one wide, without ground truth."""
    found = []
    for seed, (height, width) in enumerate([(53, 40), (31, 61)]):
        random = np.random.default_rng(seed)
        squares = random.integers(0, 256, size=(height // 10 + 1, width // 10 + 1, 3), dtype=np.uint8)
        image = squares.repeat(10, axis=0).repeat(10, axis=1)[:height, :width].copy()
        found.append(Sample(image, name=f"picture {seed}"))
    return found


@pytest.fixture
def no_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that a graph pass rewrote fail where they would run their original code."""
    refuse_original(monkeypatch)
