"""Fixtures of the kernels' tests on a GPU."""

from __future__ import annotations

import pytest

from samopt.passes.kernels import attention, float8_gelu, image_to_token, int8_linear, tuning
from samopt.passes.kernels.attention_launch import Geometry
from samopt.passes.kernels.tuning import Config
from tests.passes.kernels.on_gpu.configurations import (
    configuration,
    float8_configuration,
    int8_configuration,
    token_configuration,
)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes what `configuration` says: seeking the best one takes a while."""

    def choose(sought: tuning.Problem) -> Config:
        return configuration(Geometry(**dict(sought.shape)), sought.dtype)

    monkeypatch.setattr(attention, "choose", choose)
    monkeypatch.setattr(
        int8_linear, "choose", lambda sought: int8_configuration(bool(dict(sought.shape)["gelu"]), sought.dtype)
    )
    monkeypatch.setattr(float8_gelu, "choose", lambda sought: float8_configuration())
    monkeypatch.setattr(image_to_token, "choose", lambda sought: token_configuration(sought.dtype))
