"""The image encoder as CUDA graphs: its hundreds of kernel launches become one.

A graph is the kernels of one call with the addresses they read and wrote. So each kind of batch has a graph, and each
graph a buffer that its input is copied to; all write into one pool of memory, so that they may only run in turn, and
what one returned is copied out before the next; and where a weight is no longer at its address, all are captured anew.
Values written into the weights in place, as `load_state_dict` does, are seen by the next replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from samopt.errors import SamoptError, first_line
from samopt.passes.parts import Parts

WARM_UPS = 2  # the first call compiles and tunes kernels, the second allocates as every later one will

_CAPTURING = threading.Lock()  # one at a time in a process, as PyTorch wants it


@dataclass(frozen=True)
class Captured:
    """One graph: fill `pixels`, call `run`, read `features`.

    Attributes:
        pixels: the buffer it reads.
        features: the buffer it writes.
        run: replays it on the current stream.
    """

    pixels: Tensor
    features: Tensor
    run: Callable[[], None]


class Device(Protocol):
    """What the graphs need of a GPU."""

    def takes(self, pixels: Tensor) -> bool:
        """Whether work on `pixels` can be captured now."""

    def capture(self, call: Callable[[Tensor], Tensor], buffer: Tensor) -> Captured:
        """Captures `call` on `buffer`, which is the graph's own from then on."""

    def turn(self, device: torch.device) -> AbstractContextManager[None]:
        """What is done inside happens on the GPU after all that was done inside before, whatever the streams."""

    def reset(self) -> None:
        """Waits for what was done in a turn, so that the graphs can go."""


class CudaGraphs:
    """The CUDA graphs of one encoder. Threads may share them, and call from streams of their own."""

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device or Cuda()
        self._lock = threading.Lock()
        self._graphs: dict[Any, Captured] = {}
        self._parts: Parts | None = None
        self._addresses: list[int] = []

    def may_stand_for(self, pixels: Tensor, parts: Parts) -> bool:
        """Whether a graph may stand for the call on `pixels`: it leaves no gradients, and cannot be had everywhere."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (pixels, *parts.tensors())):
            return False
        return self._device.takes(pixels)

    def replay(
        self, pixels: Tensor, count: int, parts: Parts, call: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Returns the first `count` of `call(pixels)`, as a tensor that no later replay overwrites.

        Args:
            pixels: [B, 3, H, W], contiguous. Another shape, device, grad mode or global setting than before, or another
                `dtype`, is captured first.
            count: of images, up to B.
            parts: of the encoder that `call` runs.
            call: captured where it was not; it may compile.
            dtype: what `call` casts pixels to before anything else, or theirs: it is cast on the way into the graph.

        Raises:
            SamoptError: `call` does something that cannot be captured.
        """
        key = (pixels.shape, dtype, pixels.device, *_modes())
        with self._lock:
            self._forget_if_moved(parts)
            if (graph := self._graphs.get(key)) is None:
                graph = self._graphs[key] = self._device.capture(call, pixels.to(dtype, copy=True))
            with self._device.turn(pixels.device):
                graph.pixels.copy_(pixels)
                graph.run()
                return graph.features[:count].clone()

    def _forget_if_moved(self, parts: Parts) -> None:
        addresses = parts.addresses()
        if parts is not self._parts or addresses != self._addresses:
            self._device.reset()
            self._graphs.clear()
            self._parts, self._addresses = parts, addresses


def _modes() -> tuple[Any, ...]:
    """The settings on which it depends what kernels a call launches, and what kind of tensor it returns.

    The precisions follow both of PyTorch's interfaces; its older getters raise where the newer one was used.
    """
    cudnn: Any = torch.backends.cudnn  # replaced at import by an object with more than its module has
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )


class Cuda:
    """Capture and order of work on a GPU, through PyTorch."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def takes(self, pixels: Tensor) -> bool:
        """Not on another device, not inside the caller's own capture, and not under autocast, whose cached copies of
        weights are gone when it ends."""
        if not pixels.is_cuda or torch.is_autocast_enabled("cuda"):
            return False
        return not torch.cuda.is_current_stream_capturing()

    def capture(self, call: Callable[[Tensor], Tensor], buffer: Tensor) -> Captured:
        """Calls it a few times on a side stream, for what happens only once, and captures it there."""
        # One lock over both, as what is done only once may wait for the whole GPU, which breaks a capture.
        with _CAPTURING, torch.cuda.device(buffer.device):
            if self._side is None:
                self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    call(buffer)
                features = self._record(graph, call, buffer)
            current.wait_stream(self._side)
        return Captured(buffer, features, graph.replay)

    def _record(self, graph: torch.cuda.CUDAGraph, call: Callable[[Tensor], Tensor], buffer: Tensor) -> Tensor:
        try:
            # "thread_local": what other threads do on the GPU meanwhile is neither captured nor an error.
            with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                return call(buffer)
        except RuntimeError as error:
            raise SamoptError(
                f"the image encoder cannot be captured as a CUDA graph: {first_line(error)}; leave cuda_graphs out, "
                "or, if the cause is that position tables are indexed at every call, apply HoistRelPos before Compile"
            ) from error

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Waits, on the current stream, for the last turn's work, on whatever stream that was."""
        stream = torch.cuda.current_stream(device)
        if self._done is None:
            self._done = torch.cuda.Event()
        else:
            stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)

    def reset(self) -> None:
        """Waits for the last turn; the next capture starts another pool, on the device that the weights are on then."""
        if self._done is not None:
            self._done.synchronize()
        self._pool = self._side = self._done = None
