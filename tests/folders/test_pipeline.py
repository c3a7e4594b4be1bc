"""The pipeline itself: what is read ahead, where a run ends, and what its threads raise."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from segment_anything.modeling import Sam

from samopt.folders import pipeline
from samopt.folders.job import Shard
from samopt.folders.pipeline import AHEAD, BETWEEN, Pipeline, Stage
from samopt.folders.reading import Picture, read_picture
from samopt.folders.tasks import EveryMask
from samopt.folders.worker import Worker
from tests.folders.images import OPTIONS, plain_folder


def made(sam: Sam, folder: Path, count: int, each: int) -> tuple[Pipeline, list[Shard]]:
    """A pipeline of two images a batch, and shards of a folder of its own."""
    images = sorted(map(str, plain_folder(folder / "in", count * each).iterdir()))
    shards = [
        Shard(number, number * each, tuple(images[number * each : (number + 1) * each]), folder / f"{number}.parquet")
        for number in range(count)
    ]
    return Pipeline(Worker(sam, EveryMask(sam, OPTIONS), 2, 16), 2, {}), shards


def test_a_shard_that_was_begun_is_finished(sam: Sam, tmp_path: Path) -> None:
    run, shards = made(sam, tmp_path, count=4, each=5)
    asked = itertools.count()
    told: list[int] = []
    written: list[Shard] = []
    run.run(shards, lambda: next(asked) >= 2, told.append, written.append)
    assert written == shards[:2]
    assert [shard.path.exists() for shard in shards] == [True, True, False, False]
    assert told == [2, 2, 1, 2, 2, 1]


def test_no_more_is_read_ahead_than_a_few_batches(sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, shards = made(sam, tmp_path, count=5, each=6)
    read, launched, most = 0, 0, 0
    lock, original = threading.Lock(), read_picture

    def counted(*args: Any, **kwargs: Any) -> Picture:
        nonlocal read, most
        with lock:
            read += 1
            most = max(most, read - launched)
        return original(*args, **kwargs)

    class Counting(EveryMask):
        def launch(self, pictures: Any, batch_size: int, prompts: int) -> list[Any]:
            nonlocal launched
            launched += len(pictures)
            return super().launch(pictures, batch_size, prompts)

    monkeypatch.setattr(pipeline, "read_picture", counted)
    run._worker.task = Counting(sam, OPTIONS)
    run.run(shards)
    assert read == launched == 30
    assert most <= 2 * (AHEAD + 1)


def test_who_hands_a_thread_too_much_waits_and_gets_its_errors() -> None:
    go = threading.Event()
    done: list[int] = []

    def wait_and_tell(index: int) -> None:
        assert go.wait(10)
        done.append(index)

    with Stage() as stage:
        for index in range(BETWEEN):
            stage.submit(wait_and_tell, index)
        threading.Timer(0.05, go.set).start()
        stage.submit(done.append, 99)
        assert done[:1] == [0], "the first was waited for"
        stage.wait()
        stage.submit({}.pop, "missing")
        with pytest.raises(KeyError, match="missing"):
            stage.wait()
    assert done == [*range(BETWEEN), 99]
