"""The folder that holds a saved model: a manifest in JSON, and the files it names, each with its size and SHA-256.

The manifest is what makes the folder one model. New files come in under names of their own, made of their checksums,
and replacing the manifest, which a file system does at once or not at all, is the last that is done: until then, and
after a crash, the folder is what it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samopt.errors import SamoptError, SavedModelError, first_line

MANIFEST = "samopt.json"
FORMAT = 1  # of the folder; raised when what is in it changes its meaning
SAVING = ".saving-"  # the beginning of a folder's name while it is written
OURS = re.compile(rf"{re.escape(MANIFEST)}|[a-z0-9_]+-[0-9a-f]{{12}}\.(safetensors|bin|pt2)|{re.escape(SAVING)}\w+")

Writer = Callable[[Path], None]  # writes a file


def check_target(folder: Path) -> None:
    """Raises SavedModelError where a model cannot be saved to `folder`: not a folder, or one of something else."""
    if not folder.parent.is_dir():
        raise SavedModelError(f"{folder}: there is no folder {folder.parent}")
    if not folder.exists():
        if not os.access(folder.parent, os.W_OK):
            raise SavedModelError(f"{folder}: the folder {folder.parent} cannot be written to; name another")
        return
    if not folder.is_dir():
        raise SavedModelError(f"{folder} is a file; name a folder")
    others = [path.name for path in folder.iterdir() if not OURS.fullmatch(path.name)]
    if others and not (folder / MANIFEST).exists():
        raise SavedModelError(
            f"{folder} holds {sorted(others)[0]!r} and no saved model: name a new folder, an empty one, or that of a "
            "saved model, to replace it"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SavedModelError(f"{folder}: this folder cannot be written to; name another")


def write_folder(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Writer]) -> None:
    """Writes a saved model, in the place of the one that is there. One process at a time may write to a folder.

    Args:
        folder: where to; its parent is there already.
        manifest: what JSON can hold; format, files and checksum are added.
        files: what writes each file, by names such as "weights.safetensors", which its name begins and ends with.

    Raises:
        SavedModelError: it cannot be written, as on a full disk. What was there, is.
    """
    check_target(folder)
    known = _names(folder)
    new = not folder.exists()
    moved: list[Path] = []
    replaced = False
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=SAVING) as temporary:
            entries = {name: _write(Path(temporary), name, writer) for name, writer in files.items()}
            content = {"format": FORMAT, **manifest, "files": entries}
            content["checksum"] = _checksum(content)
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            _write(Path(temporary), MANIFEST, lambda path: _write_text(path, text))
            for entry in entries.values():
                os.replace(Path(temporary) / entry["name"], folder / entry["name"])
                moved.append(folder / entry["name"])
            _sync(folder)
            os.replace(Path(temporary) / MANIFEST, folder / MANIFEST)
            replaced = True
        _sync(folder)
    except BaseException as error:
        for path in moved:
            if not replaced and path.name not in known:
                path.unlink(missing_ok=True)
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if isinstance(error, SamoptError) or not isinstance(error, Exception):
            raise
        raise SavedModelError(f"{folder}: the model cannot be saved there: {first_line(error)}") from error
    _remove_leftovers(folder, {entry["name"] for entry in entries.values()})


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_folder` wrote as the manifest.

    Raises:
        SavedModelError: there is none, it was changed or damaged since, or it is of a format that is not known here.
    """
    path = folder / MANIFEST
    if not path.is_file():
        found = "there is no such folder" if not folder.exists() else f"no saved model: it has no {MANIFEST}"
        raise SavedModelError(f"{folder}: {found}; samopt.save makes one")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SavedModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise SavedModelError(f"{path}: damaged or truncated: not JSON ({error}); save the model again") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise SavedModelError(f"{path}: not written by samopt.save: it has no format")
    if manifest["format"] != FORMAT:
        raise SavedModelError(
            f"{folder}: a saved model of format {manifest['format']}, and this samopt reads format {FORMAT}: install "
            f"the samopt it was saved with ({_dig(manifest, 'made_with', 'samopt')}), or optimise the model again"
        )
    if _checksum(manifest) != manifest.get("checksum"):
        raise SavedModelError(f"{path}: changed or damaged since it was saved; save the model again")
    return manifest


@contextmanager
def checked(folder: Path, entry: Mapping[str, Any]) -> Iterator[Path]:
    """Where one of a manifest's files is, while a thread computes its checksum; leaving waits for that.

    What is read from it inside may be used only after leaving, as it may be anything: where the checksum is another,
    leaving raises that, whatever the content led to.

    Raises:
        SavedModelError: the file is missing or truncated, or, on leaving, changed.
    """
    path = folder / entry["name"]
    if not OURS.fullmatch(entry["name"]):
        raise SavedModelError(f"{folder}: its manifest names {entry['name']!r}, which samopt.save does not write")
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1) as thread:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise SavedModelError(f"{path}: {size} bytes of {entry['bytes']}: truncated, or another file")
            digest = thread.submit(hashlib.file_digest, file, "sha256")
            try:
                yield path
            finally:
                if digest.result().hexdigest() != entry["sha256"]:
                    raise SavedModelError(f"{path}: changed or damaged since it was saved: its checksum is another")
    except OSError as error:
        raise SavedModelError(f"{path}: cannot be read ({error.strerror or error}); save the model again") from error


def read_file(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """The content of one of a manifest's files, checked; for what is raised, see `checked`."""
    with checked(folder, entry) as path:
        return path.read_bytes()


def _write(folder: Path, name: str, writer: Writer) -> dict[str, Any]:
    """Writes a file to the disk; of any but the manifest, the name gets a part of its checksum."""
    path = folder / name
    path.touch()
    mode = path.stat().st_mode
    writer(path)
    path.chmod(mode)  # as others may read what the user creates, if safetensors would not let them
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if name != MANIFEST:
        path = path.rename(path.with_stem(f"{path.stem}-{digest[:12]}"))
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    """Makes renames in a folder last, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _names(folder: Path) -> set[str]:
    """The files of the model that is in a folder; none where there is no model, or a damaged one."""
    try:
        return {entry["name"] for entry in read_manifest(folder)["files"].values()}
    except SavedModelError:
        return set()


def _remove_leftovers(folder: Path, names: set[str]) -> None:
    """Removes the files of the model that was there before, and of saves that were killed."""
    for path in folder.iterdir():
        if path.name not in {MANIFEST, *names} and OURS.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value or "a newer one"
