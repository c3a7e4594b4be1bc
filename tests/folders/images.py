"""Folders of images of all kinds, and runs over them in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.models import random_sam

OPTIONS: dict[str, Any] = {"points_per_side": 2, "pred_iou_thresh": 0.0, "stability_score_thresh": 0.0}


def picture(seed: int, size: tuple[int, int] = (40, 56)) -> Image.Image:
    """A picture of a few flat squares of `size` (H, W)."""
    squares = np.random.default_rng(seed).integers(0, 256, (size[0] // 8 + 1, size[1] // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(8, 0).repeat(8, 1)[: size[0], : size[1]].copy())


def plain_folder(folder: Path, count: int) -> Path:
    """A folder of so many pictures."""
    folder.mkdir()
    for index in range(count):
        picture(index, (40 + index % 3, 56)).save(folder / f"{index:02d}.png")
    return folder


def mixed_folder(folder: Path) -> dict[str, str]:
    """Makes a folder of 40 images; of each, by its path, "" or a part of the reason for which it cannot be read."""
    (folder / "deep" / "er").mkdir(parents=True)
    made: dict[str, str] = {}

    def add(name: str, save: Callable[[Path], Any], reason: str = "") -> None:
        save(folder / name)
        made[str(folder / name)] = reason

    for index in range(10):
        add(f"{index:02d}.png", picture(index).save)
    for index, name in enumerate(["日本語.png", "Ελληνικά.jpg", "имя файла.png", "क.webp", 'it\'s "so".png', "🙂.bmp"]):
        add(f"deep/{name}", picture(20 + index).save)
    add("deep/er/line\nbreak.png", picture(30).save)
    add(os.fsdecode(b"deep/\xff\xfe.png"), picture(31).save)
    add("UPPER.JPG", picture(32).save)
    add("cmyk.jpg", picture(33).convert("CMYK").save)
    add("grey.png", picture(34).convert("L").save)
    add("palette.png", picture(35).quantize(16).save)
    add("transparent.png", picture(36).convert("RGBA").save)
    add("one.tif", picture(37).save)
    add("1x1.png", picture(38, (1, 1)).save)
    add("tall.png", picture(39, (90, 5)).save)
    turned = Image.Exif()
    turned[0x0112] = 6
    add("turned.jpg", lambda path: picture(40, (20, 60)).save(path, exif=turned))
    add("linked.png", lambda path: path.symlink_to("00.png"))
    add("hard.png", lambda path: path.hardlink_to(folder / "01.png"))
    add("zero.png", lambda path: path.touch(), "not a readable image")
    add("text.png", lambda path: path.write_text("no picture"), "not a readable image")
    whole = folder.parent / "whole.jpg"
    picture(41, (300, 300)).save(whole)
    add("cut.jpg", lambda path: path.write_bytes(whole.read_bytes()[:2000]), "truncated")
    add("16bit.png", Image.fromarray(np.full((9, 9), 999, np.uint16)).save, "more than 8 bits")
    frames = [picture(50), picture(51)]
    add("moving.webp", lambda path: frames[0].save(path, save_all=True, append_images=frames[1:]), "holds 2 pictures")
    add("moving.png", lambda path: frames[0].save(path, save_all=True, append_images=frames[1:]), "holds 2 pictures")
    add("self.png", lambda path: path.symlink_to("self.png"), "not a readable image")
    add("nowhere.png", lambda path: path.symlink_to("gone.png"), "no such image file")
    add("narrow.png", picture(52, (1, 600)).save, "too narrow")
    add("huge.png", Image.new("1", (30_000, 3_000)).save, "90,000,000 pixels")
    add("bomb.png", Image.new("1", (20_000, 10_000)).save, "not a readable image")
    (folder / "deep" / "back").symlink_to("..", target_is_directory=True)
    (folder / "notes.txt").write_text("no image, by its name")
    assert len(made) == 40
    return made


def segment_in_process(inputs: str, out: str, shard_size: int) -> None:
    """Segments a folder, and ends the process with the exit code that says what became of it."""
    import samopt

    torch.set_num_threads(1)
    summary = samopt.segment(random_sam(), inputs, out, generator=OPTIONS, batch_size=2, shard_size=shard_size)
    raise SystemExit(summary.exit_code)


def processes() -> Any:
    """Processes that start within milliseconds, as they are forked off one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    imported = ["samopt.folders.run", "segment_anything", "pyarrow.parquet", "pycocotools.mask", "torchvision.ops"]
    # pandas, where it is: pyarrow imports it at its first table.
    context.set_forkserver_preload([*imported, "rich.progress", "pandas", "tests.folders.images"])
    return context


def shards_of(folder: Path) -> dict[str, bytes]:
    """The shards of an output folder, by name."""
    return {path.name: path.read_bytes() for path in (folder / "shards").iterdir() if path.suffix != ".part"}
