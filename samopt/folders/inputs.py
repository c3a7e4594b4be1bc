"""Which images are meant: files, folders with all that is in them, and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from samopt.errors import InvalidInput
from samopt.samples import SUFFIXES


def list_images(inputs: Iterable[str | Path], leave_out: Path | None = None) -> list[str]:
    """The images that are meant, each once.

    Args:
        inputs: files, taken whatever their names; folders, searched to all depths for files with the suffixes of
            images, through links too; and patterns such as "photos/**/*.jpg".
        leave_out: a folder not to search, where results are.

    Returns:
        Absolute paths, in the order of `inputs`, those of a folder or pattern sorted. Links are not resolved: two names
        of one file are two images.

    Raises:
        InvalidInput: an input that is not there, or nothing in all of them.
    """
    names = [os.fspath(each) for each in inputs]
    skipped = None if leave_out is None else os.path.realpath(leave_out)
    found = dict.fromkeys(os.path.abspath(path) for each in names for path in _listed(each, skipped))
    if not found:
        raise InvalidInput(f"no image in {', '.join(names)} (looked for {', '.join(sorted(SUFFIXES))})")
    return list(found)


def _listed(each: str, skipped: str | None) -> Iterator[str]:
    if os.path.isdir(each):
        yield from _inside(each, skipped)
    elif os.path.lexists(each):  # a link that leads nowhere is an image that cannot be read, and is recorded as that
        yield each
    elif glob.has_magic(each):
        for path in sorted(glob.glob(each, recursive=True)):
            if not os.path.isdir(path) and not _within(path, skipped):
                yield path
    else:
        raise InvalidInput(f"{each}: there is no such file or folder")


def _inside(folder: str, skipped: str | None) -> Iterator[str]:
    """Images of a folder and those below it; one that links lead back to is searched once."""
    searched = {skipped}
    for path, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(path)) in searched:
            folders.clear()
            continue
        searched.add(real)
        folders.sort()
        yield from (os.path.join(path, name) for name in sorted(files) if _suffix(name) in SUFFIXES)


def _within(path: str, folder: str | None) -> bool:
    return folder is not None and Path(folder) in Path(os.path.realpath(path)).parents


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
