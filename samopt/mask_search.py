"""The search of a view of an image for masks, on the device and without waiting for it.

How many masks pass the thresholds, and how often they change along their columns, only the device knows, and to ask it
is to wait for it. So there is room for a number of each, chosen before; they are counted, and the counts come to the
host together with the masks. Where there was too little room the view is searched again, with enough. On a CPU, where
asking costs nothing, there is room for what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.crops import Box, cut_off
from samopt.masks import boxes_of, changes_of, stability_scores
from samopt.memory import evenly, masks_at_once, prompts_at_once
from samopt.nms import without_duplicates
from samopt.passes.kernels.upscale_masks import Frame, launch, measure
from samopt.passes.upscale_masks import upscales_in_one_step
from samopt.room import Room, first_of

COLUMNS = 9  # of a mask's row: predicted IoU, stability score, box, prompt, first pixel, number of changes


@dataclass(frozen=True)
class Thresholds:
    """What a mask must be to count; see `AutomaticMaskGenerator`."""

    pred_iou: float
    stability_score: float
    stability_score_offset: float
    box_nms: float


@dataclass(frozen=True, eq=False)
class View:
    """A crop of an image, or the whole of it: `pixels` [H, W, 3] at `box`, to be prompted at `points` [N, 2] in it."""

    image: int
    pixels: NDArray[np.uint8]
    box: Box
    points: NDArray[np.float64]

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.pixels.shape[0], self.pixels.shape[1]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Masks of a view, on the device.

    Attributes:
        logits: of low resolution, float [N, h, w].
        iou: what the model predicts, [N].
        stability: float32 [N].
        boxes: in the image's frame, int64 [N, 4].
        points: which of the view's points each answers, int64 [N].
        valid: bool [N]; the others only fill the room.
    """

    logits: Tensor
    iou: Tensor
    stability: Tensor
    boxes: Tensor
    points: Tensor
    valid: Tensor

    def __getitem__(self, index: Tensor) -> Candidates:
        return Candidates(*(value[index] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found, on the device.

    Attributes:
        table: float64 [kept, 9], which holds each figure exactly; see `COLUMNS`.
        changes: where masks change, int32 [groups, changes]: those of a group's masks, one after the other.
        needed: int64, the room that this took, in the order of `Room`.
    """

    table: Tensor
    changes: Tensor
    needed: Tensor


class Search:
    """The search of one view.

    Args:
        model: a Sam.
        view: what is searched.
        features: its embedding [1, C, h, w].
        prompts: its points (x, y) in the model's frame, float64 [N, 2], on the device.
        input_size: (H, W) of the view as the model sees it, without padding.
        image_size: (H, W) of the whole image.
        thresholds: what a mask must be to count.
        points_per_batch: prompts decoded together; None for as many as `budget` allows.
        budget: bytes it may use.
    """

    def __init__(
        self,
        model: Any,
        view: View,
        features: Tensor,
        prompts: Tensor,
        input_size: tuple[int, int],
        image_size: tuple[int, int],
        thresholds: Thresholds,
        points_per_batch: int | None,
        budget: int,
    ) -> None:
        self.model, self.view, self.features, self.prompts = model, view, features, prompts
        self.input_size, self.image_size, self.thresholds = input_size, image_size, thresholds
        self.piece = points_per_batch or prompts_at_once(model, budget, len(prompts))
        self.group = masks_at_once(model, budget, image_size)
        fused = upscales_in_one_step(model) and self.features.is_cuda
        self.frame = Frame(model.image_encoder.img_size, input_size, view.size) if fused else None

    def run(self, room: Room | None) -> Found:
        """Finds the masks of the view, the best rated first: as far as there is room, or all where that is None."""
        limits = (None,) * len(fields(Room)) if room is None else astuple(room)
        room_rated, room_stable, rounds, room_kept, room_changes = limits
        image_pe = self.model.prompt_encoder.get_dense_pe()
        pieces, rated = [], []
        for index, piece in enumerate(self.prompts.split(self.piece)):
            candidates, count = self._candidates(image_pe, piece, index * self.piece, room_rated)
            pieces.append(candidates)
            rated.append(count)
        found = Candidates(*map(torch.cat, zip(*(vars(piece).values() for piece in pieces), strict=True)))
        chosen, stable = first_of(found.valid, room_stable)
        found, exists = found[chosen.clamp(min=0)], chosen >= 0
        threshold = self.thresholds.box_nms
        keep, order, took = without_duplicates(found.boxes, found.iou, exists, threshold, rounds)
        chosen, kept = first_of(keep, room_kept)
        found, exists = found[order[chosen.clamp(min=0)]], chosen >= 0
        table, changes, changed = self._serialise(found, exists, room_changes)
        return Found(table, changes, torch.stack([torch.stack(rated).amax(), stable, took, kept, changed]))

    def _candidates(self, image_pe: Tensor, prompts: Tensor, start: int, room: int | None) -> tuple[Candidates, Tensor]:
        """The masks of some prompts that the model rates well, measured; and how many they are. `start` is the first
        prompt's index."""
        labels = torch.ones(len(prompts), 1, dtype=torch.int, device=prompts.device)
        sparse, dense = self.model.prompt_encoder(points=(prompts[:, None], labels), boxes=None, masks=None)
        logits, iou = self.model.mask_decoder(
            image_embeddings=self.features,
            image_pe=image_pe,
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=True,
        )
        logits, iou = logits.flatten(0, 1), iou.flatten()
        masks = len(iou) // len(prompts)
        least = self.thresholds.pred_iou
        chosen, count = first_of(iou > least if least > 0 else torch.ones_like(iou, dtype=torch.bool), room)
        index = chosen.clamp(min=0)
        logits, iou = logits[index], iou[index]
        valid = chosen >= 0
        stability, boxes = self._measure(logits, valid)
        valid &= ~cut_off(boxes, self.view.box, self.image_size)
        if self.thresholds.stability_score > 0:
            valid &= stability >= self.thresholds.stability_score
        return Candidates(logits, iou, stability, boxes, start + index // masks, valid), count

    def _measure(self, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Stability scores [N] of masks, and their boxes [N, 4] in the image's frame."""
        threshold, offset = self.model.mask_threshold, self.thresholds.stability_score_offset
        if self.frame is not None:
            told = measure(logits, self.frame, threshold, offset, valid)
            stability, boxes = told[:, 0] / told[:, 1], told[:, 2:].long()
        else:
            pieces = (self._upscale(some) for some in logits.split(self.group))
            measured = [(stability_scores(piece, threshold, offset), boxes_of(piece > threshold)) for piece in pieces]
            stability, boxes = map(torch.cat, zip(*measured, strict=True))
        x0, y0, _, _ = self.view.box
        left, top, right, bottom = boxes.unbind(1)
        return stability, torch.stack([left + x0, top + y0, right + x0, bottom + y0], dim=1)

    def _masks(self, logits: Tensor, exists: Tensor) -> Tensor:
        """Masks at the view's size, bool [N, H, W]; empty where there is none."""
        if self.frame is not None:
            masks = launch(logits, self.frame, self.model.mask_threshold, exists)
        else:
            masks = self._upscale(logits) > self.model.mask_threshold
        return masks & exists[:, None, None]

    def _upscale(self, logits: Tensor) -> Tensor:
        """Logits [N, h, w] at the view's size, [N, H, W]."""
        if not len(logits):  # which PyTorch's interpolation refuses
            return logits.new_empty(0, *self.view.size)
        upscaled: Tensor = self.model.postprocess_masks(logits[None], self.input_size, self.view.size)[0]
        return upscaled

    def _serialise(self, found: Candidates, exists: Tensor, room: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Table and changes of `Found`, and the room for changes that this takes."""
        height, width = self.image_size
        x0, y0, x1, y1 = self.view.box
        size = evenly(len(exists), self.group) if len(exists) else 1
        firsts, counts, changes = [], [], []
        for logits, real in zip(found.logits.split(size), exists.split(size), strict=True):
            padded = nn.functional.pad(self._masks(logits, real), (x0, width - x1, y0, height - y1))
            first, count, where = changes_of(padded, room and room * size)
            firsts.append(first)
            counts.append(count)
            changes.append(where)
        most = torch.stack([group.sum() for group in counts]).amax()
        columns = (
            found.iou,
            found.stability,
            *found.boxes.unbind(1),
            found.points,
            torch.cat(firsts),
            torch.cat(counts),
        )
        table = torch.stack([column.double() for column in columns], dim=1)
        return table, nn.utils.rnn.pad_sequence(changes, batch_first=True), -(-most // size)


def to_host(found: Sequence[Found]) -> list[tuple[NDArray[np.float64], list[NDArray[np.int32]], Room]]:
    """What searches found: tables, where each mask changes, and the room that was needed; in one transfer.

    Masks of a search that had too little room are not all there, or not right.

    Returns:
        Of each search: its table [masks, 9]; per mask the indices of the pixels where it changes; and the room.
    """
    parts = [part.contiguous().view(-1).view(torch.uint8) for one in found for part in vars(one).values()]
    packed = torch.cat(parts).cpu().numpy()
    results, start = [], 0
    for one in found:
        arrays = []
        for part, dtype in zip(vars(one).values(), (np.float64, np.int32, np.int64), strict=True):
            end = start + part.numel() * part.element_size()
            arrays.append(packed[start:end].view(dtype).reshape(part.shape))
            start = end
        table, changes, numbers = arrays
        needed = Room(*numbers.tolist())
        results.append((table[: needed.kept], _split(table, changes)[: needed.kept], needed))
    return results


def _split(table: NDArray[np.float64], changes: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Where each mask changes, of groups of equal size, but for the last."""
    group = -(-len(table) // len(changes))
    counts = table[:, -1].astype(int)
    where = []
    for index, row in enumerate(changes):
        of_group = counts[index * group : (index + 1) * group]
        where += np.split(row, of_group.cumsum())[: len(of_group)]
    return where
