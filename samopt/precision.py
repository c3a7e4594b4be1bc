"""TF32 in cuDNN's convolutions, switched for a while: PyTorch allows it unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32_convolutions(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 in convolutions of float32. What was set before, by either of PyTorch's two interfaces,
    is put back."""
    owner, name, value = _switch(allowed)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _switch(allowed: bool) -> tuple[Any, str, bool | str]:
    """What to set, and to which value: of the interface that was used before, as PyTorch refuses a mix of the two."""
    cudnn: Any = torch.backends.cudnn
    try:
        _ = cudnn.allow_tf32
    except RuntimeError:
        return cudnn.conv, "fp32_precision", "tf32" if allowed else "ieee"
    return cudnn, "allow_tf32", allowed
