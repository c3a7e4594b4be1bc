"""The tasks: every mask of a picture, the masks that prompts ask for, or only the embedding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from samopt.automatic_mask_generator import AutomaticMaskGenerator
from samopt.batch_predictor import BatchPredictor, Embedding, Prompts
from samopt.encoding import encode
from samopt.folders import embeddings, records
from samopt.folders.embeddings import EmbeddingRecord
from samopt.folders.prompts_file import Ask
from samopt.folders.reading import Picture
from samopt.folders.records import Record
from samopt.folders.worker import halving
from samopt.masks import area_of, boxes_of, changes_of, coco_rle, run_lengths, stability_scores
from samopt.memory import masks_at_once, memory_budget

OFFSET = 1.0  # of the stability score's thresholds, as Meta has it


def embed_pictures(model: nn.Module, pictures: Sequence[Picture], batch_size: int) -> list[Embedding]:
    """Encodes pictures in a batch filled up to `batch_size`."""
    on_device = [cast(Tensor, picture.pixels) for picture in pictures]
    if on_device[0].is_pinned():
        on_device = [pixels.to(model.device, non_blocking=True) for pixels in on_device]  # type: ignore[arg-type]
    return [
        Embedding(features, cast(tuple[int, int], picture.size), input_size)
        for picture, (features, input_size) in zip(
            pictures, encode(model, on_device, batch_size, fill=True), strict=True
        )
    ]


class EveryMask:
    """`AutomaticMaskGenerator` on pictures."""

    whole, suffix = True, records.SUFFIX
    write = staticmethod(records.write_masks)

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self._generator = AutomaticMaskGenerator(model, **options, output_mode="uncompressed_rle")

    def wants(self, picture: Picture) -> bool:
        """Any."""
        return True

    def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        """Finds the masks."""
        self._generator.views_per_batch, self._generator.points_per_batch = batch_size, prompts
        return self._generator.generate_batch([cast(Tensor, picture.pixels).numpy() for picture in pictures])

    def finish(self, picture: Picture, result: Any) -> Record:
        """Compresses their run lengths."""
        masks = [{**mask, "segmentation": coco_rle(mask["segmentation"])} for mask in result]
        return Record(picture.index, picture.path, picture.size, masks=masks)

    def record(self, picture: Picture) -> Record:
        """Without masks."""
        return Record(picture.index, picture.path, picture.size, picture.error)


class PromptedMasks:
    """`BatchPredictor` on pictures and their prompts.

    Args:
        model: a Sam.
        asks: prompts by the paths of pictures.
        multimask: of three masks keep the one rated best, or take the single one; None for three where a prompt is a
            single point, which may mean several things.
    """

    whole, suffix = False, records.SUFFIX
    write = staticmethod(records.write_masks)

    def __init__(self, model: nn.Module, asks: dict[str, list[Ask]], multimask: bool | None) -> None:
        self._model: Any = model
        self._asks, self._multimask = asks, multimask
        self._predictor = BatchPredictor(model)

    def wants(self, picture: Picture) -> bool:
        """Those with prompts."""
        return bool(self._asks.get(picture.path))

    def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        """Of each picture its embedding, and of its prompts low-resolution logits [N, h, w] and predicted IoU [N]."""
        embedded = embed_pictures(self._model, pictures, batch_size)
        self._predictor.prompts_per_batch = prompts
        self._predictor.set_embeddings(embedded)
        parts: list[list[tuple[list[int], Tensor, Tensor]]] = [[] for _ in pictures]
        for several in (False, True):
            chosen = [self._chosen(picture, several) for picture in pictures]
            if not any(chosen):
                continue
            groups = [[_prompts([ask for _, ask in group]) for group in forms] for forms in chosen]
            for found, forms, (logits, iou) in zip(
                parts, chosen, self._predictor.predict_logits(groups, multimask_output=several), strict=True
            ):
                if not forms:
                    continue
                best = iou.argmax(1, keepdim=True)
                order = [number for group in forms for number, _ in group]
                found.append((order, logits.take_along_dim(best[..., None, None], 1)[:, 0], iou.gather(1, best)[:, 0]))
        return [(embedding, found) for embedding, found in zip(embedded, parts, strict=True)]

    def _chosen(self, picture: Picture, several: bool) -> list[list[tuple[int, Ask]]]:
        """The picture's prompts, numbered, that are to get three masks or one, by their forms."""
        asks = [
            (number, ask)
            for number, ask in enumerate(self._asks[picture.path])
            if (ask.ambiguous if self._multimask is None else self._multimask) is several
        ]
        asks.sort(key=lambda pair: pair[1].form)
        return [list(group) for _, group in itertools.groupby(asks, key=lambda pair: pair[1].form)]

    def finish(self, picture: Picture, result: Any) -> Record:
        """Upscales the masks, as many at once as memory allows, and takes what is told of them to the host."""
        embedding, parts = result
        asks = self._asks[picture.path]
        masks: list[Any] = [None] * len(asks)
        for order, logits, iou in parts:
            at_once = masks_at_once(self._model, memory_budget(logits.device), embedding.original_size)
            told = halving(functools.partial(self._told, logits, iou, embedding), at_once)
            for number, mask in zip(order, told, strict=True):
                ask = asks[number]
                points = [list(point) for point in ask.points]
                name, category = ask.name or str(number), ask.category
                masks[number] = {**mask, "point_coords": points, "prompt_id": name, "category_id": category}
        return Record(picture.index, picture.path, picture.size, masks=masks)

    def _told(self, logits: Tensor, iou: Tensor, embedding: Embedding, at_once: int) -> list[dict[str, Any]]:
        told = []
        for some, rated in zip(logits.split(at_once), iou.split(at_once), strict=True):
            size, threshold = embedding.original_size, self._model.mask_threshold
            upscaled = self._model.postprocess_masks(some[:, None], embedding.input_size, size)[:, 0]
            masks = upscaled > threshold
            first, counts, changes = changes_of(masks)
            numbers = torch.stack([rated.double(), stability_scores(upscaled, threshold, OFFSET).double()], 1)
            boxes, firsts = boxes_of(masks).tolist(), first.tolist()
            where = torch.split(changes.cpu(), counts.tolist())
            for (predicted, stability), (x0, y0, x1, y1), begins, at in zip(
                numbers.tolist(), boxes, firsts, where, strict=True
            ):
                rle = run_lengths(begins, at.numpy(), size)
                told.append(
                    {
                        "segmentation": coco_rle(rle),
                        "area": area_of(rle),
                        "bbox": [x0, y0, x1 - x0, y1 - y0],
                        "predicted_iou": predicted,
                        "stability_score": stability,
                    }
                )
        return told

    def record(self, picture: Picture) -> Record:
        """Without masks."""
        return Record(picture.index, picture.path, picture.size, picture.error)


class Embeddings:
    """The image encoder on pictures.

    Args:
        model: a Sam.
        dtype: of the features.
    """

    whole, suffix = False, embeddings.SUFFIX
    write = staticmethod(embeddings.write_embeddings)

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def wants(self, picture: Picture) -> bool:
        """Any."""
        return True

    def launch(self, pictures: Sequence[Picture], batch_size: int, prompts: int) -> list[Any]:
        """The embeddings."""
        return embed_pictures(self._model, pictures, batch_size)

    def finish(self, picture: Picture, result: Any) -> EmbeddingRecord:
        """Takes one to the host."""
        features = result.features.to(self._dtype).cpu()
        return EmbeddingRecord(picture.index, picture.path, picture.size, "", features, result.input_size)

    def record(self, picture: Picture) -> EmbeddingRecord:
        """Without an embedding."""
        return EmbeddingRecord(picture.index, picture.path, picture.size, picture.error)


def _prompts(asks: Sequence[Ask]) -> Prompts:
    """Prompts of one form as one."""
    points, box = asks[0].form
    return Prompts(
        points=torch.tensor([ask.points for ask in asks], dtype=torch.float32) if points else None,
        labels=torch.tensor([ask.labels for ask in asks]) if points else None,
        boxes=torch.tensor([ask.box for ask in asks], dtype=torch.float32) if box else None,
    )
