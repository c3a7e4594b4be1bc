"""The Triton kernels of samopt's own operators that this process compiled, to be found by another.

PyTorch's artifacts hold the kernels that it generates, not those that operators launch: a new process would compile
these anew, in seconds each. Only what Triton needs to launch them is kept: a binary and its description, and, before
Triton 3.8, a module in C for each kind of arguments.
"""

from __future__ import annotations

import base64
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from samopt.errors import first_line

ENTRY = re.compile(r"([0-9a-f]{64})/(\w[\w.-]*)", re.ASCII)  # the key of a kernel, and a file that Triton caches of it
NEEDED = (".json", ".cubin", ".hsaco")  # of these files; the others are what came before the binary


def compiled(device: torch.device) -> dict[str, Tensor]:
    """The files of the kernels that were compiled in this process for a GPU, those that were only tried among them.

    Args:
        device: with its index. There are no kernels for a CPU.

    Returns:
        Each file as uint8 [bytes], by its key in Triton's cache and its name. A kernel whose files are gone, or are
        not what is known here, is left out: that costs a compilation.
    """
    if device.type != "cuda" or not has_triton_package():
        return {}
    kernels = list(_launched(device.index))
    entries = []
    for kernel in kernels:
        files = {f"{kernel.hash}/{name}": path for name, path in kernel.metadata_group.items() if name.endswith(NEEDED)}
        if len(files) == 2:
            entries.append(files)
    for path in {str(module.__file__) for module in _launchers(kernels)}:
        entries.append({f"{_key(Path(path).parent.name)}/{Path(path).name}": path})
    found: dict[str, Tensor] = {}
    for files in entries:
        if all(map(ENTRY.fullmatch, files)):
            try:
                found |= {name: _content(path) for name, path in files.items()}
            except (OSError, ValueError):
                continue
    return found


def restore(files: Mapping[str, Tensor], device: torch.device) -> str | None:
    """Puts kernels where Triton looks for them before it compiles; why that was not possible, or None if it was.

    Args:
        files: from `compiled`, of the same versions and kind of GPU.
        device: where they will be launched.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from triton import knobs

    kernels: dict[str, dict[str, bytes]] = defaultdict(dict)
    for entry, content in files.items():
        if not (parts := ENTRY.fullmatch(entry)):
            return f"{entry!r} is no file of a kernel"
        kernels[parts[1]][parts[2]] = content.numpy().tobytes()
    try:
        # At the first kernel that PyTorch generates, it makes Triton look in a folder of its own from then on.
        for folder in {knobs.cache.dir, triton_cache_dir(device.index or 0)}:
            with knobs.cache.scope():
                knobs.cache.dir = folder
                for key, contents in kernels.items():
                    _put(key, contents)
    except Exception as error:  # a cache manager may be the user's own, and fail in ways of its own
        return f"Triton's cache cannot be used: {first_line(error)}"
    return None


def _launched(index: int) -> Iterator[Any]:
    """What Triton compiled of samopt's kernels for a GPU."""
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("samopt.")]
    for function in [value for module in modules if module is not None for value in list(vars(module).values())]:
        if isinstance(function, JITFunction) and index in function.device_caches:
            kernels = list(function.device_caches[index][0].values())
            yield from (kernel for kernel in kernels if isinstance(kernel, CompiledKernel))


def _launchers(kernels: Iterable[Any]) -> Iterator[ModuleType]:
    """The modules in C that Triton built to launch kernels, and to ask the driver, in its cache."""
    from triton.runtime import driver

    asking = getattr(getattr(driver.active, "utils", None), "load_binary", None)
    for launch in (asking, *(getattr(kernel._run, "launch", None) for kernel in kernels)):
        inside = [cell.cell_contents for cell in getattr(launch, "__closure__", None) or ()]  # with tensor descriptors
        for function in (launch, *inside):
            module = getattr(function, "__self__", None)
            if isinstance(module, ModuleType) and getattr(module, "__file__", None):
                yield module


def _key(folder: str) -> str:
    """The key of a folder in Triton's cache, which is named after it in base 32; "" for other folders."""
    try:
        return base64.b32decode(folder + "=" * (-len(folder) % 8)).hex()
    except ValueError:
        return ""


def _put(key: str, files: Mapping[str, bytes]) -> None:
    """Adds a kernel, or a module in C, to Triton's cache, unless it is there."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(key)
    descriptions = [name for name in files if name.endswith(".json")]
    for name in () if descriptions else files:
        if cache.get_file(name) is None:
            cache.put(files[name], name)
    for description in descriptions:
        if not files.keys() <= (cache.get_group(description) or {}).keys():
            cache.put_group(description, {name: cache.put(content, name) for name, content in files.items()})


def _content(path: str) -> Tensor:
    """A file as a tensor; OSError where it cannot be read, ValueError where it is empty."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
