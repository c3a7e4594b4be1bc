"""An output folder: what was asked for, which images go into which shard, and which shards are there.

    job.json         what the results depend on; a run that asks for anything else is refused
    manifest.jsonl   a line per shard: the JSON list of its images. Lines are only ever added
    shards/          a file per finished shard; it is complete, or it is not there
    summary.json     what became of the images, written when a run ends

A shard is a stretch of the list of images, and so are the batches in it: a run that continues another makes the very
batches that the other would have made. Images that are new in the folders get shards of their own, after the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from samopt.errors import InvalidInput

FORMAT = 1
JOB, MANIFEST, SHARDS, SUMMARY, LOCK = "job.json", "manifest.jsonl", "shards", "summary.json", "lock"
PART = ".part"  # a file that is being written


@dataclass(frozen=True)
class Shard:
    """Some images whose results are one file.

    Attributes:
        number: of the shard.
        first: the number of its first image.
        images: their paths.
        path: the file; it exists once all of them are done.
    """

    number: int
    first: int
    images: tuple[str, ...]
    path: Path


@dataclass(frozen=True)
class Job:
    """An output folder.

    Attributes:
        folder: where it is.
        settings: what the results depend on: "task", "model", "passes", "options", "batch_size",
            "prompts_per_batch", "shard_size", and "recipe", what the passes were chosen from.
        suffix: of a shard's file.
    """

    folder: Path
    settings: dict[str, Any]
    suffix: str

    def shards(self) -> Iterator[Shard]:
        """All shards, in order."""
        first = 0
        for number, images in enumerate(read_manifest(self.folder)):
            path = self.folder / SHARDS / f"{number:06d}{self.suffix}"
            yield Shard(number, first, tuple(images), path)
            first += len(images)


def read_settings(folder: str | Path) -> dict[str, Any] | None:
    """What job.json in an output folder holds; None where there is none.

    Raises:
        InvalidInput: it is damaged, or of another version of samopt.
    """
    path = Path(folder) / JOB
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: not a job of samopt's ({error}); choose another folder") from error
    if version != FORMAT:
        raise InvalidInput(f"{path}: of format {version}, and this version of samopt reads {FORMAT}; choose another")
    return {key: value for key, value in found.items() if key != "format"}


def read_manifest(folder: str | Path) -> list[list[str]]:
    """The images of each shard of an output folder."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def open_job(folder: str | Path, settings: dict[str, Any], suffix: str, images: Sequence[str]) -> Job:
    """Makes an output folder, or continues with one, and puts images that it does not have into shards of their own.

    Args:
        folder: where it is, or is to be.
        settings: see `Job`. Where one is None, what the folder has is taken.
        suffix: of a shard's file.
        images: paths.

    Raises:
        InvalidInput: the folder holds other things, or results made with other settings; nothing is changed then.
    """
    folder = Path(folder)
    before = read_settings(folder)
    if before is None:
        check_free(folder)
    else:
        check_same(folder, before, settings)
    chosen = settings if before is None else before
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(f"*{PART}"), *(folder / SHARDS).glob(f"*{PART}")]:
        left.unlink()
    if before is None:
        write_json(folder / JOB, {"format": FORMAT, **chosen})
    shards = read_manifest(folder)
    known = {image for shard in shards for image in shard}
    new = [image for image in images if image not in known]
    if new:
        size = chosen["shard_size"]
        shards += [new[start : start + size] for start in range(0, len(new), size)]
        # json.dumps escapes what is not ASCII: names that are not UTF-8 survive, too.
        write_whole(folder / MANIFEST, "".join(json.dumps(shard) + "\n" for shard in shards).encode())
    return Job(folder, chosen, suffix)


def check_free(folder: Path) -> None:
    """Raises InvalidInput unless results may be put into a folder: it is empty, or is not there."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is a file; name a folder for the results")
    if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise InvalidInput(f"{folder} holds other things than samopt's results; name an empty or a new folder")


def check_same(folder: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raises InvalidInput where settings that are not None differ from those a folder was made with."""
    for name, asked in settings.items():
        had = before.get(name)
        if asked is None or asked == had:
            continue
        if isinstance(asked, dict) and isinstance(had, dict):
            name = next(key for key in {**had, **asked} if had.get(key) != asked.get(key))
            had, asked = had.get(name), asked.get(name)
        raise InvalidInput(
            f"{folder} was made with {name} {_short(had)}, and this run has {_short(asked)}: "
            "name another folder, as results of both are not mixed"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds an output folder for one process; the lock ends with it, however it ends.

    Raises:
        InvalidInput: another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise InvalidInput(f"{folder}: results cannot be written there ({error.strerror}); name another") from error
    with file:
        _lock(file, folder)
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InvalidInput(f"{folder}: another run is writing there; wait for it, or name another folder") from error
    except OSError:  # a file system without locks
        return


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON, at once or not at all."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, at once or not at all."""
    with written_whole(path) as part:
        part.write_bytes(content)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to; once it is written and on the disk it becomes `path`, and before that nothing does."""
    part = path.with_name(path.name + PART)
    yield part
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
