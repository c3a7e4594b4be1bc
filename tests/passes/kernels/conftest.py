"""Fixtures of the kernels' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from samopt.passes.kernels import tuning
from tests.made_up_problem import Tuner, tuner_on_a_cpu


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tuner's file, which is not there yet; nor is any that samopt ships."""
    monkeypatch.setenv("SAMOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path / "cache" / "kernels.json"


@pytest.fixture
def tuner(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """A tuner that knows nothing."""
    return tuner_on_a_cpu(monkeypatch)
