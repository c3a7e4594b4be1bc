"""What became of the images of an output folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samopt.folders import embeddings, records
from samopt.folders.job import Job, Shard

SHOWN = 5


@dataclass(frozen=True)
class Summary:
    """What became of the images.

    Attributes:
        folder: with the results.
        done: images that this run has results of.
        failed: images that it has none of, and says why.
        skipped: images that an earlier run was done with.
        left: images that are to be done yet, as a signal ended the run.
        failures: all images without results in the folder, and why.
        halved: the shards that were made in smaller batches than the others as memory ran out: made again, they may
            round differently.
        seconds: of this run, without optimising the model.
        images_per_second: of this run, from the end of its first batch on, which compiles; 0 where there was no other.
        stages: seconds that each stage took, at the same time as the others, see `samopt.folders.pipeline.Stages`;
            empty with Ray.
        signal: the number of the signal that ended the run; 0 where none did.
    """

    folder: Path
    done: int
    failed: int
    skipped: int
    left: int
    failures: tuple[tuple[str, str], ...]
    halved: tuple[int, ...]
    seconds: float
    images_per_second: float
    stages: dict[str, float]
    signal: int

    @property
    def exit_code(self) -> int:
        """0: there are results of all images; 1: of some there are none; 128 + the signal: a signal ended the run."""
        return 128 + self.signal if self.left else int(bool(self.failures))

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "done": self.done,
            "failed": self.failed,
            "skipped": self.skipped,
            "left": self.left,
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "stages_seconds": self.stages,
            "shards_in_smaller_batches": list(self.halved),
            "failures": [{"image": image, "error": error} for image, error in self.failures],
        }

    def __str__(self) -> str:
        lines = [f"{self.done} images done, {self.failed} failed, {self.skipped} skipped as done before"]
        if self.images_per_second:
            lines[0] += f"; {self.images_per_second:.1f} img/s"
        if self.stages and self.done:
            parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages.items())
            lines.append(f"{self.seconds:.1f} s, in which stages that overlap took: {parts}")
        lines += [f"{image}: {error}" for image, error in self.failures[:SHOWN]]
        if len(self.failures) > SHOWN:
            lines.append(f"... and {len(self.failures) - SHOWN} more that failed: {self.folder / 'summary.json'}")
        if self.halved:
            shards = ", ".join(map(str, self.halved[:SHOWN])) + (", ..." if len(self.halved) > SHOWN else "")
            lines.append(f"out of memory: shards {shards} were made in smaller batches, which may round differently")
        if self.left:
            lines.append(f"ended by a signal, {self.left} images are left: the same command goes on with them")
        return "\n".join(lines)


class Pace:
    """How many images are done in a second, once the first are. Called with a number of images that are."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell, self._began = tell, time.perf_counter()
        self._first: float | None = None
        self._last, self._since = 0.0, 0

    def __call__(self, count: int) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        else:
            self._since += count
        self._tell(count)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    @property
    def per_second(self) -> float:
        """Without the first that it was called with; 0 where there were no others."""
        return self._since / (self._last - self._first) if self._first is not None and self._since else 0.0


def summarise(
    job: Job, shards: Iterable[Shard], new: set[int], pace: Pace, stages: dict[str, float], signal: int
) -> Summary:
    """Reads what the shards of a folder say of their images; `new` are the numbers of this run's."""
    seconds = pace.seconds
    read = embeddings.read_notes if job.suffix == embeddings.SUFFIX else records.read_notes
    done = failed = skipped = left = 0
    failures: list[tuple[str, str]] = []
    halved = []
    for shard in shards:
        if not shard.path.exists():
            left += len(shard.images)
            continue
        notes = read(shard.path)
        if shard.number in new:
            failed += len(notes["failed"])
            done += notes["images"] - len(notes["failed"])
        else:
            skipped += notes["images"]
        failures += [(entry["image"], entry["error"]) for entry in notes["failed"]]
        if any(notes[size] < job.settings[size] for size in ("batch_size", "prompts_per_batch")):
            halved.append(shard.number)
    return Summary(
        job.folder,
        done,
        failed,
        skipped,
        left,
        tuple(failures),
        tuple(halved),
        seconds,
        pace.per_second,
        stages,
        signal,
    )
