"""A stand-in for the GPU, on which CUDA graphs can be tested where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from samopt.passes.cuda_graphs import Captured


class StandIn:
    """A GPU's part: a graph of it writes every answer into one buffer, as a CUDA graph does.

    Attributes:
        captured: the batch size of each capture.
        replays: how often a graph ran.
        resets: how often the graphs were thrown away.
        refuses: whether nothing can be captured now.
    """

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replays = self.resets = 0
        self.refuses = False
        self._turn = False
        self._next = threading.Event()

    def takes(self, pixels: Tensor) -> bool:
        return not self.refuses

    def capture(self, call: Callable[[Tensor], Tensor], pixels: Tensor) -> Captured:
        self.captured.append(len(pixels))
        buffer = pixels.clone()
        features = torch.full_like(call(buffer), torch.nan)

        def run() -> None:
            assert self._turn, "a graph runs in its turn"
            self._next.wait(0.002)  # lets other threads in, if nothing keeps them out
            self.replays += 1
            features.copy_(call(buffer))

        return Captured(buffer, features, run)

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        assert not self._turn, "one at a time"
        self._turn = True
        yield
        self._turn = False

    def reset(self) -> None:
        self.resets += 1
