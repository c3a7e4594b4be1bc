"""Bars are the milliseconds of each group, before and after."""

from __future__ import annotations

import dataclasses
from typing import Any

from samopt.charts import kernel_time
from samopt.profiling import Kernel
from tests.made_up_results import COMPARISON


def test_each_group_has_a_bar_before_and_after() -> None:
    after = dataclasses.replace(COMPARISON.after, kernels=(Kernel("gemm", "matmul", 0.02, 10),))
    (axes,) = kernel_time(dataclasses.replace(COMPARISON, after=after)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all kernels", "attention", "matmul"]
    containers: Any = axes.containers
    assert [[round(bar.get_width(), 6) for bar in bars] for bars in containers] == [[100, 20, 80], [20, 0, 20]]
    assert [text.get_text() for text in axes.texts] == ["100", "20.0", "80.0", "20.0", "none", "20.0"]
    assert axes.get_xlabel() == "ms in one call, set_image and predict"


def test_on_a_cpu_they_are_operators() -> None:
    before, after = (dataclasses.replace(of, memory=None) for of in (COMPARISON.before, COMPARISON.after))
    (axes,) = kernel_time(dataclasses.replace(COMPARISON, before=before, after=after)).axes
    assert axes.get_yticklabels()[0].get_text() == "all operators"
