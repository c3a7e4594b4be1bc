"""Shards of image embeddings: safetensors. And one of them put back into a predictor."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samopt.batch_predictor import BatchPredictor, Embedding
from samopt.errors import InvalidInput
from samopt.fingerprint import fingerprint
from samopt.folders.job import MANIFEST, SHARDS, read_manifest, read_settings, written_whole
from samopt.folders.records import printable

if TYPE_CHECKING:
    from segment_anything import SamPredictor

SUFFIX = ".safetensors"


@dataclass
class EmbeddingRecord:
    """What became of an image.

    Attributes:
        index: its number among all images.
        path: where it is.
        size: (H, W); None where it could not be read.
        error: why there is no embedding; "" where there is one.
        features: [C, h, w], on the CPU; None where there is an error.
        input_size: the (h, w) the image has in the model's input.
    """

    index: int
    path: str
    size: tuple[int, int] | None
    error: str = ""
    features: Tensor | None = None
    input_size: tuple[int, int] | None = None


def write_embeddings(path: Path, records: Sequence[EmbeddingRecord], notes: dict[str, Any]) -> None:
    """Writes a shard, at once or not at all; `notes` go into its metadata."""
    from safetensors.torch import save_file

    rows = [record for record in records if record.features is not None]
    tensors = {
        "original_sizes": torch.tensor([record.size for record in rows], dtype=torch.int32).reshape(-1, 2),
        "input_sizes": torch.tensor([record.input_size for record in rows], dtype=torch.int32).reshape(-1, 2),
    }
    if rows:
        tensors["features"] = torch.stack([record.features for record in rows if record.features is not None])
    # One entry, as safetensors writes several in any order, and the same shard is to be the same bits.
    metadata = json.dumps({**notes, "paths": [printable(record.path) for record in rows]})
    with written_whole(path) as part:
        save_file(tensors, part, {"samopt": metadata})


def read_notes(path: Path) -> dict[str, Any]:
    """The notes of a shard."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["samopt"])
    return found


def load_embedding(predictor: SamPredictor | BatchPredictor, folder: str | Path, *images: str | Path) -> None:
    """Puts embeddings that `samopt embed` made into a predictor, as if it had encoded the images.

    Args:
        predictor: segment_anything's `SamPredictor`, which takes one image, or a `BatchPredictor`. Its model may be the
            unmodified one or optimised: what counts is which weights it had before it was.
        folder: what `samopt embed` wrote.
        images: the image files, by path, or by as much of its end as says which.

    Raises:
        InvalidInput: there is no embedding of an image, or several; those in the folder are another model's; several
            images for a `SamPredictor`. The predictor is as it was.
    """
    settings = read_settings(folder)
    if settings is None or settings["task"] != "embed":
        raise InvalidInput(f"{folder}: there are no embeddings in it; name a folder that samopt embed made")
    if settings["model"] != fingerprint(predictor.model):
        raise InvalidInput(f"{folder}: its embeddings are another model's, with other weights; embed with this one")
    found = [_read(Path(folder), os.fspath(image)) for image in images]
    if isinstance(predictor, BatchPredictor):
        predictor.set_embeddings(found)
        return
    if len(found) != 1:
        raise InvalidInput(f"a SamPredictor holds one image, not {len(found)}; a BatchPredictor holds several")
    (embedding,) = found
    predictor.reset_image()
    predictor.features = embedding.features[None].to(predictor.device, torch.float32)
    predictor.original_size, predictor.input_size = embedding.original_size, embedding.input_size
    predictor.is_image_set = True


def _read(folder: Path, image: str) -> Embedding:
    from safetensors import safe_open

    shard, path = _find(folder, image)
    file_path = folder / SHARDS / f"{shard:06d}{SUFFIX}"
    if not file_path.exists():
        raise InvalidInput(f"{folder}: {image} is not embedded yet; run samopt embed once more")
    with safe_open(file_path, framework="pt") as file:
        notes = json.loads(file.metadata()["samopt"])
        names = notes["paths"]
        if printable(path) not in names:
            reason = next(entry["error"] for entry in notes["failed"] if entry["image"] == printable(path))
            raise InvalidInput(f"{folder}: {image} could not be embedded: {reason}")
        row = names.index(printable(path))
        sizes = [tuple(file.get_slice(name)[row].tolist()) for name in ("original_sizes", "input_sizes")]
        return Embedding(file.get_slice("features")[row], *sizes)


def _find(folder: Path, image: str) -> tuple[int, str]:
    """The shard and the full path of an image."""
    places = _places(folder, (folder / MANIFEST).stat().st_mtime_ns)
    full = os.path.abspath(image)
    if full in places:
        return places[full], full
    end = os.sep + os.path.normpath(image).lstrip(os.sep)
    found = [path for path in places if path.endswith(end)]
    if len(found) != 1:
        what = "no image" if not found else f"{len(found)} images"
        raise InvalidInput(f"{folder}: {what} {image} in it; give the path that was embedded")
    return places[found[0]], found[0]


@functools.lru_cache(maxsize=4)
def _places(folder: Path, changed: int) -> dict[str, int]:
    """The shards of all images of a folder, as of when its manifest was changed."""
    return {image: number for number, images in enumerate(read_manifest(folder)) for image in images}
