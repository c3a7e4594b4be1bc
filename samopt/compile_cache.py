"""What torch.compile made in this process, to be found by another: the artifacts of PyTorch's caches.

They hold compiled code, and PyTorch reads parts of them with pickle: whoever made them can run code where they are
used. So samopt uses them only where it is told to.
"""

from __future__ import annotations

import copyreg
import importlib
import platform
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton_package


class _Torch:
    """The module torch, to pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("torch",)


def _by_name(memory_format: torch.memory_format) -> tuple[Any, ...]:
    return getattr, (_Torch(), str(memory_format).removeprefix("torch."))


# PyTorch looks compiled code up by digests of pickled descriptions. Of a memory format pickle writes the first module
# in sys.modules that has a `torch`: of a service that imports torch itself another than of a script, so that nothing
# would be found. PyTorch gives layouts a way of their own for pickle, but not memory formats.
copyreg.pickle(torch.memory_format, _by_name)


def artifacts(model: nn.Module) -> bytes | None:
    """What was compiled in this process so far, of all models together; None where `model` is not compiled, or nothing
    was."""
    if not any(module._compiled_call_impl is not None for module in model.modules()):
        return None
    found = torch.compiler.save_cache_artifacts()
    return None if found is None else found[0]


def use(content: bytes) -> str | None:
    """Puts artifacts where compilation looks for them; why that was not possible, or None if it was."""
    info = torch.compiler.load_cache_artifacts(content)
    return "PyTorch could not read it" if info is None else None


def machine(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on: versions, and the processor or GPU."""
    found = {"samopt": version("samopt"), "python": platform.python_version(), "torch": str(torch.__version__)}
    if has_triton_package():
        found["triton"] = version("triton")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return found | {"device": "cuda", "gpu": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
    capability = torch.backends.cpu.get_cpu_capability()
    return found | {"device": device.type, "processor": platform.machine(), "capability": capability}


def differences(made: dict[str, Any], here: dict[str, Any]) -> str:
    """In what two machines differ, in words; "" for none."""
    keys = dict.fromkeys([*made, *here])
    return ", ".join(
        f"{key} {made.get(key, 'none')} there and {here.get(key, 'none')} here"
        for key in keys
        if made.get(key) != here.get(key)
    )
