"""The folder of a saved model is what it was, or what it is to be, whatever happens between."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samopt import SavedModelError
from samopt.saved_folder import FORMAT, MANIFEST, _checksum, checked, read_file, read_manifest, write_folder


def write(folder: Path, content: str, size: int = 1) -> None:
    """Saves a text, and so many KiB of zeros."""

    def text(path: Path) -> None:
        path.write_text(content)

    def weights(path: Path) -> None:
        save_file({"zeros": torch.zeros(256 * size)}, path)

    write_folder(folder, {"made_with": {"samopt": "0.1"}}, {"text.bin": text, "weights.safetensors": weights})


def read(folder: Path) -> str:
    files = read_manifest(folder)["files"]
    read_file(folder, files["weights.safetensors"])
    return read_file(folder, files["text.bin"]).decode()


def edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest |= changes
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_written_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "one")
    (folder / "notes.txt").write_text("the user's own")
    leftover = folder / ".saving-killed"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_text("half")
    assert read(folder) == "one"
    write(folder, "two")
    assert read(folder) == "two"
    names = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert names == ["notes.txt", "samopt.json", "text", "weights"]
    write(folder, "two")  # the same files under the same names
    assert read(folder) == "two"
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {(folder / "notes.txt").stat().st_mode & 0o777}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "one")
    before = sorted(folder.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        for target in (folder, tmp_path / "new"):
            with pytest.raises(SavedModelError, match=f"{target}: the model cannot be saved there: .*(large|space)"):
                write(target, "two", size=128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(folder.iterdir()) == before
    assert read(folder) == "one"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failure_at_any_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: Any) -> None:
    folder = tmp_path / "model"
    write(folder, "one")
    before = sorted(folder.iterdir())
    replace, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == at + 1:
            raise error
        replace(source, target)

    for target in (folder, tmp_path / "new"):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", failing)
            with pytest.raises(SavedModelError if isinstance(error, OSError) else KeyboardInterrupt):
                write(target, "two")
    assert sorted(folder.iterdir()) == before
    assert read(folder) == "one"
    assert list(tmp_path.iterdir()) == [folder]


KILLED = """
import os, sys
from pathlib import Path
from samopt.saved_folder import write_folder
replace, left = os.replace, int(sys.argv[2])
def dying(source, target):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    replace(source, target)
os.replace = dying
def text(path):
    path.write_text("two")
write_folder(Path(sys.argv[1]), {}, {"text.bin": text, "weights.safetensors": text})
"""


def test_a_process_that_is_killed_leaves_the_old_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "one")
    for renames in (0, 2):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(renames)], check=False)
        assert killed.returncode == 9
        assert read(folder) == "one"
    write(folder, "three")
    assert read(folder) == "three"
    assert len(list(folder.iterdir())) == 3, "what the killed processes left is gone"


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    (tmp_path / "file").touch()
    with pytest.raises(SavedModelError, match=r"holds 'file' and no saved model: name a new folder"):
        write(tmp_path, "one")
    with pytest.raises(SavedModelError, match="file is a file; name a folder"):
        write(tmp_path / "file", "one")
    with pytest.raises(SavedModelError, match=r"there is no folder .*/no"):
        write(tmp_path / "no" / "model", "one")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("where", ["folder", "parent"])
def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    folder = tmp_path / "model"
    if where == "folder":
        write(folder, "one")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    with pytest.raises(SavedModelError, match="cannot be written to; name another"):
        write(folder, "two")
    if where == "folder":
        assert read(folder) == "one"


def test_damage_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "one")
    (text,) = folder.glob("text-*")
    for content, message in [("on", "2 bytes of 3: truncated"), ("One", "its checksum is another")]:
        text.write_text(content)
        with pytest.raises(SavedModelError, match=f"{text}: .*{message}"):
            read(folder)
    text.unlink()
    with pytest.raises(SavedModelError, match=r"cannot be read .No such file"):
        read(folder)


def test_the_checksum_is_computed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model", "one")
    entry = read_manifest(tmp_path / "model")["files"]["text.bin"]
    digest, inside, done = hashlib.file_digest, threading.Event(), []

    def waiting(file: Any, name: str) -> Any:
        assert inside.wait(20), "the content is not waited for"
        done.append(name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", waiting)
    with checked(tmp_path / "model", entry) as path:
        assert path.read_text() == "one"
        assert done == []
        inside.set()
    assert done == ["sha256"], "leaving waits for it"


def test_damage_explains_whatever_it_led_to(tmp_path: Path) -> None:
    write(tmp_path / "model", "one")
    entry = read_manifest(tmp_path / "model")["files"]["text.bin"]
    with pytest.raises(ZeroDivisionError), checked(tmp_path / "model", entry):
        raise ZeroDivisionError
    with (
        pytest.raises(SavedModelError, match=r"cannot be read .No such file"),
        checked(tmp_path / "model", entry) as path,
    ):
        path.with_name("none").read_bytes()
    path.write_text("One")
    with pytest.raises(SavedModelError, match="its checksum is another"), checked(tmp_path / "model", entry):
        raise ZeroDivisionError


def test_a_manifest_of_another_kind(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(SavedModelError, match=r"there is no such folder; samopt\.save makes one"):
        read(folder)
    write(folder, "one")
    manifest = folder / MANIFEST
    text = manifest.read_text()
    edit(folder, made_with={"samopt": "9.9"})
    with pytest.raises(SavedModelError, match="changed or damaged since it was saved"):
        read(folder)
    edit(folder, format=FORMAT + 1)
    with pytest.raises(SavedModelError, match=rf"of format {FORMAT + 1}, and this samopt reads format 1: .*9\.9"):
        read(folder)
    for content, message in [(text[:50], "not JSON"), ("[]", "it has no format"), ("{}", "it has no format")]:
        manifest.write_text(content)
        with pytest.raises(SavedModelError, match=message):
            read(folder)
    manifest.unlink()
    with pytest.raises(SavedModelError, match=f"no saved model: it has no {MANIFEST}"):
        read(folder)


def test_a_manifest_that_names_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_text("x")
    with pytest.raises(
        SavedModelError, match=r"its manifest names '\.\./secret\.bin', which samopt.save does not write"
    ):
        read_file(tmp_path / "model", {"name": "../secret.bin"})


def test_the_checksum_covers_everything() -> None:
    assert _checksum({"a": [1], "checksum": "x"}) == _checksum({"a": [1]}) != _checksum({"a": [2]})
