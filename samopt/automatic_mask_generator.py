"""Every mask of an image, as Meta's SamAutomaticMaskGenerator finds them, with the work left on the device.

Meta's upscales all masks of a batch to the image's size at once, so it decodes 64 prompts at a time, and brings every
mask that passes its thresholds to the host before duplicates are dropped. Here masks stay logits of low resolution
until only survivors are left; masks of the image's size exist a few at a time and become numbers, or run lengths, at
once; and what was found comes to the host in one transfer per image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.crops import Box, crop_boxes, unit_grid
from samopt.encoding import encode
from samopt.errors import InvalidInput
from samopt.images import as_rgb
from samopt.mask_search import Search, Thresholds, View, to_host
from samopt.masks import area_of, changes_of, coco_rle, drop_islands, fill_holes, mask_of, run_lengths
from samopt.memory import images_at_once, memory_budget
from samopt.observe import check_size
from samopt.passes.kernels.devices import upload
from samopt.prompts import box_of
from samopt.room import Room
from samopt.samples import Sample
from samopt.structure import check_sam

OUTPUT_MODES = ("binary_mask", "uncompressed_rle", "coco_rle")


@dataclass(eq=False)
class _Found:
    """A mask on the host, with what is told of it."""

    rle: dict[str, Any]
    box: list[int]
    iou: float
    stability: float
    point: list[float]
    crop: Box


class AutomaticMaskGenerator:
    """Finds the masks of whole images: prompts a model with a grid of points, drops poor masks and duplicates.

    It takes the arguments of Meta's SamAutomaticMaskGenerator, with the same defaults but for `points_per_batch`, and
    returns the same records. Threads may share it: of a call it keeps only how much room the masks took.

    Args:
        model: a Sam, as it is or from `samopt.optimize`.
        points_per_side: prompts along one side of the image; None with `point_grids`.
        points_per_batch: prompts decoded together; None for up to 256, as fit into half of the GPU's free memory, or
            into 2 GiB on a CPU.
        pred_iou_thresh: masks the model rates no higher are dropped; 0 keeps all.
        stability_score_thresh: masks of a lower stability score are dropped; 0 keeps all.
        stability_score_offset: how far the logits' threshold is moved for the stability score.
        box_nms_thresh: of two masks whose boxes have a higher IoU, the one rated lower is dropped.
        crop_n_layers: how many layers of crops are searched besides the whole image; layer i has 4**i of them.
        crop_nms_thresh: like `box_nms_thresh`, between crops; masks of smaller crops are preferred.
        crop_overlap_ratio: how far crops of the first layer overlap, as a part of the image's short side.
        crop_n_points_downscale_factor: layer i has `points_per_side` over this factor**i points along a side.
        point_grids: per layer, points (x, y) from 0 to 1, float [N, 2]; instead of `points_per_side`.
        min_mask_region_area: holes and islands of fewer pixels are removed from masks; 0 leaves them.
        output_mode: "binary_mask", "uncompressed_rle", or "coco_rle".
        views_per_batch: images, and crops of them, encoded together, in batches filled up to that many; None for up
            to 8, as fit into memory, and batches of any size.

    Raises:
        InvalidInput: an argument that cannot be used; `model` is no Sam.
    """

    def __init__(
        self,
        model: nn.Module,
        points_per_side: int | None = 32,
        points_per_batch: int | None = None,
        pred_iou_thresh: float = 0.88,
        stability_score_thresh: float = 0.95,
        stability_score_offset: float = 1.0,
        box_nms_thresh: float = 0.7,
        crop_n_layers: int = 0,
        crop_nms_thresh: float = 0.7,
        crop_overlap_ratio: float = 512 / 1500,
        crop_n_points_downscale_factor: int = 1,
        point_grids: Sequence[NDArray[np.floating]] | None = None,
        min_mask_region_area: int = 0,
        output_mode: str = "binary_mask",
        views_per_batch: int | None = None,
    ) -> None:
        check_sam(model)
        for name, value in (("points_per_batch", points_per_batch), ("views_per_batch", views_per_batch)):
            if value is not None:
                _check_at_least(name, value, 1)
        _check_at_least("crop_n_layers", crop_n_layers, 0)
        if not 0 <= crop_overlap_ratio <= 1:
            raise InvalidInput(f"crop_overlap_ratio is {crop_overlap_ratio}; it must be from 0 to 1")
        if output_mode not in OUTPUT_MODES:
            raise InvalidInput(f"output_mode is {output_mode!r}; it must be one of {', '.join(OUTPUT_MODES)}")
        if (points_per_side is None) == (point_grids is None):
            raise InvalidInput("pass points_per_side or point_grids, one of the two: the other must be None")
        if points_per_side is not None:
            self.point_grids = _grids(points_per_side, crop_n_layers, crop_n_points_downscale_factor)
        else:
            self.point_grids = _checked_grids(point_grids or (), crop_n_layers)
        # As any Sam: what `check_sam` cannot say of attributes, typing cannot either.
        self.model = cast(Any, model)
        self.points_per_batch, self.views_per_batch = points_per_batch, views_per_batch
        self.thresholds = Thresholds(pred_iou_thresh, stability_score_thresh, stability_score_offset, box_nms_thresh)
        self.crop_n_layers = crop_n_layers
        self.crop_nms_thresh = crop_nms_thresh
        self.crop_overlap_ratio = crop_overlap_ratio
        self.crop_n_points_downscale_factor = crop_n_points_downscale_factor
        self.min_mask_region_area = min_mask_region_area
        self.output_mode = output_mode
        # A GPU is given room and asked later; with a CPU there is nothing to wait for.
        self._room = Room() if self.model.device.type == "cuda" else None

    def generate(self, image: NDArray[np.uint8]) -> list[dict[str, Any]]:
        """Finds the masks of one image.

        Args:
            image: RGB, uint8 [H, W, 3].

        Returns:
            A record per mask:

            - segmentation: bool [H, W], or run lengths as `output_mode` says.
            - area: its pixels.
            - bbox: the box around it, (x, y, width, height).
            - predicted_iou: how good the model says it is.
            - point_coords: the prompt it answers, [[x, y]] in pixels.
            - stability_score: the IoU of the masks at a higher and at a lower threshold.
            - crop_box: the crop it was found in, (x, y, width, height).

        Raises:
            InvalidInput: no such image, or one so narrow that the model would see nothing.
        """
        return self._generate([Sample(image)])[0]

    def generate_batch(self, images: Sequence[NDArray[np.uint8]]) -> list[list[dict[str, Any]]]:
        """Finds the masks of several images, of any sizes, which are encoded together.

        Args:
            images: RGB, uint8 [H, W, 3] each.

        Returns:
            Per image, what `generate` returns of it.

        Raises:
            InvalidInput: an image that `generate` would refuse; the message says which.
        """
        return self._generate([Sample(image, name=f"image {index}") for index, image in enumerate(images)])

    @torch.no_grad()  # not inference mode: what is compiled is compiled for SamPredictor's mode, which is this
    def _generate(self, samples: list[Sample]) -> list[list[dict[str, Any]]]:
        from segment_anything.utils.transforms import ResizeLongestSide

        transform = ResizeLongestSide(self.model.image_encoder.img_size)
        for sample in samples:
            check_size(transform, sample)
        views = [view for index, sample in enumerate(samples) for view in self._views(index, sample.image)]
        records = []
        for _, searches in itertools.groupby(self._searches(views, samples, transform), lambda one: one.view.image):
            masks = self._masks(list(searches))
            if self.crop_n_layers > 0:
                masks = self._without_duplicates_of_crops(masks)
            if self.min_mask_region_area > 0:
                masks = self._without_small_regions(masks)
            records.append([self._record(mask) for mask in masks])
        return records

    def _views(self, index: int, image: NDArray[np.uint8]) -> Iterator[View]:
        for layer, box in crop_boxes(image.shape[:2], self.crop_n_layers, self.crop_overlap_ratio):
            x0, y0, x1, y1 = box
            yield View(index, image[y0:y1, x0:x1], box, self.point_grids[layer] * np.array([x1 - x0, y1 - y0]))

    def _searches(self, views: list[View], samples: list[Sample], transform: Any) -> Iterator[Search]:
        """Encodes the views, as many at once as memory allows or as is asked."""
        together = self.views_per_batch or images_at_once(self.model, memory_budget(self.model.device))
        pictures = (as_rgb(self._in_the_models_order(view.pixels)) for view in views)
        encoded = encode(self.model, pictures, together, fill=self.views_per_batch is not None)
        for view, (features, seen) in zip(views, encoded, strict=True):
            yield Search(
                self.model,
                view,
                features=features[None],
                prompts=upload(transform.apply_coords(view.points, view.size), self.model.device),
                input_size=seen,
                image_size=samples[view.image].image.shape[:2],
                thresholds=self.thresholds,
                points_per_batch=self.points_per_batch,
                budget=memory_budget(self.model.device),
            )

    def _masks(self, searches: list[Search]) -> list[_Found]:
        """The masks of the views of one image, brought to the host together."""
        room = self._room and self._room.rounded()
        results = to_host([search.run(room) for search in searches])
        while room is not None and (short := [index for index, (_, _, took) in enumerate(results) if room.lacks(took)]):
            for index in short:
                room = room.after(results[index][2]).rounded()
            again = to_host([searches[index].run(room) for index in short])
            for index, result in zip(short, again, strict=True):
                results[index] = result
        for _, _, took in results:
            self._room = self._room and self._room.after(took)
        return [
            _found(row, where, search)
            for search, (table, changes, _) in zip(searches, results, strict=True)
            for row, where in zip(table, changes, strict=True)
        ]

    def _in_the_models_order(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels if self.model.image_format == "RGB" else pixels[..., ::-1]

    def _without_duplicates_of_crops(self, masks: list[_Found]) -> list[_Found]:
        """Drops duplicates between crops, and prefers what the smaller crop found."""
        areas = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (mask.crop for mask in masks)]
        return _without_duplicates(masks, 1 / torch.tensor(areas), self.crop_nms_thresh)

    def _without_small_regions(self, masks: list[_Found]) -> list[_Found]:
        """Removes small holes and islands, and duplicates that this makes; masks that had none are preferred."""
        unchanged = []
        for mask in masks:
            before = mask_of(mask.rle)
            after = drop_islands(fill_holes(before, self.min_mask_region_area), self.min_mask_region_area)
            unchanged.append(float(after is before))
            if after is not before:
                first, _, changes = changes_of(torch.from_numpy(after)[None])
                mask.rle = run_lengths(bool(first), changes.numpy(), after.shape)
                mask.box = box_of(after).astype(int).tolist() if after.any() else [0, 0, 0, 0]
        threshold = max(self.thresholds.box_nms, self.crop_nms_thresh)
        return _without_duplicates(masks, torch.tensor(unchanged), threshold)

    def _record(self, mask: _Found) -> dict[str, Any]:
        encode = {"binary_mask": mask_of, "coco_rle": coco_rle}.get(self.output_mode, lambda rle: rle)
        return {
            "segmentation": encode(mask.rle),
            "area": area_of(mask.rle),
            "bbox": _xywh(mask.box),
            "predicted_iou": mask.iou,
            "point_coords": [mask.point],
            "stability_score": mask.stability,
            "crop_box": _xywh(mask.crop),
        }


def _found(row: NDArray[np.float64], changes: NDArray[np.int32], search: Search) -> _Found:
    """A mask as the host has it, of its row in a search's table."""
    iou, stability, *box, point, first, _ = row.tolist()
    return _Found(
        rle=run_lengths(bool(first), changes, search.image_size),
        box=[int(value) for value in box],
        iou=iou,
        stability=stability,
        point=(search.view.points[int(point)] + search.view.box[:2]).tolist(),
        crop=search.view.box,
    )


def _without_duplicates(masks: list[_Found], scores: Tensor, threshold: float) -> list[_Found]:
    """Of masks whose boxes have an IoU above `threshold`, the one of the highest score; the highest scores first."""
    from torchvision.ops import nms

    boxes = torch.tensor([mask.box for mask in masks], dtype=torch.float32).reshape(-1, 4)
    return [masks[index] for index in nms(boxes, scores.float(), threshold).tolist()]


def _xywh(box: Sequence[int]) -> list[int]:
    x0, y0, x1, y1 = box
    return [x0, y0, x1 - x0, y1 - y0]


def _check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidInput(f"{name} is {value}; it must be a whole number of at least {least}")


def _grids(side: int, layers: int, factor: int) -> list[NDArray[np.float64]]:
    _check_at_least("points_per_side", side, 1)
    _check_at_least("crop_n_points_downscale_factor", factor, 1)
    sides = [int(side / factor**layer) for layer in range(layers + 1)]
    if min(sides) < 1:
        found = f"points_per_side={side} and crop_n_points_downscale_factor={factor}"
        raise InvalidInput(f"{found} leave layer {int(np.argmin(sides))} without points; raise the first")
    return [unit_grid(side) for side in sides]


def _checked_grids(grids: Sequence[NDArray[np.floating]], layers: int) -> list[NDArray[np.float64]]:
    if len(grids) <= layers:
        needed = f"crop_n_layers={layers} needs {layers + 1}, one for the whole image and one per layer"
        raise InvalidInput(f"point_grids has {len(grids)} grids, but {needed}")
    for index, grid in enumerate(grids):
        shape = list(np.shape(grid))
        if len(shape) != 2 or shape[1] != 2 or shape[0] == 0:
            raise InvalidInput(f"point_grids[{index}] must be points (x, y), an array [N, 2], not {shape}")
    return [np.asarray(grid, dtype=np.float64) for grid in grids]
