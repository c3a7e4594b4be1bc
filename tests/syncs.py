"""Finds, without a GPU, where a model would make the host wait for one.

Tensors are fake: they have shapes and a device, "cuda", but no values, so a build of torch with CUDA suffices. Every
operation on them is looked at, and those that need a value on the host, or memory of the host on the GPU, are recorded
with the line of the model that asked.

    with record_syncs() as syncs:
        encoder = on_fake_cuda(sam.image_encoder)
        encoder(fake_cuda(torch.zeros(1, 3, 1024, 1024)))
    assert not syncs
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_TO_HOST = ("nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Sync:
    """One operation that makes the host wait for the GPU.

    Attributes:
        reason: what it does.
        file: where, the innermost frame outside of torch.
        line: the line there.
        code: that line's text.
    """

    reason: str
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.reason}: {self.code}"


@contextmanager
def record_syncs() -> Iterator[list[Sync]]:
    """Runs its block on fake tensors and fills the list it yields. `on_fake_cuda` and `fake_cuda` work inside it."""
    syncs: list[Sync] = []
    # A ShapeEnv, so that sizes that depend on values are symbols and do not end the block at the first sync.
    with FakeTensorMode(shape_env=ShapeEnv()), _Recorder(syncs):
        yield syncs


def fake_cuda(tensor: Tensor) -> Tensor:
    """A fake tensor on the GPU like `tensor`."""
    mode = active_fake_mode()
    assert mode is not None, "only inside record_syncs()"
    with _disable_current_modes():
        meta = tensor.detach().to("meta")
    return FakeTensor(mode, meta, torch.device("cuda"))


def on_fake_cuda(model: M) -> M:
    """A copy of `model` with fake parameters and buffers on the GPU."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_cuda(parameter), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_cuda(buffer)
    return copy.deepcopy(model, memo)


class _Recorder(TorchDispatchMode):
    def __init__(self, syncs: list[Sync]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reason := _why_sync(func, args, kwargs):
            frame = _caller()
            self.syncs.append(Sync(reason, frame.filename, frame.lineno or 0, frame.line or ""))
        return func(*args, **kwargs)


def _why_sync(func: Any, args: Any, kwargs: Any) -> str | None:
    name = func._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.is_cuda for tensor in tensors) and _to_device(kwargs) != "cuda":
        return None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return _why_index_sync(name, args)
    if name in _TO_HOST:
        return f"{name} brings a value to the host"
    if name in ("_to_copy", "copy_"):
        # Memory of the host is pageable unless pinned, which fake tensors do not tell.
        target = _to_device(kwargs) if name == "_to_copy" else args[0].device.type
        source = args[0 if name == "_to_copy" else 1].device.type
        return f"copies from {source} to {target}" if target not in (None, source) else None
    return None


def _why_index_sync(name: str, args: Any) -> str | None:
    base, indices = args[0], [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if any(index.device != base.device for index in indices):
        return "indexes with a tensor of the host"
    if not masks:
        return None
    # One number of the host, written with one mask, goes through masked_fill, which counts nothing.
    filled = name != "index" and len(indices) == 1 and args[2].numel() == 1 and not args[2].is_cuda
    return None if filled else f"{'reads' if name == 'index' else 'writes'} with a boolean mask"


def _to_device(kwargs: Any) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _caller() -> traceback.FrameSummary:
    inside = (str(Path(torch.__file__).parent), __file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(inside)]
    return frames[-1]
