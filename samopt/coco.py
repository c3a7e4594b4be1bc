"""Pictures with ground truth from a file of COCO instances, prompted as in "Segment Anything, Fast".

The protocol of PyTorch's publication (segment-anything-fast, experiments/data.py): one foreground point for each
annotation, the mask's centre of mass in whole pixels, or, where that is outside of the mask, a point far inside of it;
of the three masks a model answers, the one it rates best; mIoU over all annotations, crowds included.
`Reference.record(model, coco_samples(...), kinds=("point",), objects=None)` measures it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from samopt.errors import InvalidInput, first_line
from samopt.prompts import innermost
from samopt.samples import Sample, read_image, spread


def coco_samples(annotations: str | Path, images: str | Path, limit: int | None = None) -> list[Sample]:
    """Pictures that have annotations, each with all its masks and a point for each.

    Crowds are annotations like others, as the publication counts them. An annotation whose mask is empty has no point
    and is left out, and so is a picture without any other.

    Args:
        annotations: COCO instances, such as instances_val2017.json.
        images: the folder of its pictures.
        limit: pictures at most, evenly spread over the file's, in the order of their ids; None takes all.

    Raises:
        InvalidInput: no such file or folder, no instances in it, or a picture that is missing or of another size than
            the file says.
    """
    coco = _read(Path(annotations))
    folder = Path(images)
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: there is no such folder; name the one with the pictures of {annotations}")
    annotated = [key for key in sorted(coco.imgs) if coco.imgToAnns.get(key)]
    chosen = annotated if limit is None else spread(annotated, limit)
    samples = list(_samples(coco, chosen, folder, annotations))
    if not samples:
        raise InvalidInput(f"{annotations}: no picture in it has an object; name a file of instances")
    return samples


def foreground_point(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The pixel (x, y) that prompts for a non-empty mask [H, W]: its centre of mass, or, where that is not on the mask,
    the pixel farthest from its outside."""
    y, x = (round(float(centre)) for centre in ndimage.center_of_mass(mask))
    return np.array([x, y], dtype=np.float64) if mask[y, x] else innermost(mask)


def _read(path: Path) -> Any:
    from pycocotools.coco import COCO

    if not path.is_file():
        raise InvalidInput(f"{path}: there is no such file of COCO annotations")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how long it took
            coco = COCO(str(path))
    except Exception as error:  # it looks up what it expects
        raise InvalidInput(f"{path}: not a file of COCO annotations ({first_line(error)})") from error
    if not coco.imgs or not coco.anns:
        raise InvalidInput(f"{path}: not a file of COCO instances: it needs images and annotations")
    return coco


def _samples(coco: Any, keys: list[Any], folder: Path, file: str | Path) -> Iterator[Sample]:
    for key in keys:
        masks = [_mask(coco, annotation, file) for annotation in coco.imgToAnns[key]]
        masks = [mask for mask in masks if mask.any()]
        if not masks:
            continue
        picture = read_image(folder / coco.imgs[key]["file_name"])
        height, width = picture.image.shape[:2]
        if masks[0].shape != (height, width):
            said = f"{masks[0].shape[1]} x {masks[0].shape[0]}"
            raise InvalidInput(f"{picture.name}: {width} x {height} pixels, and {file} says {said}")
        points = np.stack([foreground_point(mask) for mask in masks])
        yield Sample(picture.image, np.stack(masks), points, picture.name)


def _mask(coco: Any, annotation: dict[str, Any], file: str | Path) -> NDArray[np.bool_]:
    try:
        return np.array(coco.annToMask(annotation), dtype=np.bool_)
    except Exception as error:
        what = f"annotation {annotation.get('id')} holds no mask ({first_line(error)})"
        raise InvalidInput(f"{file}: {what}; name a file of instances") from error
