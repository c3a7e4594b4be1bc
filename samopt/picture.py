"""One picture of what optimising did: the masks before, the masks after, and where they differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samopt.prompts import choose_objects
from samopt.samples import Sample

GRID = 8  # points a side, where a picture comes without prompts
OBJECTS = 24  # at most this many masks are drawn


def save_comparison(unmodified: nn.Module, optimised: nn.Module, sample: Sample, path: str | Path) -> float:
    """Writes one PNG: the picture, the masks of both models for the same points, and where they differ.

    Args:
        unmodified: a Sam.
        optimised: the Sam made from it.
        sample: the picture; its points are the prompts, a grid over it where it has none.
        path: the PNG to write.

    Returns:
        The share of pixels at which any of the masks differs. Each mask is the one the unmodified model chose of its
        three; the picture's titles tell for how many points the optimised model would choose another.
    """
    from matplotlib.figure import Figure

    points = _grid(sample) if sample.points is None else sample.points
    masks, iou = _segment(unmodified, sample, points)
    choice = iou.argmax(axis=1)
    before = masks[np.arange(len(points)), choice]
    if sample.points is None:
        kept = _distinct(before, iou.max(axis=1))
        points, choice, before = points[kept], choice[kept], before[kept]
    masks, iou = _segment(optimised, sample, points)
    after = masks[np.arange(len(points)), choice]
    changed = int((iou.argmax(axis=1) != choice).sum())
    differs = (before != after).any(axis=0)
    share = float(differs.mean())
    panels = [
        (f"{Path(sample.name).name}, {len(points)} points", sample.image),
        ("unmodified", overlay(sample.image, before)),
        (f"optimised (another mask chosen at {changed} points)", overlay(sample.image, after)),
        (f"differ: {share:.3%} of the pixels (drawn larger)", _mark(sample.image, differs)),
    ]
    height, width = sample.image.shape[:2]
    figure = Figure(figsize=(16, 4.4 * height / width + 0.4), layout="constrained")
    for axes, (title, image) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.imshow(image)
        axes.set_title(title, fontsize=10)
        axes.axis("off")
        if image is not panels[-1][1]:
            axes.plot(points[:, 0], points[:, 1], ".", color="white", markeredgecolor="black", markersize=7)
    figure.savefig(path, dpi=110)
    return share


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


def _mark(image: NDArray[np.uint8], pixels: NDArray[np.bool_]) -> NDArray[np.uint8]:
    from scipy import ndimage

    grey = np.repeat(image.mean(axis=2, keepdims=True) * 0.5, 3, axis=2)
    grey[ndimage.binary_dilation(pixels, iterations=max(1, len(image) // 250))] = (255, 0, 0)
    return grey.round().astype(np.uint8)


def _grid(sample: Sample) -> NDArray[np.float64]:
    """GRID x GRID points (x, y) over a picture, [N, 2]."""
    height, width = sample.image.shape[:2]
    axis = (np.arange(GRID) + 0.5) / GRID
    return np.stack(np.meshgrid(axis * width, axis * height), axis=-1).reshape(-1, 2)


@torch.no_grad()
def _segment(
    model: nn.Module, sample: Sample, points: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """The three masks at each point [N, 3, H, W], and their predicted IoU [N, 3]."""
    from segment_anything import SamPredictor

    predictor = SamPredictor(model)
    predictor.set_image(sample.image)
    coords = predictor.transform.apply_coords(points, sample.image.shape[:2])
    masks, iou = [], []
    # A few at a time: the logits of many points at a photo's size would not fit into memory.
    for few in torch.as_tensor(coords, dtype=torch.float32, device=predictor.device)[:, None].split(8):
        labels = torch.ones(few.shape[:2], dtype=torch.int32, device=predictor.device)
        found = predictor.predict_torch(few, labels)
        masks.append(found[0].cpu().numpy())
        iou.append(found[1].float().cpu().numpy())
    return np.concatenate(masks), np.concatenate(iou)


def _distinct(masks: NDArray[np.bool_], scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Indices of masks that are not near-copies of a better one, at most OBJECTS of them."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        overlaps = [(masks[index] & masks[k]).sum() / max(1, (masks[index] | masks[k]).sum()) for k in kept]
        if masks[index].any() and max(overlaps, default=0.0) < 0.7:
            kept.append(index)
    kept = kept or [0]
    return np.array(kept)[choose_objects(masks[kept], OBJECTS)] if masks[kept].any() else np.array(kept)
