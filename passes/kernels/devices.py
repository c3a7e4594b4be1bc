"""Where the kernels can run, and how data get there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._triton import has_triton_package

HALVES = (torch.bfloat16, torch.float16)

# Held while a CUDA graph is captured, and while kernels are timed, which waits for the whole GPU: that breaks a
# capture, whichever thread does it. Who holds it may do both.
GPU_ALONE = threading.RLock()


def not_half(dtype: torch.dtype) -> str | None:
    """Why weights of a dtype are none for kernels in half precision, or None if they are."""
    return None if dtype in HALVES else f"its weights are {str(dtype).removeprefix('torch.')}: apply CastDtype first"


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on a device; a GPU copies it while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def no_gpu(device: torch.device, who_needs_it: str) -> str | None:
    """Why a device will not do where a GPU is needed, or None if it is one."""
    return None if device.type == "cuda" else f"{who_needs_it} a GPU and the model is on {device.type}"


def cannot_run(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None if they can."""
    if reason := no_gpu(device, "Triton kernels need"):
        return reason
    if not has_triton_package():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
