"""What else is made of shards of masks: COCO JSON, label maps, overlay pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samopt.folders.job import SHARDS, Job, written_whole
from samopt.folders.records import Record, read_masks

COCO, LABEL_MAPS, OVERLAYS = "coco.json", "label_maps", "overlays"
SHOWN = 1024  # longest side of an overlay picture


def write_coco(folder: Path) -> None:
    """Writes coco.json of the shards that are there: images, and annotations with compressed run lengths.

    Categories are those of the prompts' file; a mask without one is of category 1, "object".
    """
    with written_whole(folder / COCO) as part, part.open("w", encoding="utf-8") as file:
        categories: dict[int, str] = {}
        file.write('{"images": [')
        file.write(",\n".join(json.dumps(_image(record)) for record in _records(folder)))
        file.write('],\n"annotations": [')
        separator = ""
        for number, annotation in enumerate(_annotations(folder), 1):
            category = annotation["category_id"]
            categories[category] = "object" if category == 1 else f"category {category}"
            file.write(separator + json.dumps({"id": number, **annotation}))
            separator = ",\n"
        named = [{"id": category, "name": name} for category, name in sorted(categories.items())]
        file.write(f'],\n"categories": {json.dumps(named)}}}\n')


def _records(folder: Path) -> Iterator[Record]:
    for path in sorted((folder / SHARDS).glob("*.parquet")):
        yield from (record for record in read_masks(path) if not record.error)


def _image(record: Record) -> dict[str, Any]:
    assert record.size is not None
    return {"id": record.index, "file_name": record.path, "height": record.size[0], "width": record.size[1]}


def _annotations(folder: Path) -> Iterator[dict[str, Any]]:
    for record in _records(folder):
        for mask in record.masks:
            yield {
                "image_id": record.index,
                "category_id": 1 if mask["category_id"] is None else mask["category_id"],
                "segmentation": mask["segmentation"],
                "area": mask["area"],
                "bbox": mask["bbox"],
                "iscrowd": 0,
                "score": mask["predicted_iou"],
                "prompt_id": mask["prompt_id"],
            }


def write_pictures(job: Job, label_maps: bool, overlays: bool) -> None:
    """Writes the pictures of each image that are not there yet."""
    kinds = [(LABEL_MAPS, ".png", _label_map)] * label_maps + [(OVERLAYS, ".jpg", _overlay)] * overlays
    for name, _, _ in kinds:
        (job.folder / name).mkdir(exist_ok=True)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for shard in job.shards():
            if not shard.path.exists():
                continue
            calls = []
            for record in read_masks(shard.path):
                path = shard.images[record.index - shard.first]
                for name, suffix, draw in kinds:
                    target = job.folder / name / f"{record.index:08d}_{Path(path).stem[:50]}{suffix}"
                    if not record.error and not target.exists():
                        calls.append(pool.submit(_save, draw, record, path, target))
            for call in calls:
                call.result()


def _save(draw: Any, record: Record, path: str, target: Path) -> None:
    image = draw(record, path)
    with written_whole(target) as part:
        image.save(
            part,
            format="PNG" if target.suffix == ".png" else "JPEG",
            **({} if target.suffix == ".png" else {"quality": 90}),
        )


def _label_map(record: Record, _: str) -> Any:
    """Of each pixel the number of the smallest mask that it is in, from 1, in their order; 0 for none."""
    from PIL import Image

    assert record.size is not None
    labels = np.zeros(record.size, dtype=np.uint16)
    areas = [mask["area"] for mask in record.masks]
    for index in np.argsort(areas, kind="stable")[::-1]:
        labels[_mask(record.masks[index])] = index + 1
    return Image.fromarray(labels)


def _overlay(record: Record, path: str) -> Any:
    from PIL import Image

    from samopt.images import read_file
    from samopt.picture import overlay

    image = Image.fromarray(read_file(path))
    image.thumbnail((SHOWN, SHOWN))
    masks = [Image.fromarray(_mask(mask)).resize(image.size, Image.Resampling.NEAREST) for mask in record.masks]
    stacked = (
        np.stack([np.asarray(mask, dtype=bool) for mask in masks]) if masks else np.zeros((0, *image.size[::-1]), bool)
    )
    return Image.fromarray(overlay(np.asarray(image), stacked))


def _mask(mask: dict[str, Any]) -> NDArray[np.bool_]:
    from pycocotools import mask as coco

    rle = {"size": mask["segmentation"]["size"], "counts": mask["segmentation"]["counts"].encode()}
    found: NDArray[np.bool_] = coco.decode(rle).astype(bool)
    return found
