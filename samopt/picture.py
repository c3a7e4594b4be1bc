"""One picture of what optimising did: the masks before, the masks after, and where they differ."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from samopt.observe import check_size
from samopt.prompts import choose_objects, point_grid
from samopt.samples import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 8  # points a side, where a picture comes without prompts
OBJECTS = 24  # at most this many masks are drawn
SHOWN = 1024  # longest side of the picture that is segmented and drawn


@dataclass(frozen=True, eq=False)  # arrays have no single truth to be equal by
class MaskComparison:
    """The masks of two models for the same points, drawn over the picture.

    Attributes:
        name: of the picture.
        points: how many were asked for.
        image: the picture, uint8 [H, W, 3]; the points are drawn on it, and on the next two.
        before: the masks of the unmodified model over it, likewise.
        after: those of the optimised one.
        difference: the picture in grey, and in red, larger than they are, the pixels at which any mask differs.
        share: of those pixels.
        changed: for how many points the optimised model would choose another of its three masks.
    """

    name: str
    points: int
    image: NDArray[np.uint8] = field(repr=False)
    before: NDArray[np.uint8] = field(repr=False)
    after: NDArray[np.uint8] = field(repr=False)
    difference: NDArray[np.uint8] = field(repr=False)
    share: float
    changed: int

    def panels(self) -> list[tuple[str, NDArray[np.uint8]]]:
        """The four pictures from left to right, each with its title."""
        return [
            (f"{Path(self.name).name}, {self.points} points", self.image),
            ("unmodified", self.before),
            (f"optimised (another mask chosen at {self.changed} points)", self.after),
            (f"differ: {self.share:.3%} of the pixels (drawn larger)", self.difference),
        ]

    def save(self, path: str | Path) -> None:
        """Writes the four pictures side by side as one PNG."""
        self._figure().savefig(path, dpi=110, format="png")

    def _repr_jpeg_(self) -> bytes:
        """The four pictures side by side, small, for a notebook."""
        data = io.BytesIO()
        self._figure().savefig(data, dpi=65, format="jpeg")
        return data.getvalue()

    def _figure(self) -> Figure:
        from matplotlib.figure import Figure

        panels = self.panels()
        height, width = self.image.shape[:2]
        figure = Figure(figsize=(16, 4.4 * height / width + 0.4), layout="constrained")
        for axes, (title, image) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            axes.imshow(image)
            axes.set_title(title, fontsize=10)
            axes.axis("off")
        return figure


def compare_masks(unmodified: nn.Module, optimised: nn.Module, sample: Sample) -> MaskComparison:
    """Asks both models for masks at the same points.

    Each mask is the one the unmodified model chose of its three.

    Args:
        unmodified: a Sam.
        optimised: the Sam made from it.
        sample: the picture; its points are the prompts, a grid over it where it has none.
    """
    asked = sample
    sample = _shrunk(sample)
    points = point_grid(sample.image.shape[:2], GRID) if sample.points is None else sample.points
    before, iou = _segment(unmodified, sample, points, choice=None)
    if sample.points is None:
        kept = _distinct(before, iou.max(axis=1))
        points, before, iou = points[kept], before[kept], iou[kept]
    choice = iou.argmax(axis=1)
    after, iou = _segment(optimised, sample, points, choice)
    differs = (before != after).any(axis=0)
    drawn = [sample.image, overlay(sample.image, before), overlay(sample.image, after)]
    image, masks_before, masks_after = (_dotted(each, points) for each in drawn)
    return MaskComparison(
        name=asked.name,
        points=len(points),
        image=image,
        before=masks_before,
        after=masks_after,
        difference=_mark(sample.image, differs),
        share=float(differs.mean()),
        changed=int((iou.argmax(axis=1) != choice).sum()),
    )


def save_comparison(unmodified: nn.Module, optimised: nn.Module, sample: Sample, path: str | Path) -> float:
    """Writes what `compare_masks` found as one PNG; returns the share of pixels at which any of the masks differs."""
    found = compare_masks(unmodified, optimised, sample)
    found.save(path)
    return found.share


def overlay(image: NDArray[np.uint8], masks: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Draws masks [N, H, W] over a picture [H, W, 3], the largest first, each in a colour of its own with a rim."""
    from matplotlib import colormaps
    from scipy import ndimage

    colours = colormaps["tab20"](np.arange(len(masks)) % 20)[:, :3] * 255
    drawn = image.astype(np.float64) * 0.6
    for index in np.argsort(-masks.sum(axis=(1, 2)), kind="stable"):
        inside = masks[index]
        drawn[inside] = 0.45 * image[inside] + 0.55 * colours[index]
        drawn[inside & ~ndimage.binary_erosion(inside, iterations=max(1, len(image) // 400))] = colours[index]
    return drawn.round().astype(np.uint8)


def _dotted(image: NDArray[np.uint8], points: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The picture with a white dot, rimmed in black, at each point."""
    drawn = Image.fromarray(image)
    pen = ImageDraw.Draw(drawn)
    radius = max(2, round(max(image.shape) / 128))
    for x, y in points:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), "white", "black", max(1, radius // 4))
    return np.array(drawn)


def _mark(image: NDArray[np.uint8], pixels: NDArray[np.bool_]) -> NDArray[np.uint8]:
    from scipy import ndimage

    grey = np.repeat(image.mean(axis=2, keepdims=True) * 0.5, 3, axis=2)
    grey[ndimage.binary_dilation(pixels, iterations=max(1, len(image) // 250))] = (255, 0, 0)
    return grey.round().astype(np.uint8)


def _shrunk(sample: Sample) -> Sample:
    """The sample with a longest side of at most SHOWN pixels: panels are no larger, and masks would fill the memory."""
    height, width = sample.image.shape[:2]
    scale = SHOWN / max(height, width)
    if scale >= 1:
        return sample
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = np.array(Image.fromarray(sample.image).resize(size))
    points = None if sample.points is None else sample.points * (np.array(size) / (width, height))
    # A sample's points belong to masks, which are not looked at here.
    masks = None if points is None else np.zeros((len(points), *image.shape[:2]), dtype=bool)
    return Sample(image, masks, points, sample.name)


@torch.no_grad()
def _segment(
    model: nn.Module, sample: Sample, points: NDArray[np.float64], choice: NDArray[np.intp] | None
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """One of the three masks at each point [N, H, W], and the predicted IoU of all three [N, 3].

    Args:
        model: a Sam.
        sample: the picture.
        points: (x, y) in its pixels, [N, 2].
        choice: which mask, [N]; None for the one with the best predicted IoU.
    """
    from segment_anything import SamPredictor

    predictor = SamPredictor(model)
    check_size(predictor.transform, sample)
    predictor.set_image(sample.image)
    coords = predictor.transform.apply_coords(points, sample.image.shape[:2])
    chosen, scores = [], []
    for few in torch.arange(len(points)).split(16):
        at = torch.as_tensor(coords[few.numpy()], dtype=torch.float32, device=predictor.device)[:, None]
        labels = torch.ones(at.shape[:2], dtype=torch.int32, device=predictor.device)
        masks, iou, _ = predictor.predict_torch(at, labels)
        scores.append(iou.float().cpu().numpy())
        taken = scores[-1].argmax(axis=1) if choice is None else choice[few.numpy()]
        chosen.append(masks.cpu().numpy()[np.arange(len(few)), taken])
    return np.concatenate(chosen), np.concatenate(scores)


def _distinct(masks: NDArray[np.bool_], scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Indices of masks that are not near-copies of a better one, at most OBJECTS of them."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        overlaps = [(masks[index] & masks[k]).sum() / max(1, (masks[index] | masks[k]).sum()) for k in kept]
        if masks[index].any() and max(overlaps, default=0.0) < 0.7:
            kept.append(index)
    kept = kept or [0]
    return np.array(kept)[choose_objects(masks[kept], OBJECTS)] if masks[kept].any() else np.array(kept)
