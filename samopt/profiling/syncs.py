"""Finds, without a GPU, where a model would make the host wait for one.

Tensors are fake: they have shapes and a device, "cuda", but no values, so a build of torch with CUDA suffices. Every
operation on them is looked at, and those that need a value on the host, or memory of the host on the GPU, are recorded
with the line of Python that asked.

    with record_syncs() as syncs:
        encoder = on_fake_cuda(sam.image_encoder)
        encoder(fake_cuda(torch.zeros(1, 3, 1024, 1024)))
    assert not syncs

What an operator of torch or samopt does inside is taken as known: the operators that wait are listed here.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_TO_HOST = {  # operators that wait for a value, and what users call them
    "_local_scalar_dense": "item",
    "_unique2": "unique",
    **{name: name for name in ("bincount", "equal", "masked_select", "nonzero", "unique_consecutive", "unique_dim")},
}
_INSIDE = (str(Path(torch.__file__).parent) + os.sep, __file__)

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Sync:
    """One operation that makes the host wait for the GPU.

    Attributes:
        reason: what it does.
        file: where, the innermost frame outside of torch.
        line: the line there.
        function: in which function.
        code: that line's text.
        stage: of the call, where it has named ones; "" otherwise.
    """

    reason: str
    file: str
    line: int
    function: str
    code: str
    stage: str = ""

    @property
    def place(self) -> str:
        """File, as it is imported, and line."""
        return f"{as_imported(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}: {self.reason}: {self.code}"


@contextmanager
def record_syncs(stage: Callable[[], str] = str) -> Iterator[list[Sync]]:
    """Runs its block on fake tensors and fills the list it yields. `on_fake_cuda` and `fake_cuda` work inside it.

    Tensors of the host made inside, from an array for one, are taken as they are; `Tensor.numpy` gives zeros.

    Args:
        stage: says what stage the call is in.
    """
    syncs: list[Sync] = []
    # A ShapeEnv, so that sizes that depend on values are symbols and do not end the block at the first sync.
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fake, _Recorder(syncs, stage), _ArraysOfZeros():
        yield syncs


def fake_cuda(tensor: Tensor) -> Tensor:
    """A fake tensor on the GPU like `tensor`."""
    mode = active_fake_mode()
    assert mode is not None, "only inside record_syncs()"
    with _disable_current_modes():
        meta = tensor.detach().to("meta")
    return FakeTensor(mode, meta, torch.device("cuda"))


def on_fake_cuda(model: M) -> M:
    """A copy of `model` with fake parameters and buffers on the GPU. What was compiled is not, in the copy."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_cuda(parameter), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_cuda(buffer)
    return copy.deepcopy(model, memo)


class _Recorder(TorchDispatchMode):
    def __init__(self, syncs: list[Sync], stage: Callable[[], str]) -> None:
        super().__init__()
        self.syncs, self.stage = syncs, stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reason := _why_sync(func, args, kwargs):
            frame = _caller()
            place = frame.filename, frame.lineno or 0, frame.name, frame.line or ""
            self.syncs.append(Sync(reason, *place, self.stage()))
        return func(*args, **kwargs)


class _ArraysOfZeros(TorchFunctionMode):
    """`numpy()` of a fake tensor, which has no values to give, gives zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            with _disable_current_modes():
                return torch.zeros(args[0].shape, dtype=args[0].dtype).numpy()
        return func(*args, **(kwargs or {}))


def _why_sync(func: Any, args: Any, kwargs: Any) -> str | None:
    name = func._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.is_cuda for tensor in tensors) and _to_device(kwargs) != "cuda":
        return None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return _why_index_sync(name, args)
    if name in _TO_HOST:
        return f"{_TO_HOST[name]} brings a value to the host"
    if name == "repeat_interleave" and "output_size" not in kwargs:
        return "repeat_interleave brings the size of its result to the host"
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
    """The innermost frame outside of torch and of this file."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_INSIDE)]
    return frames[-1]


def as_imported(file: str) -> str:
    """A file's path from where Python found its package: "segment_anything/modeling/sam.py"."""
    roots = [root for root in map(os.path.realpath, sys.path) if file.startswith(root + os.sep)]
    return os.path.relpath(file, max(roots, key=len)) if roots else file
