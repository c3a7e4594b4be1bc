"""A profile: a trace with named ranges, figures that hold together, and a model that stays as it was."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from segment_anything.modeling import Sam
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import Interval

from samopt import InvalidInput, Sample
from samopt.profiling import CALLS, STAGES, StageTime, profile
from samopt.profiling.profiler import stages_of
from tests.models import random_sam


def ranges(path: str) -> dict[str, list[tuple[float, float]]]:
    """The named ranges of a trace: begin and end of each, in microseconds."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_trace_and_figures(sam: Sam, pictures: list[Sample], tmp_path: Path) -> None:
    weights = {key: value.clone() for key, value in sam.state_dict().items()}
    found = profile(sam, pictures[0], out=tmp_path / "made" / "here", name="mine")
    assert found.files == {"trace": str(tmp_path / "made" / "here" / "mine.trace.json.gz")}
    named = ranges(found.files["trace"])
    assert {*CALLS, *STAGES, "block 0", "block 1"} <= set(named)
    ((begin, end),) = named["image encoder"]
    for block in ("block 0", "block 1"):
        ((first, last),) = named[block]  # of one call: the profiler's own warm-up is not in the trace
        assert begin <= first < last <= end
    assert [stage.name for stage in found.stages[:3]] == ["set_image", "preprocess", "image encoder"]
    seconds = {stage.name: stage.seconds for stage in found.stages}
    assert seconds["image encoder"] == pytest.approx((end - begin) / 1e6, rel=0.01)
    assert seconds["prompt encoder"] + seconds["mask decoder"] + seconds["postprocess"] < seconds["predict"]
    assert 0 < found.kernel_seconds < seconds["set_image"] + seconds["predict"]
    assert {"attention", "matmul", "convolution", "normalisation", "elementwise", "copies"} <= {
        kernel.group for kernel in found.kernels
    }
    assert found.memory is None
    assert any("no memory figures and no snapshot" in note for note in found.notes)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in sam.modules())
    assert all(torch.equal(value, weights[key]) for key, value in sam.state_dict().items())


@dataclass(frozen=True)
class Event:
    """An event of the profiler."""

    name: str
    device_type: DeviceType
    time_range: Interval
    is_user_annotation: bool = False


def test_a_stages_kernels_are_those_in_its_range_on_the_gpu() -> None:
    def host(name: str, start: int, end: int) -> Event:
        return Event(name, DeviceType.CPU, Interval(start, end), True)

    def gpu(name: str, start: int, end: int, named: bool = False) -> Event:
        return Event(name, DeviceType.CUDA, Interval(start, end), named)

    events = [
        host("set_image", 0, 50),
        host("preprocess", 1, 5),
        host("image encoder", 10, 40),
        host("preprocess", 41, 45),
        gpu("set_image", 20, 90, named=True),
        gpu("preprocess", 20, 30, named=True),
        gpu("image encoder", 30, 80, named=True),
        gpu("preprocess", 80, 90, named=True),
        gpu("Memcpy", 20, 25),
        gpu("gemm", 30, 60),
        gpu("softmax", 65, 80),
        gpu("pad", 80, 88),
        gpu("of another call", 95, 99),
    ]
    assert stages_of(events) == (
        StageTime("set_image", 50e-6, 58e-6),
        StageTime("preprocess", 8e-6, 13e-6),
        StageTime("image encoder", 30e-6, 45e-6),
    )


def test_figures_as_json_and_as_a_table(sam: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samopt.profiling.profiler.scene_samples", lambda count: pictures[:count])
    found = profile(sam)
    assert found.files == {}
    written = json.loads(json.dumps(found.to_dict()))
    assert set(written) == {
        *("name", "device", "seconds", "kernel_seconds", "stages", "groups", "kernels"),
        *("audit", "memory", "notes", "files"),
    }
    assert sum(group["seconds"] for group in written["groups"]) == pytest.approx(written["kernel_seconds"])
    assert sum(group["share"] for group in written["groups"]) == pytest.approx(1)
    assert (written["device"], written["memory"]) == ("cpu", None)
    if torch.version.cuda is not None:
        assert {"stage", "reason", "place", "count"} <= set(written["audit"]["syncs"][0])
    console = Console(width=140)
    with console.capture() as captured:
        console.print(found)
    shown = captured.get()
    for text in ("whole call", "image encoder, profiled", "where the time goes", "operators that take longest"):
        assert text in shown
    assert "GPU ms" not in shown


def test_a_build_without_cuda_leaves_the_audit_out(
    sam: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    found = profile(sam, pictures[0])
    assert found.audit is None
    assert found.to_dict()["audit"] is None
    assert any("no sync audit" in note and "no GPU is needed" in note for note in found.notes)


def test_mistakes(sam: Sam, pictures: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="file: no folder can be made there"):
        profile(sam, pictures[0], out=tmp_path / "file")
    with pytest.raises(InvalidInput, match="Linear is no Sam"):
        profile(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="on the meta device"):
        profile(random_sam().to("meta"), pictures[0])
    with pytest.raises(InvalidInput, match="line: 1 x 500 pixels are too narrow"):
        profile(sam, Sample(np.zeros((500, 1, 3), np.uint8), name="line"))
