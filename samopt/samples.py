"""The pictures accuracy is measured on: the user's own, or drawn scenes with exact ground truth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from samopt.errors import InvalidInput
from samopt.images import describe, hint, read_file, read_pil

T = TypeVar("T")

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
FIRST_SCENE_SEED = 2_000_000  # other scenes than those the embedded model was trained and scored on
CALIBRATION_SEED = 3_000_000  # and others than those that accuracy is measured on


@dataclass(frozen=True, eq=False)  # arrays have no single truth to be equal by
class Sample:
    """A picture, and what is known of the objects in it.

    Attributes:
        image: RGB, uint8 [H, W, 3].
        masks: ground truth, bool [N, H, W], or None where there is none.
        points: one prompt point (x, y) in pixels per mask, float [N, 2], or None to take each mask's innermost pixel.
        name: what to call it in messages.
    """

    image: NDArray[np.uint8]
    masks: NDArray[np.bool_] | None = None
    points: NDArray[np.float64] | None = None
    name: str = "image"

    def __post_init__(self) -> None:
        image, masks, points = self.image, self.masks, self.points
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            expected = "an image must be a uint8 array [H, W, 3] in RGB"
            raise InvalidInput(f"{self.name}: {expected}, not {describe(image)}{hint(image)}")
        if 0 in image.shape:
            raise InvalidInput(f"{self.name}: the image is empty, {list(image.shape)}")
        if masks is not None and (
            not isinstance(masks, np.ndarray)
            or masks.dtype != np.bool_
            or masks.ndim != 3
            or masks.shape[1:] != image.shape[:2]
        ):
            expected = f"[N, {image.shape[0]}, {image.shape[1]}]"
            remedy = "; of a label map make np.stack([labels == i for i in np.unique(labels) if i])"
            raise InvalidInput(f"{self.name}: masks must be a bool array {expected}, not {describe(masks)}{remedy}")
        fits = masks is not None and isinstance(points, np.ndarray) and points.shape == (len(masks), 2)
        if points is not None and not (fits and points.dtype.kind in "iuf"):
            raise InvalidInput(f"{self.name}: points must be one (x, y) per mask, not {describe(points)}")
        if points is not None and not np.all((points >= 0) & (points < image.shape[1::-1])):
            size = f"{image.shape[1]} x {image.shape[0]} pixels"
            raise InvalidInput(f"{self.name}: points must lie in the picture, {size}")


def as_samples(samples: Any) -> list[Sample]:
    """What users pass as samples, as a list of `Sample`.

    Args:
        samples: a file, or a folder, of which four pictures are taken; or a sequence of `Sample`, uint8 arrays
            [H, W, 3], PIL images, or paths.

    Raises:
        InvalidInput: nothing in it, or something that is no picture; the message names it.
    """
    if isinstance(samples, (str, Path)):
        return image_folder(samples) if Path(samples).is_dir() else [read_image(samples)]
    if isinstance(samples, Sample) or not isinstance(samples, Iterable) or isinstance(samples, np.ndarray):
        samples = [samples]
    found = [_as_sample(item, f"sample {index}") for index, item in enumerate(samples)]
    if not found:
        raise InvalidInput("samples is empty: pass at least one image, or None for drawn scenes")
    return found


def _as_sample(item: Any, name: str) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, (str, Path)):
        return read_image(item)
    if hasattr(item, "convert"):  # a PIL image
        return Sample(read_pil(item, name), name=name)
    return Sample(item, name=name)


def read_image(path: str | Path) -> Sample:
    """Reads one picture file as `read_file` does.

    Raises:
        InvalidInput: the file is missing or is no picture that can be used.
    """
    return Sample(read_file(path), name=str(path))


def image_folder(folder: str | Path, limit: int = 4) -> list[Sample]:
    """Reads pictures of a folder, at most `limit` of them, evenly spread in the order of their names.

    Raises:
        InvalidInput: no such folder, no picture in it, or one that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: there is no such folder{', it is a file' if folder.is_file() else ''}")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise InvalidInput(f"{folder}: no image in this folder (looked for {', '.join(sorted(SUFFIXES))})")
    return [read_image(path) for path in spread(paths, limit)]


def scene_samples(count: int = 4, size: int = 1024, first: int = FIRST_SCENE_SEED) -> list[Sample]:
    """Draws `count` scenes of `size` x `size` pixels with exact ground truth, the same ones for the same `first`."""
    from samopt.tiny import draw_scene

    samples = []
    for seed in range(first, first + count):
        scene = draw_scene(seed, size)
        points = scene.points.double().numpy()
        samples.append(Sample(scene.image.numpy(), scene.masks.numpy(), points, name=f"scene {seed}"))
    return samples


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly spread."""
    return [
        items[index] for index in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).round()).astype(int)
    ]
