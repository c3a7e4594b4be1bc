"""Benchmarks of small models, for tests of what their rows say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor

import samopt.bench
import samopt.timing
from samopt import bench_model, bench_plan
from samopt.bench import Bench
from samopt.bench_model import BenchModel
from samopt.peers import Build
from samopt.timing import Encoder
from tests.models import random_sam

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def small_model() -> BenchModel:
    """A small model with random weights."""
    return BenchModel(random_sam(img_size=64), "small", "random")


def small_bench(monkeypatch: pytest.MonkeyPatch, model: BenchModel | None = None, **options: Any) -> Bench:
    """A bench of a small model; the product that measures the chip is small, too, and little is repeated."""
    _measure_little(monkeypatch)
    return Bench(model or small_model(), CPU, **options)


def built(change: Callable[[Any, Tensor], Tensor]) -> Build:
    """Builds the unmodified encoder, called through `change`."""

    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        yield lambda pixels: change(sam.image_encoder, pixels)

    return build


SAME = built(lambda encoder, pixels: encoder(pixels))
DOUBLE = built(lambda encoder, pixels: 2 * encoder(pixels))


def bench_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` times a small model and takes any recipe for verified."""
    monkeypatch.setattr(bench_model, "random_model", lambda model_type, seed: random_sam(img_size=64, seed=seed))
    monkeypatch.setattr(bench_plan, "verified", lambda recipe, *_: bench_plan.Verified(recipe, {}))
    monkeypatch.setattr(samopt.bench, "PHOTO", (40, 60))
    _measure_little(monkeypatch)


def _measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.timing, "CPU_PRODUCT", 64)
    monkeypatch.setattr(samopt.timing, "REPEATS", 3)
