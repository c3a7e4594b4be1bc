"""Many pictures, each with prompts of its own, answered together: `SamPredictor` for batches.

Pictures are encoded in batches. Prompts are ragged: each picture has its own number of them, and each prompt its own
number of points, with a box, a mask, or neither. Prompts of one form, whichever picture they are for, are decoded
together; what a prompt gets is what `SamPredictor` would answer to it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samopt.base import APPLIED
from samopt.encoding import encode
from samopt.errors import InvalidInput
from samopt.images import as_rgb, writable
from samopt.memory import images_at_once, masks_at_once, memory_budget, prompts_at_once
from samopt.structure import check_sam


@dataclass(frozen=True)
class Prompts:
    """N prompts of one form for one picture, in its pixels. At least one of points, boxes and masks is given.

    Attributes:
        points: (x, y), [N, P, 2], or None.
        labels: 1 for a point on the object, 0 for one beside it, [N, P]; None where there are no points.
        boxes: (x0, y0, x1, y1), [N, 4], or None.
        masks: low-resolution logits of an earlier answer, [N, 1, h, w], or None.
    """

    points: Any = None
    labels: Any = None
    boxes: Any = None
    masks: Any = None


@dataclass(frozen=True)
class Embedding:
    """A picture as the image encoder sees it, all that prompts need of it.

    Attributes:
        features: [C, h, w].
        original_size: the picture's (H, W) in pixels.
        input_size: the (h, w) it has in the model's input.
    """

    features: Tensor
    original_size: tuple[int, int]
    input_size: tuple[int, int]


@dataclass(frozen=True)
class BatchAnswer:
    """What a picture's N prompts got, in their order, on the model's device.

    Attributes:
        masks: bool [N, C, H, W] at the picture's size; C is 3 with multimask_output, else 1.
        iou_predictions: float32 [N, C].
        low_res_masks: float32 logits [N, C, h, w], which may go into `Prompts.masks`.
    """

    masks: Tensor
    iou_predictions: Tensor
    low_res_masks: Tensor


@dataclass(frozen=True)
class _Group:
    """`Prompts` of one picture on the model's device, in its input frame, and where their answers belong."""

    picture: int
    first: int  # of the picture's prompts
    points: Tensor | None
    labels: Tensor | None
    boxes: Tensor | None
    masks: Tensor | None

    @property
    def count(self) -> int:
        """How many prompts these are."""
        return next(len(t) for t in (self.points, self.boxes, self.masks) if t is not None)

    @property
    def form(self) -> tuple[int, bool, bool]:
        """What prompts that are decoded together have in common: so many points, a box, a mask."""
        points = -1 if self.points is None else self.points.shape[1]
        return points, self.boxes is not None, self.masks is not None


class BatchPredictor:
    """Predicts masks for many pictures at once.

    Several threads may call `predict` on one predictor; `set_images` replaces the pictures for all of them.

    Args:
        model: a Sam, unmodified or optimised.
        batch_size: pictures to encode together; None takes up to 8, as many as fit into free memory.
        prompts_per_batch: prompts to decode together; None takes up to 256, as many as fit into free memory.

    Raises:
        InvalidInput: no Sam, or a batch size below 1.
    """

    def __init__(self, model: nn.Module, batch_size: int | None = None, prompts_per_batch: int | None = None) -> None:
        check_sam(model)
        for name, size in (("batch_size", batch_size), ("prompts_per_batch", prompts_per_batch)):
            if size is not None and size < 1:
                raise InvalidInput(f"{name} must be at least 1, not {size}")
        self.model: Any = model
        self.batch_size, self.prompts_per_batch = batch_size, prompts_per_batch
        self._embeddings: list[Embedding] = []

    @property
    def embeddings(self) -> list[Embedding]:
        """Those of the pictures, to be kept, and given to `set_embeddings` later."""
        return list(self._embeddings)

    @torch.no_grad()
    def set_images(self, images: Sequence[Any]) -> None:
        """Encodes pictures, of any sizes.

        Args:
            images: RGB, as files, PIL images, uint8 arrays or tensors; see `samopt.images.as_rgb`.

        Raises:
            InvalidInput: something that is no picture, or one too narrow for the model; the pictures set before stay.
        """
        pictures = [as_rgb(image, f"image {index}") for index, image in enumerate(images)]
        at_once = self.batch_size or images_at_once(self.model, memory_budget(self.model.device))
        encoded = encode(self.model, pictures, at_once)
        self._embeddings = [
            Embedding(features, (picture.shape[0], picture.shape[1]), size)
            for picture, (features, size) in zip(pictures, encoded, strict=True)
        ]

    def set_embeddings(self, embeddings: Sequence[Embedding]) -> None:
        """Puts back what `embeddings` gave, of this model, from any device.

        Raises:
            InvalidInput: features of another shape than the model's.
        """
        encoder = self.model.prompt_encoder
        expected = (encoder.embed_dim, *encoder.image_embedding_size)
        for index, embedding in enumerate(embeddings):
            if tuple(embedding.features.shape) != expected:
                shape = list(embedding.features.shape)
                raise InvalidInput(f"embedding {index} is {shape}, and this model's are {list(expected)}")
        self._embeddings = [
            Embedding(e.features.to(self.model.device, torch.float32), e.original_size, e.input_size)
            for e in embeddings
        ]

    @torch.no_grad()
    def predict(
        self, prompts: Sequence[Prompts | Sequence[Prompts] | None], multimask_output: bool = True
    ) -> list[BatchAnswer]:
        """Answers prompts.

        Args:
            prompts: for each picture its prompts: of one form, of several, or None for no prompts.
            multimask_output: three masks for each prompt, or one; as SamPredictor has it.

        Returns:
            An answer for each picture; its prompts in the order of their forms.

        Raises:
            InvalidInput: not as many as there are pictures, or prompts of another form; picture and prompt are named.
        """
        embeddings = self._embeddings  # another thread may set other pictures meanwhile
        return [
            self._answer(embedding, logits, iou)
            for embedding, (logits, iou) in zip(
                embeddings, self._logits(embeddings, prompts, multimask_output), strict=True
            )
        ]

    @torch.no_grad()
    def predict_logits(
        self, prompts: Sequence[Prompts | Sequence[Prompts] | None], multimask_output: bool = True
    ) -> list[tuple[Tensor, Tensor]]:
        """What `predict` answers before masks are upscaled, which takes most of its memory.

        Args:
            prompts: as for `predict`, and `multimask_output` likewise.

        Returns:
            For each picture `low_res_masks` and `iou_predictions` of its `BatchAnswer`.

        Raises:
            InvalidInput: as `predict`.
        """
        return self._logits(self._embeddings, prompts, multimask_output)

    def _logits(
        self,
        embeddings: Sequence[Embedding],
        prompts: Sequence[Prompts | Sequence[Prompts] | None],
        multimask_output: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        if len(prompts) != len(embeddings):
            raise InvalidInput(f"there are prompts for {len(prompts)} pictures, and {len(embeddings)} pictures are set")
        groups = [
            group
            for index, (embedding, asked) in enumerate(zip(embeddings, prompts, strict=True))
            for group in self._groups(index, embedding, asked)
        ]
        low_res: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in embeddings]
        for _, alike in itertools.groupby(sorted(groups, key=lambda g: g.form), key=lambda g: g.form):
            for batch in self._batches(list(alike)):
                self._decode(batch, embeddings, multimask_output, low_res)
        channels = 3 if multimask_output else 1
        none = (
            torch.empty(0, channels, *self.model.prompt_encoder.mask_input_size, device=self.model.device),
            torch.empty(0, channels, device=self.model.device),
        )
        in_order = ([found[first] for first in sorted(found)] or [none] for found in low_res)
        return [
            (torch.cat([logits for logits, _ in parts]), torch.cat([iou for _, iou in parts])) for parts in in_order
        ]

    def _groups(self, index: int, embedding: Embedding, asked: Prompts | Sequence[Prompts] | None) -> Iterator[_Group]:
        first = 0
        for number, prompts in enumerate([] if asked is None else [asked] if isinstance(asked, Prompts) else asked):
            where = f"picture {index}, prompts {number}"
            if not isinstance(prompts, Prompts):
                raise InvalidInput(f"{where}: pass samopt.Prompts, not {type(prompts).__name__}")
            group = self._group(prompts, index, first, embedding, where)
            if group.count:
                yield group
            first += group.count

    def _group(self, prompts: Prompts, index: int, first: int, embedding: Embedding, where: str) -> _Group:
        device = self.model.device

        def tensor(value: Any, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if value is None else torch.as_tensor(writable(value), device=device).to(dtype)

        points, labels = tensor(prompts.points), tensor(prompts.labels, torch.int)
        boxes, masks = tensor(prompts.boxes), tensor(prompts.masks)
        _check(points, labels, boxes, masks, self.model.prompt_encoder.mask_input_size, where)
        corners = None if boxes is None else _to_input(boxes.view(-1, 2, 2), embedding).view(-1, 4)
        return _Group(index, first, None if points is None else _to_input(points, embedding), labels, corners, masks)

    def _batches(self, groups: list[_Group]) -> Iterator[list[_Group]]:
        """Prompts of one form in batches that fit into memory; of one picture each where the decoder takes no more."""
        count = sum(group.count for group in groups)
        at_once = self.prompts_per_batch or prompts_at_once(self.model, memory_budget(self.model.device), count)
        several = "FusedMaskDecoder" in vars(self.model.mask_decoder).get(APPLIED, ())
        batch: list[_Group] = []
        held = 0
        for group in groups:
            for part in _split(group, at_once):
                if batch and (held + part.count > at_once or not (several or batch[0].picture == part.picture)):
                    yield batch
                    batch, held = [], 0
                batch.append(part)
                held += part.count
        yield batch

    def _decode(
        self,
        batch: list[_Group],
        embeddings: Sequence[Embedding],
        multimask_output: bool,
        found: list[dict[int, tuple[Tensor, Tensor]]],
    ) -> None:
        def joined(name: str) -> Tensor | None:
            parts = [getattr(group, name) for group in batch]
            return None if parts[0] is None else torch.cat(parts)

        points = joined("points")
        sparse, dense = self.model.prompt_encoder(
            points=None if points is None else (points, joined("labels")), boxes=joined("boxes"), masks=joined("masks")
        )
        pictures = list(dict.fromkeys(group.picture for group in batch))
        features = torch.stack([embeddings[picture].features for picture in pictures])
        if len(pictures) > 1:
            counts = [sum(group.count for group in batch if group.picture == picture) for picture in pictures]
            repeats = torch.tensor(counts).to(features.device, non_blocking=True)
            features = features.repeat_interleave(repeats, dim=0, output_size=sum(counts))
        masks, iou = self.model.mask_decoder(
            image_embeddings=features,
            image_pe=self.model.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=multimask_output,
        )
        sizes = [group.count for group in batch]
        for group, logits, predicted in zip(batch, masks.split(sizes), iou.split(sizes), strict=True):
            found[group.picture][group.first] = logits, predicted

    def _answer(self, embedding: Embedding, low_res: Tensor, iou: Tensor) -> BatchAnswer:
        size, channels = embedding.original_size, low_res.shape[1]
        if not len(low_res):  # which PyTorch's interpolation refuses
            return BatchAnswer(low_res.new_empty(0, channels, *size, dtype=torch.bool), iou, low_res)
        at_once = max(1, masks_at_once(self.model, memory_budget(low_res.device), size) // channels)
        masks = [
            self.model.postprocess_masks(part, embedding.input_size, size) > self.model.mask_threshold
            for part in low_res.split(at_once)
        ]
        return BatchAnswer(torch.cat(masks), iou, low_res)


def _to_input(points: Tensor, embedding: Embedding) -> Tensor:
    """Points (x, y) [..., 2] of a picture's pixels in the model's input frame."""
    (height, width), (h, w) = embedding.original_size, embedding.input_size
    return torch.stack([points[..., 0] * (w / width), points[..., 1] * (h / height)], dim=-1)


def _split(group: _Group, at_once: int) -> Iterator[_Group]:
    for start in range(0, group.count, at_once):
        parts = (
            None if t is None else t[start : start + at_once]
            for t in (group.points, group.labels, group.boxes, group.masks)
        )
        yield _Group(group.picture, group.first + start, *parts)


def _check(
    points: Tensor | None,
    labels: Tensor | None,
    boxes: Tensor | None,
    masks: Tensor | None,
    mask_size: tuple[int, int],
    where: str,
) -> None:
    """Raises InvalidInput for prompts that are not of one form."""
    given = {"points": points, "labels": labels, "boxes": boxes, "masks": masks}
    shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if not shapes.keys() - {"labels"}:
        raise InvalidInput(f"{where}: give points, boxes or masks")
    if (points is None) is not (labels is None):
        raise InvalidInput(f"{where}: points come with labels, 1 for on the object and 0 for beside it")
    alike = points is None or labels is None or (points.dim() == 3 and labels.shape == points.shape[:2])
    if points is not None and (not alike or points.shape[-1] != 2):
        raise InvalidInput(
            f"{where}: points must be [N, P, 2] and labels [N, P], not {shapes['points']} and {shapes['labels']}"
        )
    if boxes is not None and (boxes.dim() != 2 or boxes.shape[1] != 4):
        raise InvalidInput(f"{where}: boxes must be [N, 4], not {shapes['boxes']}")
    if masks is not None and (masks.dim() != 4 or masks.shape[1:] != (1, *mask_size)):
        height, width = mask_size
        raise InvalidInput(f"{where}: masks must be logits [N, 1, {height}, {width}], not {shapes['masks']}")
    if len({shape[0] for shape in shapes.values()}) > 1:
        counts = ", ".join(f"{shape[0]} {name}" for name, shape in shapes.items())
        raise InvalidInput(f"{where}: each prompt has one of each, and there are {counts}")
