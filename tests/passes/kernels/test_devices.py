"""Where the kernels can run, as a GPU and its software say."""

from __future__ import annotations

import pytest
import torch

from samopt.passes.kernels import devices
from samopt.passes.kernels.devices import cannot_run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that Triton runs on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(devices, "has_triton_package", lambda: True)
    return torch.device("cuda", 0)


def test_a_gpu_with_triton_can(gpu: torch.device) -> None:
    assert cannot_run(gpu) is None


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_another_device_cannot(kind: str) -> None:
    assert cannot_run(torch.device(kind)) == f"Triton kernels need a GPU and the model is on {kind}"


def test_an_older_gpu_cannot(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert cannot_run(gpu) == "Triton kernels need compute capability 8.0, and Tesla T4 has less"


def test_a_gpu_without_triton_cannot(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_triton_package", lambda: False)
    assert cannot_run(gpu) == "Triton is not installed"
