"""What is done to a batch of pictures: the model's part, and what is made of it afterwards.

The first part queues work on the device and waits for as little as it can; the second, in a thread and on a CUDA
stream of its own, waits for results while the model goes on with the next batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from samopt.errors import first_line
from samopt.folders.reading import Picture


class Task(Protocol):
    """What is to be found out about pictures: `samopt.folders.tasks` has them."""

    whole: bool  # it takes pictures at their own size
    suffix: str  # of a shard's file

    def wants(self, picture: Picture) -> bool:
        """Whether the model is needed for a picture."""

    def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        """The model's part for at most `batch_size` pictures, with `prompts` decoded together: a result for each,
        tensors on the device in it."""

    def finish(self, picture: Picture, result: Any) -> Any:
        """Makes the record of a picture that the model has seen."""

    def record(self, picture: Picture) -> Any:
        """The record of a picture that the model has not seen, with its error if it has one."""

    def write(self, path: Path, records: Sequence[Any], notes: dict[str, Any]) -> None:
        """Writes a shard, at once or not at all."""


@dataclass
class Launched:
    """What the model made of a batch.

    Attributes:
        results: a picture each, with its result, or with None where there is none.
        ready: when it is there.
        sizes: the batch sizes, images and prompts, that it was made with.
    """

    results: list[tuple[Picture, Any]]
    ready: torch.cuda.Event | None
    sizes: tuple[int, int]


class Worker:
    """Runs a task on batches, with smaller ones where memory runs out.

    Args:
        model: a Sam, on its device.
        task: what to do.
        batch_size: pictures encoded together.
        prompts: prompts decoded together.
    """

    def __init__(self, model: nn.Module, task: Task, batch_size: int, prompts: int) -> None:
        self.model, self.task = model, task
        self.batch_size, self.prompts = batch_size, prompts
        self.device = torch.device(str(model.device))
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def launch(self, pictures: Sequence[Picture]) -> Launched:
        """The model's part of a batch; queued on the device, not finished."""
        results: list[tuple[Picture, Any]] = []
        waiting = []
        for picture in pictures:
            if picture.error or not self.task.wants(picture):
                results.append((picture, None))
            else:
                waiting.append(picture)
        with torch.cuda.device(self.device) if self._side else contextlib.nullcontext():
            while waiting:
                some = waiting[: self.batch_size]
                batch_size, prompts = self.batch_size, self.prompts
                try:
                    found: list[Any] | str = self.task.launch(some, batch_size, prompts)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    found = first_line(error)
                # Outside of the handler, so that the error's frames, and the tensors in them, are gone.
                if isinstance(found, str):
                    if self._halve():
                        continue
                    found = [None]
                    some = [Picture(some[0].index, some[0].path, some[0].size, error="out of memory, even alone")]
                results += zip(some, found, strict=True)
                waiting = waiting[len(some) :]
            ready = torch.cuda.Event() if self._side else None
            if ready is not None:
                ready.record()
        return Launched(results, ready, (self.batch_size, self.prompts))

    def _halve(self) -> bool:
        """Makes batches smaller, of images first, then of prompts; False where they cannot be."""
        if self._side:
            torch.cuda.empty_cache()
        if self.batch_size > 1:
            self.batch_size //= 2
        elif self.prompts > 1:
            self.prompts //= 2
        else:
            return False
        return True

    @torch.no_grad()
    def finish(self, launched: Launched) -> list[Any]:
        """The records of a batch, in the order of its images."""
        with self._beside(launched):
            records = [self._finish(picture, result) for picture, result in launched.results]
        return sorted(records, key=lambda record: record.index)

    def _finish(self, picture: Picture, result: Any) -> Any:
        if result is None:
            return self.task.record(picture)
        try:
            return self.task.finish(picture, result)
        except Exception as error:
            if not out_of_memory(error):
                raise
        return self.task.record(Picture(picture.index, picture.path, picture.size, error="out of memory, even alone"))

    @contextlib.contextmanager
    def _beside(self, launched: Launched) -> Iterator[None]:
        """On the second stream, once the results are there."""
        if self._side is None or launched.ready is None:
            yield
            return
        with torch.cuda.stream(self._side):
            self._side.wait_event(launched.ready)
            yield
            self._side.synchronize()  # before the tensors are let go, which belong to the first stream


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory left, of a GPU or a host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def halving(split: Callable[[int], Any], size: int) -> Any:
    """Calls `split` with a number of things to do at once, and with half of it where memory runs out, down to one."""
    while True:
        try:
            return split(size)
        except Exception as error:
            if not out_of_memory(error) or size == 1:
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size //= 2
