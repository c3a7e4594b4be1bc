"""Where the kernels can run."""

from __future__ import annotations

import torch
from torch.utils._triton import has_triton_package


def cannot_run(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"Triton kernels need a GPU and the model is on {device.type}"
    if not has_triton_package():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None
