"""Small files of COCO instances for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco


def _rle(mask: NDArray[np.bool_]) -> dict[str, Any]:
    packed = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {**packed, "counts": packed["counts"].decode()}


def write_instances(folder: Path, pictures: list[NDArray[np.uint8]], masks: list[list[Any]]) -> Path:
    """A file of instances beside its pictures; a mask is an array, or a segmentation as COCO has it."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{index}.png")
        height, width = picture.shape[:2]
        images.append({"id": 100 - index, "file_name": f"{index}.png", "height": height, "width": width})
        for mask in masks[index]:
            segmentation = _rle(mask) if isinstance(mask, np.ndarray) else mask
            crowd = int(isinstance(segmentation, dict))
            annotation = {"id": len(annotations) + 1, "image_id": 100 - index, "segmentation": segmentation}
            annotations.append({**annotation, "iscrowd": crowd, "category_id": 1})
    path = folder / "instances.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path
