"""Shards of masks: Parquet, a row per image."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samopt.folders.job import written_whole

SUFFIX = ".parquet"


@dataclass
class Record:
    """What became of an image.

    Attributes:
        index: its number among all images.
        path: where it is.
        size: (H, W); None where it could not be read.
        error: why there are no results; "" where there are.
        masks: a dict per mask, as `AutomaticMaskGenerator` gives them with compressed run lengths, and "prompt_id" and
            "category_id" where it answers a prompt of a file.
    """

    index: int
    path: str
    size: tuple[int, int] | None
    error: str = ""
    masks: list[dict[str, Any]] = field(default_factory=list)


def schema() -> Any:
    """Of a shard; the README says what its columns hold."""
    import pyarrow as pa

    rle = pa.struct([("size", pa.list_(pa.int32())), ("counts", pa.string())])
    mask = pa.struct(
        [
            ("segmentation", rle),
            ("area", pa.int64()),
            ("bbox", pa.list_(pa.int32())),
            ("predicted_iou", pa.float64()),
            ("stability_score", pa.float64()),
            ("point_coords", pa.list_(pa.list_(pa.float64()))),
            ("crop_box", pa.list_(pa.int32())),
            ("prompt_id", pa.string()),
            ("category_id", pa.int64()),
        ]
    )
    return pa.schema(
        [
            ("index", pa.int64()),
            ("image", pa.string()),
            ("height", pa.int32()),
            ("width", pa.int32()),
            ("error", pa.string()),
            ("masks", pa.list_(mask)),
        ]
    )


def write_masks(path: Path, records: Sequence[Record], notes: dict[str, Any]) -> None:
    """Writes a shard, at once or not at all; `notes` go into its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "index": record.index,
            "image": printable(record.path),
            "height": record.size and record.size[0],
            "width": record.size and record.size[1],
            "error": record.error or None,
            "masks": None if record.error else [_finite(mask) for mask in record.masks],
        }
        for record in records
    ]
    table = pa.Table.from_pylist(rows, schema().with_metadata({"samopt": json.dumps(notes)}))
    with written_whole(path) as part:
        pq.write_table(table, part, compression="zstd")


def read_notes(path: Path) -> dict[str, Any]:
    """The notes of a shard."""
    import pyarrow.parquet as pq

    found: dict[str, Any] = json.loads(pq.read_schema(path).metadata[b"samopt"])
    return found


def read_masks(path: Path) -> Iterator[Record]:
    """The records of a shard, a few at a time in memory."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=16):
            for row in batch.to_pylist():
                size = None if row["height"] is None else (row["height"], row["width"])
                yield Record(row["index"], row["image"], size, row["error"] or "", row["masks"] or [])


def printable(path: str) -> str:
    """A path as UTF-8 text; bytes in it that are not UTF-8 as "\\udc80"."""
    return path.encode("utf-8", "backslashreplace").decode()


def _finite(mask: dict[str, Any]) -> dict[str, Any]:
    """Parquet knows null for the stability score of an empty mask, which is NaN."""
    score = mask["stability_score"]
    return {**mask, "stability_score": None if math.isnan(score) else score}
