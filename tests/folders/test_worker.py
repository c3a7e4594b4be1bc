"""Memory that runs out, on a device that says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam

import samopt.folders.run
from samopt import BatchPredictor, SamoptError
from samopt.folders.reading import Picture
from samopt.folders.run import segment
from samopt.folders.tasks import EveryMask
from samopt.folders.worker import Worker, halving, out_of_memory
from tests.folders.images import OPTIONS, plain_folder, shards_of


class Small(EveryMask):
    """Has memory for so many images, and so many prompts, at once."""

    images, points = 1, 4

    def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        if batch_size > self.images or prompts > self.points:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return super().launch(pictures, batch_size, prompts)


def test_batches_are_halved_and_the_summary_says_so(sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain_folder(tmp_path / "in", 9)
    segment(sam, folder, tmp_path / "whole", generator=OPTIONS, batch_size=4, shard_size=6)
    monkeypatch.setattr(samopt.folders.engine, "EveryMask", Small)
    summary = segment(sam, folder, tmp_path / "out", generator=OPTIONS, batch_size=4, shard_size=6)
    assert (summary.done, summary.failed, summary.halved, summary.exit_code) == (9, 0, (0, 1), 0)
    assert "out of memory: shards 0, 1 were made in smaller batches" in str(summary)
    assert shards_of(tmp_path / "out").keys() == shards_of(tmp_path / "whole").keys()


def test_an_image_for_which_there_is_no_memory_at_all_is_recorded(
    sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_folder(tmp_path / "in", 2)
    monkeypatch.setattr(samopt.folders.engine, "EveryMask", Small)
    monkeypatch.setattr(Small, "images", 0)
    summary = segment(sam, folder, tmp_path / "out", generator=OPTIONS)
    assert (summary.done, summary.failed) == (0, 2)
    assert [error for _, error in summary.failures] == ["out of memory, even alone"] * 2


def test_other_errors_end_the_run_and_leave_what_is_done(
    sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = plain_folder(tmp_path / "in", 6), tmp_path / "out"
    calls = 0

    def breaks(self: EveryMask, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a bug")
        return original(self, pictures, batch_size, prompts)

    original = EveryMask.launch
    monkeypatch.setattr(EveryMask, "launch", breaks)
    with pytest.raises(RuntimeError, match="a bug"):
        segment(sam, folder, out, generator=OPTIONS, batch_size=2, shard_size=2)
    assert shards_of(out).keys() <= {"000000.parquet", "000001.parquet"}
    assert segment(sam, folder, out, generator=OPTIONS).left == 0


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = plain_folder(tmp_path / "in", 4), tmp_path / "out"

    def full(path: Path, records: Any, notes: Any) -> None:
        raise OSError(28, "No space left on device")

    write = EveryMask.write
    monkeypatch.setattr(EveryMask, "write", staticmethod(full))
    with pytest.raises(SamoptError, match=r"cannot be written \(No space left"):
        segment(sam, folder, out, generator=OPTIONS, shard_size=2)
    monkeypatch.setattr(EveryMask, "write", staticmethod(write))
    assert not shards_of(out)
    assert segment(sam, folder, out, generator=OPTIONS).done == 4


def test_what_the_upscaling_lacks_memory_for_is_done_in_pieces() -> None:
    tried = []

    def split(size: int) -> int:
        tried.append(size)
        if size > 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        return size

    assert halving(split, 9) == 2
    assert tried == [9, 4, 2]
    with pytest.raises(RuntimeError):
        halving(lambda size: split(3), 2)


def test_what_counts_as_out_of_memory() -> None:
    assert out_of_memory(torch.OutOfMemoryError())
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shape mismatch"))


def test_pictures_that_cannot_be_read_do_not_reach_the_model(sam: Sam) -> None:
    class Never(EveryMask):
        def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
            raise AssertionError

    worker = Worker(sam, Never(sam, OPTIONS), 4, 16)
    (record,) = worker.finish(worker.launch([Picture(3, "a.png", error="why")]))
    assert (record.index, record.error, record.masks) == (3, "why", [])


def test_batches_of_a_fixed_number_of_prompts_answer_the_same(sam: Sam, pictures: list[samopt.Sample]) -> None:
    boxes = torch.tensor([[2.0, 2, 20, 20], [5, 5, 30, 30], [0, 0, 39, 30]])
    answers = []
    for size in (None, 2):
        predictor = BatchPredictor(sam, prompts_per_batch=size)
        predictor.set_images([picture.image for picture in pictures])
        answers.append(predictor.predict([samopt.Prompts(boxes=boxes)] * 2))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one.iou_predictions, other.iou_predictions)
