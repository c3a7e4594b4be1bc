"""Modules as CUDA graphs: their hundreds of kernel launches become one.

A graph is the kernels of one call with the addresses they read and wrote. So each kind of call has a graph, and each
graph buffers that its inputs are copied to; all of a module write into one pool of memory, so that they may only run in
turn, and what one returned is copied out before the next; and where a weight is no longer at its address, all are
captured anew. Values written into the weights in place, as `load_state_dict` does, are seen by the next replay.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from samopt.errors import SamoptError, first_line
from samopt.passes.kernels.devices import GPU_ALONE
from samopt.passes.parts import Parts

Call = Callable[..., tuple[Tensor, ...]]

WARM_UPS = 2  # the first call compiles and tunes kernels, the second allocates as every later one will
MET = 1024  # kinds of calls to remember without a graph


@dataclass(frozen=True)
class Buffer:
    """Memory for an input of a graph.

    Attributes:
        memory: where its values are written, each once.
        tensor: what the graph reads: `memory` with the sizes and strides of the input, which may be expanded.
    """

    memory: Tensor
    tensor: Tensor

    @classmethod
    def of(cls, given: Tensor, dtype: torch.dtype) -> Buffer:
        """A buffer for inputs like `given`, with its values."""
        once = _once(given)
        memory = torch.empty_strided(once.shape, once.stride(), dtype=dtype, device=given.device)
        memory.copy_(once)
        return cls(memory, memory.as_strided(given.shape, given.stride()))

    def fill(self, given: Tensor) -> None:
        """Writes the values of an input."""
        self.memory.copy_(_once(given))


def _once(given: Tensor) -> Tensor:
    """A tensor without what it repeats: one of each dimension of stride 0."""
    for dim, stride in enumerate(given.stride()):
        if stride == 0:
            given = given.narrow(dim, 0, 1)
    return given


def _copied(output: Tensor) -> Tensor:
    """A copy in memory of its own, expanded where `output` is."""
    return _once(output).clone().expand(output.shape)


@dataclass(frozen=True)
class Captured:
    """One graph: fill `inputs`, call `run`, read `outputs`.

    Attributes:
        inputs: the buffers it reads.
        outputs: the buffers it writes.
        run: replays it on the current stream.
    """

    inputs: tuple[Buffer, ...]
    outputs: tuple[Tensor, ...]
    run: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """What it holds besides the weights, and the memory that it shares with others."""
        return sum(tensor.nbytes for tensor in (*(buffer.memory for buffer in self.inputs), *map(_once, self.outputs)))


class Device(Protocol):
    """What the graphs need of a GPU."""

    def takes(self, given: Tensor) -> bool:
        """Whether work on `given` can be captured now."""

    def capture(self, call: Call, inputs: tuple[Buffer, ...]) -> Captured:
        """Captures `call` on buffers, which are the graph's own from then on.

        Raises:
            SamoptError: it does something that cannot be captured, or what another thread did broke the capture.
        """

    def turn(self, device: torch.device) -> AbstractContextManager[None]:
        """What is done inside happens on the GPU after all that was done inside before, whatever the streams."""

    def wait(self) -> None:
        """Waits for what was done in a turn, so that a graph can go."""

    def reset(self) -> None:
        """Waits likewise; all graphs go."""


class CudaGraphs:
    """The CUDA graphs of one module. Threads may share them, and call from streams of their own.

    Args:
        module: what is captured, as warnings call it.
        device: the GPU.
        keep: bytes that graphs may hold in buffers of their own: the one that was not used for longest goes. None keeps
            all.
        at_once: capture the first call of a kind. Otherwise it runs as it is, and only the second is captured: what
            comes once is not worth it.
    """

    def __init__(
        self, module: str, device: Device | None = None, *, keep: int | None = None, at_once: bool = True
    ) -> None:
        self._device: Device = device or Cuda(module)
        self._keep, self._at_once = keep, at_once
        self._lock = threading.Lock()
        self._graphs: OrderedDict[Any, Captured] = OrderedDict()
        self._met: OrderedDict[Any, None] = OrderedDict()  # kinds without a graph, met once
        self._refused: set[Any] = set()  # kinds that cannot be captured
        self._parts: Parts | None = None
        self._addresses: list[int] = []

    def may_stand_for(self, inputs: Sequence[Tensor], parts: Parts) -> bool:
        """Whether a graph may stand for the call on `inputs`: it leaves no gradients, and cannot be had everywhere."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *parts.tensors())):
            return False
        return self._device.takes(inputs[0])

    def replay(
        self,
        call: Call,
        inputs: Sequence[Tensor],
        parts: Parts,
        *,
        kind: Hashable = None,
        dtypes: Sequence[torch.dtype] | None = None,
        count: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns what `call(*inputs)` does, as tensors that no later replay overwrites.

        A kind of call that cannot be captured runs without, with a warning.

        Args:
            call: captured where it was not; it may compile.
            inputs: tensors of one device. Other shapes, strides, dtypes or device than before, or another grad mode or
                global setting, is another kind of call.
            parts: of the module that `call` runs.
            kind: what else `call` depends on.
            dtypes: what `call` casts the inputs to before anything else: they are cast on the way into the graph. None
                leaves them as they are.
            count: cuts the outputs to their first `count`; None leaves them whole.
        """
        inside = dtypes or [given.dtype for given in inputs]
        alike = tuple((given.shape, given.stride(), dtype) for given, dtype in zip(inputs, inside, strict=True))
        key = (kind, alike, inputs[0].device, *_modes())
        with self._lock:
            self._forget_if_moved(parts)
            if (graph := self._graph(key, call, inputs, inside)) is not None:
                with self._device.turn(inputs[0].device):
                    for buffer, given in zip(graph.inputs, inputs, strict=True):
                        buffer.fill(given)
                    graph.run()
                    return tuple(_copied(output[:count]) for output in graph.outputs)
        outputs = call(*inputs)
        return tuple(output if count in (None, len(output)) else _copied(output[:count]) for output in outputs)

    def _graph(self, key: Any, call: Call, inputs: Sequence[Tensor], inside: Sequence[torch.dtype]) -> Captured | None:
        """The graph of a kind of call, captured now if it is to have one and has none."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if key in self._refused or not self._comes_again(key):
            return None
        try:
            graph = self._device.capture(call, tuple(map(Buffer.of, inputs, inside)))
        except SamoptError as error:
            warnings.warn(str(error), stacklevel=2)
            self._refused.add(key)
            return None
        self._graphs[key] = graph
        self._make_room()
        return graph

    def _comes_again(self, key: Any) -> bool:
        """Whether a kind of call was met before, where that is asked for."""
        if self._at_once or key in self._met:
            self._met.pop(key, None)
            return True
        self._met[key] = None
        if len(self._met) > MET:
            self._met.popitem(last=False)
        return False

    def _make_room(self) -> None:
        while self._keep is not None and len(self._graphs) > 1 and self._nbytes() > self._keep:
            self._device.wait()
            self._graphs.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs.values())

    def _forget_if_moved(self, parts: Parts) -> None:
        addresses = parts.addresses()
        if parts is not self._parts or addresses != self._addresses:
            self._device.reset()
            self._graphs.clear()
            self._refused.clear()
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
    """Capture and order of work on a GPU, through PyTorch.

    Args:
        module: what is captured, as errors call it.

    Attributes:
        pooled: bytes of each GPU that graphs have for what lies between their inputs and outputs.
    """

    everywhere: ClassVar[weakref.WeakSet[Cuda]] = weakref.WeakSet()  # those that are in use

    def __init__(self, module: str) -> None:
        self._module = module
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self.pooled: Counter[int] = Counter()
        self.everywhere.add(self)

    def takes(self, given: Tensor) -> bool:
        """Not on another device, not inside the caller's own capture, and not under autocast, whose cached copies of
        weights are gone when it ends."""
        if not given.is_cuda or torch.is_autocast_enabled("cuda"):
            return False
        return not torch.cuda.is_current_stream_capturing()

    def capture(self, call: Call, inputs: tuple[Buffer, ...]) -> Captured:
        """Calls it a few times on a side stream, for what happens only once, and captures it there."""
        # One lock over both, as what is done only once may wait for the whole GPU, which breaks another's capture.
        given = tuple(buffer.tensor for buffer in inputs)
        with GPU_ALONE, torch.cuda.device(given[0].device):
            if self._side is None:
                self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    call(*given)
                outputs = self._record(graph, call, given)
            current.wait_stream(self._side)
        return Captured(inputs, outputs, graph.replay)

    def _record(self, graph: torch.cuda.CUDAGraph, call: Call, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = torch.cuda.memory_reserved()
        try:
            # "thread_local": what other threads do on the GPU meanwhile is not captured, and few things are an error.
            with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                outputs = call(*given)
        except RuntimeError as error:
            self._pool = self._side = None  # which a broken capture may leave unusable; other graphs keep theirs
            raise SamoptError(
                f"{self._module} runs without a CUDA graph, as it cannot be captured: {first_line(error)}; if position "
                "tables are indexed at every call, apply HoistRelPos before Compile"
            ) from error
        self.pooled[torch.cuda.current_device()] += max(torch.cuda.memory_reserved() - before, 0)
        return outputs

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

    def wait(self) -> None:
        """Waits for the last turn."""
        if self._done is not None:
            self._done.synchronize()

    def reset(self) -> None:
        """Waits for the last turn; the next capture starts another pool, on the device that the weights are on then."""
        self.wait()
        self.pooled.clear()
        self._pool = self._side = self._done = None


def pooled_bytes(device: torch.device) -> int:
    """Memory of a GPU that CUDA graphs hold, which is no other's to use though PyTorch counts most of it as free.

    It is counted at captures, for callers that ask at every call; `samopt.memory.kept_by_graphs` asks PyTorch for a
    list of all memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(cuda.pooled[index] for cuda in list(Cuda.everywhere))
