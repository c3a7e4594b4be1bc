"""A stand-in for the GPU, on which CUDA graphs can be tested where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from samopt.passes.cuda_graphs import Buffer, Call, Captured


class Recording(TorchDispatchMode):
    """The operators of what runs inside, with the memory they read, as a CUDA graph has its kernels.

    Of a tensor from outside its memory is kept, not the tensor: what is written there later a replay reads, and one
    that takes its place a replay does not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any]] = []
        self._slots: dict[int, tuple[Tensor, int]] = {}  # by id: a tensor, kept so that its id stays its own
        self._outside: dict[int, Tensor] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or compiled code would not run in it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_map(self._slot, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._steps.append((func, inputs, tree_map(self._new_slot, result)))
        return result

    def replay(self, answer: Tensor) -> Tensor:
        """What the recorded tensor `answer` is now."""
        values: dict[Slot, Any] = {Slot(number): memory for number, memory in self._outside.items()}
        for func, inputs, outputs in self._steps:
            args, kwargs = tree_map(lambda part: values[part] if isinstance(part, Slot) else part, inputs)
            results = func(*args, **kwargs)
            values.update(zip(tree_leaves(outputs), tree_leaves(results), strict=True))
        return values[Slot(self._slots[id(answer)][1])]

    def _slot(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if id(part) not in self._slots:
            self._outside[self._new_slot(part).number] = part.detach()
        return Slot(self._slots[id(part)][1])

    def _new_slot(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        _, number = self._slots.setdefault(id(part), (part, len(self._slots)))
        return Slot(number)


@dataclass(frozen=True)
class Slot:
    """Where a replay puts a tensor."""

    number: int


class StandIn:
    """A GPU's part: a graph of it runs the operators it saw at its capture, and writes every answer into one buffer, as
    a CUDA graph does.

    Attributes:
        captured: the batch size of each capture, of its first input.
        dtypes: what each capture's first input is kept in.
        replays: how often a graph ran.
        waits: how often a graph was thrown away alone.
        resets: how often all graphs were thrown away.
        refuses: whether nothing can be captured now.
    """

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.replays = self.waits = self.resets = 0
        self.refuses = False
        self._turn = False
        self._next = threading.Event()

    def takes(self, given: Tensor) -> bool:
        return not self.refuses

    def capture(self, call: Call, inputs: tuple[Buffer, ...]) -> Captured:
        given = tuple(buffer.tensor for buffer in inputs)
        self.captured.append(len(given[0]))
        self.dtypes.append(given[0].dtype)
        call(*given)  # compiles, which is no part of a graph
        with Recording() as recording:
            answers = call(*given)
        outputs = tuple(Buffer.of(answer, answer.dtype) for answer in answers)
        for output in outputs:
            output.memory.fill_(torch.nan)

        def run() -> None:
            assert self._turn, "a graph runs in its turn"
            self._next.wait(0.002)  # lets other threads in, if nothing keeps them out
            self.replays += 1
            for output, answer in zip(outputs, answers, strict=True):
                output.fill(recording.replay(answer))

        return Captured(inputs, tuple(output.tensor for output in outputs), run)

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        assert not self._turn, "one at a time"
        self._turn = True
        yield
        self._turn = False

    def wait(self) -> None:
        self.waits += 1

    def reset(self) -> None:
        self.resets += 1
