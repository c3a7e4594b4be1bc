"""SIGTERM and Ctrl-C end a run after the shards at hand; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Whether a run is to end, and which signal says so."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return self.signal != 0


@contextmanager
def stopping_on_signals(tell: Callable[[str], None]) -> Iterator[Stop]:
    """What SIGTERM and SIGINT set, once each; then they do what they did before. Elsewhere than in the main thread, to
    which Python gives signals, nothing sets it."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {}

    def asked(number: int, _: FrameType | None) -> None:
        stop.signal = number
        signal.signal(number, before[number])
        tell(f"{signal.Signals(number).name}: finishing the shard at hand; once more ends at once")

    try:
        for ends in (signal.SIGINT, signal.SIGTERM):
            before[ends] = signal.signal(ends, asked)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
