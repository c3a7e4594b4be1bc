from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samopt import InvalidInput
from samopt.folders.prompts_file import Ask, assign, read_prompts

BOX = (1.0, 2.0, 4.0, 6.0)


def written(folder: Path, content: Any, name: str = "prompts.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder / name


def test_json(tmp_path: Path) -> None:
    entries = [
        {"image": "a.png", "box": [1, 2, 4, 6], "id": 5},
        {"image": "b.png", "points": [[1, 2], [3, 4]], "labels": [1, 0]},
        {"image": "a.png", "points": [[1, 2]]},
    ]
    assert read_prompts(written(tmp_path, entries)) == {
        "a.png": [Ask(box=BOX, name="5"), Ask(((1, 2),), (1,))],
        "b.png": [Ask(((1, 2), (3, 4)), (1, 0))],
    }


def test_coco(tmp_path: Path) -> None:
    content = {
        "images": [{"id": 9, "file_name": "a.png"}],
        "annotations": [{"id": 4, "image_id": 9, "bbox": [1, 2, 3, 4], "category_id": 17}],
    }
    assert read_prompts(written(tmp_path, content)) == {"a.png": [Ask(box=BOX, name="4", category=17)]}


def test_csv(tmp_path: Path) -> None:
    boxes = "image,x0,y0,x1,y1\na.png,1,2,4,6\n"
    assert read_prompts(written(tmp_path, boxes, "p.csv")) == {"a.png": [Ask(box=BOX)]}
    points = "image,prompt,x,y,label\na.png,cat,1,2,\na.png,dog,5,6,1\na.png,cat,3,4,0\n"
    assert read_prompts(written(tmp_path, points, "p.csv")) == {
        "a.png": [Ask(((1, 2), (3, 4)), (1, 0), name="cat"), Ask(((5, 6),), (1,), name="dog")]
    }
    both = "image,prompt,x,y,x0,y0,x1,y1\na.png,1,1,2,1,2,4,6\na.png,1,3,4,,,,\n"
    assert read_prompts(written(tmp_path, both, "p.csv")) == {"a.png": [Ask(((1, 2), (3, 4)), (1, 1), BOX, name="1")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no file of prompts, COCO, CSV or JSON"),
        ({"images": {}}, "no prompts: neither COCO"),
        ([], "there are no prompts in it"),
        ([{"box": [1, 2, 3, 4]}], 'prompt 0: it names no "image"'),
        ([{"image": "a.png"}], "prompt 0: it has neither points nor a box"),
        ([{"image": "a.png", "box": [1, 2, 3]}], "prompt 0: a point is x, y and a box x0, y0, x1, y1"),
        ([{"image": "a.png", "points": [[1, 2]], "labels": [2]}], "prompt 0: each point has a label"),
        ([{"image": "a.png", "points": [[1, 2]], "labels": []}], "prompt 0: each point has a label"),
        ('[{"image": "a.png", "points": [[1, NaN]]}]', "prompt 0: its coordinates must be finite"),
        ({"images": [], "annotations": [{"id": 3, "image_id": 1}]}, "annotation 3: its image 1 is not in the file"),
        ({"images": [{"id": 1, "file_name": "a"}], "annotations": [{"id": 3, "image_id": 1}]}, "has no bbox"),
    ],
)
def test_mistakes_say_where(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        read_prompts(written(tmp_path, content))
    assert str(caught.value).startswith(str(tmp_path / "prompts.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,x0,y0\na,1,2\n", "its header must name"),
        ("image,x,y\na,1,b\n", "line 2: a point is x, y"),
        ("image,prompt,x0,y0,x1,y1\na,1,1,2,3,4\na,1,1,2,3,5\n", "line 2: prompt 1 has 2 boxes"),
    ],
)
def test_mistakes_in_csv_say_where(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_prompts(written(tmp_path, content, "prompts.csv"))


def test_a_name_is_a_path_or_its_end() -> None:
    ask = [Ask(box=BOX)]
    images = ["/data/x/a.png", "/data/y/a.png", "/data/y/b.png", "/data/ab.png"]
    assert assign({"x/a.png": ask, "b.png": ask}, images, "p") == {"/data/x/a.png": ask, "/data/y/b.png": ask}
    assert assign({"/data/ab.png": ask, "elsewhere.png": ask}, images, "p") == {"/data/ab.png": ask}
    with pytest.raises(InvalidInput, match=r"p: a\.png may be /data/x/a\.png or /data/y/a\.png"):
        assign({"a.png": ask}, images, "p")
    with pytest.raises(InvalidInput, match=r"its prompts are for other images, such as c\.png"):
        assign({"c.png": ask}, images, "p")
