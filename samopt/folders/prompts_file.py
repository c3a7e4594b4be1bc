"""Prompts for many images, of a file: COCO, CSV or JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from samopt.errors import InvalidInput, first_line


@dataclass(frozen=True)
class Ask:
    """One prompt, in the image's pixels.

    Attributes:
        points: (x, y) each; empty for none.
        labels: 1 for a point on the object, 0 for one beside it.
        box: (x0, y0, x1, y1), or None.
        name: the prompt's id in its file, as text; the number among the image's prompts where it has none.
        category: COCO's category_id; None where there is none.
    """

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None
    name: str = ""
    category: int | None = None

    @property
    def form(self) -> tuple[int, bool]:
        """What prompts that go together have in common: so many points, a box."""
        return len(self.points), self.box is not None

    @property
    def ambiguous(self) -> bool:
        """Whether it may mean a thing, a part of it, or what it is a part of: a single point."""
        return self.form == (1, False)


def read_prompts(path: str | Path) -> dict[str, list[Ask]]:
    """Reads prompts by the names of images in a file.

    Args:
        path: one of

            - COCO, as instances_val2017.json: "images" with "file_name" and "annotations" with "bbox", a box each;
            - CSV with a header: "image", and "x0", "y0", "x1", "y1" for a box, "x", "y" and "label" (1 unless given)
              for a point, or all of them; rows of one image and one "prompt" are one prompt of several points;
            - JSON: a list of {"image": ..., "box": [x0, y0, x1, y1], "points": [[x, y], ...], "labels": [1, ...],
              "id": ...}, where "image" and a box or points are needed.

    Raises:
        InvalidInput: it is missing, none of these, or a prompt in it is not one; the message says which.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"{path}: the prompts cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: no file of prompts: not UTF-8 text") from error
    try:
        found = list(_csv(text) if path.suffix.lower() == ".csv" else _json(text))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: no file of prompts, COCO, CSV or JSON ({first_line(error)})") from error
    prompts: dict[str, list[Ask]] = {}
    for image, ask in found:
        prompts.setdefault(image, []).append(ask)
    if not prompts:
        raise InvalidInput(f"{path}: there are no prompts in it")
    return prompts


def assign(prompts: dict[str, list[Ask]], images: Iterable[str], file: str | Path) -> dict[str, list[Ask]]:
    """Which prompts are for which images: a name in the file is an image's path, or its end.

    Returns:
        By paths, of those images that have prompts.

    Raises:
        InvalidInput: one name fits several images, or none fits any.
    """
    found: dict[str, list[Ask]] = {}
    taken: dict[str, str] = {}
    parts = {PurePath(name).parts: name for name in prompts}
    longest = max(map(len, parts))
    for image in images:
        of_image = PurePath(image).parts
        ends = (of_image[-count:] for count in range(min(longest, len(of_image)), 0, -1))
        name = next((parts[end] for end in ends if end in parts), None)
        if name is None:
            continue
        if name in taken:
            raise InvalidInput(f"{file}: {name} may be {taken[name]} or {image}; say more of its path")
        taken[name], found[image] = image, prompts[name]
    if not found:
        raise InvalidInput(f"{file}: its prompts are for other images, such as {next(iter(prompts))}")
    return found


def _json(text: str) -> Iterator[tuple[str, Ask]]:
    content = json.loads(text)
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        yield from _coco(content)
        return
    if not isinstance(content, list):
        raise InvalidInput('no prompts: neither COCO ("images", "annotations") nor a list of {"image": ..., ...}')
    for number, entry in enumerate(content):
        where = f"prompt {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
            raise InvalidInput(f'{where}: it names no "image"')
        points = entry.get("points") or []
        labels = entry.get("labels", [1] * len(points))
        yield entry["image"], _ask(points, labels, entry.get("box"), entry.get("id"), None, where)


def _coco(content: dict[str, Any]) -> Iterator[tuple[str, Ask]]:
    names = {image["id"]: image["file_name"] for image in content["images"]}
    for annotation in content["annotations"]:
        where = f"annotation {annotation.get('id')}"
        if annotation.get("image_id") not in names:
            raise InvalidInput(f"{where}: its image {annotation.get('image_id')} is not in the file")
        if not isinstance(annotation.get("bbox"), list) or len(annotation["bbox"]) != 4:
            raise InvalidInput(f"{where}: it has no bbox [x, y, width, height]")
        x, y, width, height = annotation["bbox"]
        box = [x, y, x + width, y + height]
        category = annotation.get("category_id")
        yield names[annotation["image_id"]], _ask([], [], box, annotation.get("id"), category, where)


def _csv(text: str) -> Iterator[tuple[str, Ask]]:
    rows = csv.DictReader(text.splitlines())
    columns = set(rows.fieldnames or ())
    corners = ("x0", "y0", "x1", "y1")
    if "image" not in columns or not ({"x", "y"} <= columns or set(corners) <= columns):
        raise InvalidInput('its header must name "image", and "x0", "y0", "x1", "y1" or "x", "y", or all of them')
    groups: dict[tuple[str, str], list[tuple[int, dict[str, str]]]] = {}
    for row in rows:
        line = rows.line_num
        groups.setdefault((row["image"], row.get("prompt") or f"line {line}"), []).append((line, row))
    for (image, name), members in groups.items():
        where = f"line {members[0][0]}"
        points = [(row["x"], row["y"]) for _, row in members if row.get("x") and row.get("y")]
        labels = [row.get("label") or 1 for _, row in members if row.get("x") and row.get("y")]
        boxes = {tuple(row[corner] for corner in corners) for _, row in members if row.get("x0")}
        if len(boxes) > 1:
            raise InvalidInput(f"{where}: prompt {name} has {len(boxes)} boxes; a prompt has one")
        own = None if name.startswith("line ") else name
        yield image, _ask(points, labels, next(iter(boxes), None), own, None, where)


def _ask(
    points: Sequence[Any], labels: Sequence[Any], box: Sequence[Any] | None, name: Any, category: Any, where: str
) -> Ask:
    try:
        pairs = tuple((float(x), float(y)) for x, y in points)
        signs = tuple(int(label) for label in labels)
        x0, y0, x1, y1 = (0.0, 0.0, 0.0, 0.0) if box is None else map(float, box)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: a point is x, y and a box x0, y0, x1, y1, all of them numbers") from error
    if not pairs and box is None:
        raise InvalidInput(f"{where}: it has neither points nor a box")
    if len(signs) != len(pairs) or not set(signs) <= {0, 1}:
        raise InvalidInput(f"{where}: each point has a label, 1 for on the object or 0 for beside it")
    if not all(map(math.isfinite, [x0, y0, x1, y1, *(value for pair in pairs for value in pair)])):
        raise InvalidInput(f"{where}: its coordinates must be finite")
    corners = None if box is None else (x0, y0, x1, y1)
    number = category if isinstance(category, int) else None
    return Ask(pairs, signs, corners, "" if name is None else str(name), number)
