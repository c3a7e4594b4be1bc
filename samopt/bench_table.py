"""A benchmark's rows, and how they are shown and written: as a table, JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common.

    Attributes:
        model: vit_b, vit_l, vit_h or sam_tiny.
        seed: of weights and pixels.
        device: where it ran.
        image_tflop: arithmetic of one image in the unmodified encoder, 10^12 operations.
        matmul_tflops: what the chip did in one large matrix product, 10^12 operations a second.
        versions: of Python, the libraries and the system, and the GPU's name or the number of CPU threads.
    """

    model: str
    seed: int
    device: str
    image_tflop: float
    matmul_tflops: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Row:
    """One configuration's figures; all None where it failed, and `note` says why.

    Attributes:
        what: "unmodified", "eager" half precision, the recipe, or the peer.
        batch_size: images per call.
        milliseconds: median time per image.
        spread: (90th - 10th percentile) / median of the timed calls.
        images_per_second: of the median call.
        ratio: speed over the first row, the unmodified float32 model at batch 1.
        share: arithmetic of the unmodified encoder per second, over what the chip does in one large matrix product.
        peak_gib: peak GPU memory, weights included; 0 on a CPU.
        error: relative error of the embedding against the unmodified float32 model, same weights and images.
        first_seconds: time of the first call, compilation included.
        note: why the row failed; "" where it did not.
        remark: what the figures are of, where `what` does not say it all: passes that a recipe undid here.
    """

    what: str
    batch_size: int
    milliseconds: float | None = None
    spread: float | None = None
    images_per_second: float | None = None
    ratio: float | None = None
    share: float | None = None
    peak_gib: float | None = None
    error: float | None = None
    first_seconds: float | None = None
    note: str = ""
    remark: str = ""


COLUMNS = {  # of the table: title, and how the figure is written
    "milliseconds": ("ms/img", "{:.2f}"),
    "spread": ("spread", "{:.1%}"),
    "images_per_second": ("img/s", "{:.1f}"),
    "ratio": ("ratio", "{:.2f}x"),
    "share": ("of matmul rate", "{:.1%}"),
    "peak_gib": ("peak GiB", "{:.2f}"),
    "error": ("embedding error", "{:.2e}"),
    "first_seconds": ("first call s", "{:.1f}"),
}


def table(setting: Setting, rows: Sequence[Row]) -> Table:
    """The rows, for a terminal; what failed, or has a remark, is told below them."""
    from rich.table import Table
    from rich.text import Text

    # As Text, for rich would read "[...]" in an error's message as markup.
    title = Text(f"{setting.model}, image encoder, seed {setting.seed}, on {setting.device}", style="table.title")
    shown = Table(title=title, title_justify="left", caption=Text(_caption(setting, rows)), caption_justify="left")
    shown.add_column("what")
    shown.add_column("batch", justify="right")
    for heading, _ in COLUMNS.values():
        shown.add_column(heading, justify="right")
    for row in rows:
        figures = (_shown(form, getattr(row, name)) for name, (_, form) in COLUMNS.items())
        shown.add_row(Text(row.what), str(row.batch_size), *figures)
    return shown


def _shown(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _caption(setting: Setting, rows: Sequence[Row]) -> str:
    lines = [f"{row.what}, batch {row.batch_size}, failed: {row.note}" for row in rows if row.note]
    lines += [f"{row.what}, batch {row.batch_size}: {row.remark}" for row in rows if row.remark]
    lines.append(f"{setting.image_tflop:.3g} TFLOP an image; matmul rate {setting.matmul_tflops:.3g} TFLOP/s")
    return "\n".join([*lines, ", ".join(map(" ".join, setting.versions.items()))])


def to_dict(setting: Setting, rows: Sequence[Row]) -> dict[str, Any]:
    """The setting and its rows, for JSON."""
    return {**asdict(setting), "rows": [asdict(row) for row in rows]}


def to_csv(setting: Setting, rows: Sequence[Row]) -> str:
    """The rows as CSV with a header; the setting is repeated in columns of every row, so that files can be joined.

    A figure that a failed row does not have is an empty field. A version's column is its name with "_version".
    """
    common = asdict(setting)
    common |= {f"{name}_version": version for name, version in common.pop("versions").items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(field.name for field in fields(Row)), *common], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(row), **common} for row in rows)
    return text.getvalue()
