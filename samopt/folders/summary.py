"""What became of the images of an output folder."""

from __future__ import annotations

from collections.abc import Iterable
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
        seconds: of this run, reading, the model and writing.
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
    signal: int

    @property
    def images_per_second(self) -> float:
        """Of this run."""
        return (self.done + self.failed) / self.seconds if self.seconds > 0 else 0.0

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
            "shards_in_smaller_batches": list(self.halved),
            "failures": [{"image": image, "error": error} for image, error in self.failures],
        }

    def __str__(self) -> str:
        lines = [f"{self.done} images done, {self.failed} failed, {self.skipped} skipped as done before"]
        if self.done + self.failed:
            lines[0] += f"; {self.images_per_second:.1f} img/s"
        lines += [f"{image}: {error}" for image, error in self.failures[:SHOWN]]
        if len(self.failures) > SHOWN:
            lines.append(f"... and {len(self.failures) - SHOWN} more that failed: {self.folder / 'summary.json'}")
        if self.halved:
            shards = ", ".join(map(str, self.halved[:SHOWN])) + (", ..." if len(self.halved) > SHOWN else "")
            lines.append(f"out of memory: shards {shards} were made in smaller batches, which may round differently")
        if self.left:
            lines.append(f"ended by a signal, {self.left} images are left: the same command goes on with them")
        return "\n".join(lines)


def summarise(job: Job, shards: Iterable[Shard], new: set[int], seconds: float, signal: int) -> Summary:
    """Reads what the shards of a folder say of their images; `new` are the numbers of this run's."""
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
    return Summary(job.folder, done, failed, skipped, left, tuple(failures), tuple(halved), seconds, signal)
