from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pycocotools.coco import COCO
from segment_anything.modeling import Sam

from samopt.folders.run import segment
from tests.folders.images import plain_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    found = plain_folder(place / "in", 3)
    (found / "01.png").write_bytes(b"")
    return found


BOXES = [
    {"image": "00.png", "box": [0, 0, 55, 39]},
    {"image": "00.png", "box": [10, 10, 30, 30]},
    {"image": "02.png", "points": [[20, 20]]},
]


@pytest.fixture(scope="module")
def out(tiny256: Sam, folder: Path, place: Path) -> Path:
    (place / "prompts.json").write_text(json.dumps(BOXES))
    segment(
        tiny256,
        folder,
        place / "out",
        prompts=place / "prompts.json",
        shard_size=2,
        coco=True,
        label_maps=True,
        overlays=True,
    )
    return place / "out"


def test_coco_json_is_what_pycocotools_reads(out: Path, folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(out / "coco.json"))
    rows = pq.read_table(out / "shards").to_pylist()
    assert {image["file_name"] for image in coco.imgs.values()} == {str(folder / "00.png"), str(folder / "02.png")}
    masks = [(row["index"], mask) for row in rows for mask in row["masks"] or []]
    assert len(coco.anns) == len(masks) == 3
    for annotation, (image, mask) in zip(coco.anns.values(), masks, strict=True):
        assert (annotation["image_id"], annotation["bbox"]) == (image, mask["bbox"])
        assert coco.annToMask(annotation).sum() == mask["area"]
    assert coco.loadCats(coco.getCatIds()) == [{"id": 1, "name": "object"}]


def test_label_maps_number_the_masks_the_smallest_on_top(out: Path) -> None:
    assert sorted(path.name for path in (out / "label_maps").iterdir()) == ["00000000_00.png", "00000002_02.png"]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(out / "coco.json"))
    with Image.open(out / "label_maps" / "00000000_00.png") as image:
        assert image.mode == "I;16"
        labels = np.array(image)
    masks = [coco.annToMask(annotation).astype(bool) for annotation in coco.imgToAnns[0]]
    areas = [mask.sum() for mask in masks]
    expected = np.zeros_like(labels)
    for index in sorted(range(2), key=lambda index: -areas[index]):
        expected[masks[index]] = index + 1
    np.testing.assert_array_equal(labels, expected)


def test_overlays_have_the_size_of_the_image(out: Path) -> None:
    assert sorted(path.name for path in (out / "overlays").iterdir()) == ["00000000_00.jpg", "00000002_02.jpg"]
    with Image.open(out / "overlays" / "00000002_02.jpg") as image:
        assert image.size == (56, 42)


def test_they_may_be_asked_for_later(tiny256: Sam, out: Path, folder: Path, place: Path) -> None:
    before = {path: path.read_bytes() for path in (out / "overlays").iterdir()}
    for path in [out / "coco.json", next(iter(before))]:
        path.unlink()
    summary = segment(tiny256, folder, out, prompts=place / "prompts.json", coco=True, label_maps=True, overlays=True)
    assert summary.done == 0
    assert {path: path.read_bytes() for path in (out / "overlays").iterdir()} == before
    assert (out / "coco.json").exists()
