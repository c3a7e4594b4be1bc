"""Shards through reading, the model, and writing, all at the same time.

Threads read images ahead; the calling thread queues the model's work; one thread makes records of what the model
found, and another writes finished shards. Each hands over a few pieces at most, so memory does not grow.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from samopt.errors import SamoptError
from samopt.folders.job import Shard
from samopt.folders.reading import Picture, read_picture
from samopt.folders.records import printable
from samopt.folders.worker import Launched, Worker

AHEAD = 3  # batches read before they are needed
BETWEEN = 2  # batches, or shards, that wait for the next thread


@dataclass(frozen=True)
class Batch:
    """Some consecutive images of a shard."""

    shard: Shard
    start: int
    images: tuple[str, ...]

    @property
    def last(self) -> bool:
        """Whether the shard ends with it."""
        return self.start + len(self.images) == len(self.shard.images)


class Pipeline:
    """Runs a worker on shards.

    Args:
        worker: what is done to a batch.
        batch_size: images in a batch, whatever smaller pieces the worker makes of it.
        notes: what every shard's notes hold.
        readers: threads that read images; None for one per processor, up to 16.
    """

    def __init__(self, worker: Worker, batch_size: int, notes: dict[str, Any], readers: int | None = None) -> None:
        self._worker, self._batch_size, self._notes = worker, batch_size, notes
        self._readers = readers or min(16, os.cpu_count() or 1)
        self.stages = Stages()

    def run(
        self,
        shards: Iterable[Shard],
        stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[int], None] = lambda count: None,
        written: Callable[[Shard], None] = lambda shard: None,
    ) -> None:
        """Does shards, one after the other.

        Args:
            shards: which.
            stopped: asked before each shard; those begun are finished.
            tell: called with a number of images whenever some are done.
            written: called with each shard, in the thread that writes, once its file is there.
        """
        with ThreadPoolExecutor(self._readers) as pool, Stage() as write, Stage() as finish:
            done = _Records(self._worker, self._notes, self.stages, write, tell, written)
            read = self._read_ahead(pool, shards)
            try:
                for batch, pictures in read:
                    if batch.start == 0 and stopped():
                        break
                    with self.stages.timed("reading"):
                        found = [picture.result() for picture in pictures]
                    with self.stages.timed("model"):
                        launched = self._worker.launch(found)
                    finish.submit(done.add, batch, launched)
                finish.wait()
                write.wait()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(
        self, pool: ThreadPoolExecutor, shards: Iterable[Shard]
    ) -> Iterator[tuple[Batch, list[Future[Picture]]]]:
        """Batches in order, with the pictures that are being read for them and those after them."""
        waiting: deque[tuple[Batch, list[Future[Picture]]]] = deque()
        model, whole = self._worker.model, self._worker.task.whole
        for batch in self._batches(shards):
            first = batch.shard.first + batch.start
            futures = [
                pool.submit(read_picture, first + offset, path, model, whole=whole)
                for offset, path in enumerate(batch.images)
            ]
            waiting.append((batch, futures))
            if len(waiting) > AHEAD:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()

    def _batches(self, shards: Iterable[Shard]) -> Iterator[Batch]:
        for shard in shards:
            for start in range(0, len(shard.images), self._batch_size):
                yield Batch(shard, start, shard.images[start : start + self._batch_size])


class Stages:
    """Seconds that the threads spent on each stage: one waiting for images that are being read, and queueing the
    model's work; one waiting for the model, and making records; one writing. They run at the same time, so the one that
    takes nearly as long as the whole run is what the others wait for."""

    def __init__(self) -> None:
        self.seconds = {"reading": 0.0, "model": 0.0, "records": 0.0, "writing": 0.0}
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts the time in a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += time.perf_counter() - began


class _Records:
    """Collects the records of a shard and has it written."""

    def __init__(
        self,
        worker: Worker,
        notes: dict[str, Any],
        stages: Stages,
        write: Stage,
        tell: Callable[[int], None],
        written: Callable[[Shard], None],
    ) -> None:
        self._worker, self._notes, self._stages, self._write = worker, notes, stages, write
        self._tell, self._written = tell, written
        self._records: list[Any] = []
        self._sizes: list[tuple[int, int]] = []

    def add(self, batch: Batch, launched: Launched) -> None:
        """Finishes a batch; with the last one of a shard, hands the shard on."""
        if launched.ready is not None:
            with self._stages.timed("model"):
                launched.ready.synchronize()
        with self._stages.timed("records"):
            self._records += self._worker.finish(launched)
        self._sizes.append(launched.sizes)
        self._tell(len(batch.images))
        if batch.last:
            images, prompts = (min(sizes) for sizes in zip(*self._sizes, strict=True))
            notes = {
                **self._notes,
                "shard": batch.shard.number,
                "images": len(self._records),
                "failed": [
                    {"image": printable(record.path), "error": record.error} for record in self._records if record.error
                ],
                "batch_size": images,
                "prompts_per_batch": prompts,
            }
            self._write.submit(self._save, batch.shard, self._records, notes)
            self._records, self._sizes = [], []

    def _save(self, shard: Shard, records: list[Any], notes: dict[str, Any]) -> None:
        try:
            with self._stages.timed("writing"):
                self._worker.task.write(shard.path, records, notes)
        except OSError as error:
            remedy = "make room, and run the same again: it goes on with this shard"
            raise SamoptError(f"{shard.path}: it cannot be written ({error.strerror}); {remedy}") from error
        self._written(shard)


class Stage:
    """A thread that does what it is handed, in order. Who hands it more than a few pieces waits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Hands a call over; raises what an earlier one raised."""
        while len(self._pending) >= BETWEEN:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(function, *args))

    def wait(self) -> None:
        """Until all is done; raises what a call raised."""
        while self._pending:
            self._pending.popleft().result()
