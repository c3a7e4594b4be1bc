"""Which model this is: a checksum of its weights, that of the unmodified model where samopt optimised it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samopt.report import ATTRIBUTE, Report

_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str]] = weakref.WeakKeyDictionary()


def fingerprint(model: nn.Module) -> str:
    """A checksum of a model's weights.

    Of a model that `optimize` made, and whose weights are still those it made, it is the unmodified model's: what
    passes change is for them to say, and embeddings of one serve the other.

    Args:
        model: a Sam, on any device.

    Returns:
        SHA-256 over names, dtypes, shapes and values of its state_dict, 64 hexadecimal digits; "" on the meta device.
    """
    own = weights_digest(model)
    found = vars(model).get(ATTRIBUTE)
    if isinstance(found, Report) and found.result_digest == own:
        return found.model_digest
    return own


def weights_digest(model: nn.Module) -> str:
    """`fingerprint` of the weights as they are; computed anew only where they have changed."""
    state = model.state_dict(keep_vars=True)
    if any(tensor.is_meta for tensor in state.values()):
        return ""
    version = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in state.items())
    before, digest = _known.get(model, (None, ""))
    if before != version:
        digest = _digest(state)
        _known[model] = version, digest
    return digest


def _digest(state: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        for part, values in _plain(name, tensor.detach()):
            total.update(f"{part} {values.dtype} {list(values.shape)}\n".encode())
            total.update(values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that one consists of, itself or, where it is of a subclass, those inside."""
    if hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{inner}", getattr(tensor, inner))
    else:
        yield name, tensor.data


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
