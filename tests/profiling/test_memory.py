"""Peak memory and snapshot of a call, on a GPU."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from samopt.profiling.memory import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MIB = 2**20


def allocate() -> Tensor:
    """Allocates 96 MiB, 64 of them at a time."""
    first = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    second = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    del first
    return torch.cat([second[: 16 * MIB], second[: 16 * MIB]])


def test_what_a_call_takes_with_the_models_weights_and_nothing_else(tmp_path: Path) -> None:
    others = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    model = nn.Linear(1024, 1024, device="cuda")
    allocate()
    path = tmp_path / "memory.pickle"
    found = memory_of(model, allocate, torch.device("cuda"), path)
    assert found.weight_bytes == 4 * (1024 * 1024 + 1024)
    assert found.peak_bytes - found.weight_bytes == pytest.approx(64 * MIB, abs=2 * MIB)
    assert len(others) == 100 * MIB
    snapshot = pickle.loads(path.read_bytes())
    sizes = [event["size"] for events in snapshot["device_traces"] for event in events if event["action"] == "alloc"]
    assert sizes.count(32 * MIB) == 3
    frames = {frame["name"] for events in snapshot["device_traces"] for event in events for frame in event["frames"]}
    assert "allocate" in frames


def test_nothing_is_recorded_afterwards(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, device="cuda")
    memory_of(model, allocate, torch.device("cuda"), tmp_path / "memory.pickle")
    count = sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))
    allocate()
    assert sum(map(len, torch.cuda.memory._snapshot()["device_traces"])) == count
