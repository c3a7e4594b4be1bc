"""The embedded model: a small trained Sam of Meta's own classes, and the procedural scenes it was trained on.

Importing this package is cheap; the names below are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import load_tiny
    from .scenes import Scene, draw_scene

__all__ = ["Scene", "draw_scene", "load_tiny"]

_HOME = {"Scene": "scenes", "draw_scene": "scenes", "load_tiny": "model"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
