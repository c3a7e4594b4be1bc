from __future__ import annotations

import os
from pathlib import Path

import pytest

from samopt import InvalidInput
from samopt.folders.inputs import list_images


def names(found: list[str], folder: Path) -> list[str]:
    return [os.path.relpath(path, folder) for path in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.png", "a.JPG", "deep/c.webp", "deep/er/d.tiff", "deep/notes.txt", "no-suffix"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_folder_is_searched_to_all_depths_for_suffixes_of_images(folder: Path) -> None:
    assert names(list_images([folder]), folder) == ["a.JPG", "b.png", "deep/c.webp", "deep/er/d.tiff"]


def test_files_are_taken_by_any_name_and_patterns_too_each_once(folder: Path) -> None:
    found = list_images([folder / "no-suffix", str(folder / "**" / "*.t*"), folder / "b.png", folder])
    assert names(found, folder) == ["no-suffix", "deep/er/d.tiff", "deep/notes.txt", "b.png", "a.JPG", "deep/c.webp"]


def test_links_to_folders_are_followed_but_not_around(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "e.png").touch()
    (folder / "elsewhere").symlink_to(other)
    (folder / "deep" / "back").symlink_to(folder)
    (other / "itself").symlink_to(other)
    expected = ["a.JPG", "b.png", "deep/c.webp", "deep/er/d.tiff", "elsewhere/e.png"]
    assert names(list_images([folder]), folder) == expected


def test_two_names_of_one_file_are_two_images(folder: Path) -> None:
    (folder / "b2.png").symlink_to("b.png")
    assert {"b.png", "b2.png"} <= set(names(list_images([folder]), folder))


def test_paths_are_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert list_images(["b.png", "./deep/../b.png"]) == [str(folder / "b.png")]


def test_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gone\.png: there is no such file or folder"):
        list_images([folder / "gone.png"])
    with pytest.raises(InvalidInput, match=r"no image in .*\*\.gif"):
        list_images([str(folder / "*.gif")])
