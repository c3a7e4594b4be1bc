"""A benchmark's rows, and how they are shown, written and read: as a table, JSON and CSV.

The JSON is an object: the fields of `Setting`, and "rows", a list of objects with the fields of `Row`, in the order in
which they ran, the base of all ratios first. The CSV has a line for each row, with the setting repeated in it. Figures
that a row does not have are null, and empty in the CSV. Fields may be added; those that are there keep their meaning.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

TIMED, LEFT_OUT, FAILED = "timed", "left out", "failed"


@dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common.

    Attributes:
        model: vit_b, vit_l, vit_h or sam_tiny.
        seed: of random weights and pixels.
        device: where it ran.
        image_tflop: arithmetic of one image in the unmodified encoder, 10^12 operations.
        matmul_tflops: what the chip did in one large matrix product, 10^12 operations a second.
        versions: of Python, the libraries and the system, and the GPU's name or the number of CPU threads.
        bench: "encoder", recipes and peers side by side, or "waterfall", one recipe step by step.
        recipes: their names.
        weights: "random", "sam_tiny", or the checkpoint's file.
        pictures: what was encoded.
        masks: what masks were compared on, or why they were not.
        command: what was typed.
    """

    model: str
    seed: int
    device: str
    image_tflop: float
    matmul_tflops: float
    versions: dict[str, str]
    bench: str = "encoder"
    recipes: tuple[str, ...] = ()
    weights: str = "random"
    pictures: str = "noise"
    masks: str = ""
    command: str = ""


@dataclass(frozen=True)
class Row:
    """One configuration's figures; all None where it was not timed, and `note` or `remark` says why.

    Attributes:
        what: what the row is called: "unmodified", "eager" half precision, the recipe, or the peer; in a waterfall
            "+" and what the row adds to the one before, or "... alone". Unique, with the batch size, in a run.
        batch_size: images per call.
        milliseconds: median time of the encoder per image.
        spread: (90th - 10th percentile) / median of the timed calls.
        images_per_second: of the median call.
        ratio: speed over the first row, the unmodified float32 model at batch 1.
        share: arithmetic of the unmodified encoder per second, over what the chip does in one large matrix product.
        peak_gib: peak GPU memory of the encoder's calls, the model's weights included; 0 on a CPU.
        error: relative error of the embedding against the unmodified float32 model, same weights and images.
        first_seconds: time of the first call, compilation included.
        note: why the row failed; "" where it did not.
        remark: what the figures are of, where `what` does not say it all: passes that a recipe undid here. Of a row
            that was left out, why.
        status: "timed"; "left out", as nothing of what it adds stood verification, applies here, or is faster; or
            "failed".
        adds: names of the passes that the row adds to the one before, or runs alone.
        ratio_before: speed over the last timed row of this batch size; over the first row where there is none.
        whole_milliseconds: median time per image of a whole call: picture in, resized, encoded, one point answered,
            masks on the host.
        mask_iou: mean IoU of masks with the unmodified model's.
        min_iou: the worst of them.
        miou: mean IoU of the masks that the model rates best with ground truth.
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
    status: str = TIMED
    adds: tuple[str, ...] = field(default=())
    ratio_before: float | None = None
    whole_milliseconds: float | None = None
    mask_iou: float | None = None
    min_iou: float | None = None
    miou: float | None = None


COLUMNS = {  # of the table: title, and how the figure is written
    "milliseconds": ("ms/img", "{:.2f}"),
    "spread": ("spread", "{:.1%}"),
    "images_per_second": ("img/s", "{:.1f}"),
    "ratio": ("ratio", "{:.2f}x"),
    "ratio_before": ("gain", "{:.2f}x"),
    "share": ("of matmul rate", "{:.1%}"),
    "peak_gib": ("peak GiB", "{:.2f}"),
    "whole_milliseconds": ("whole ms", "{:.2f}"),
    "error": ("emb. error", "{:.2e}"),
    "mask_iou": ("mask IoU", "{:.4f}"),
    "miou": ("true mIoU", "{:.4f}"),
    "first_seconds": ("first s", "{:.1f}"),
}


def table(setting: Setting, rows: Sequence[Row]) -> Table:
    """The rows, for a terminal; what was left out, failed, or has a remark, is told below them."""
    from rich.table import Table
    from rich.text import Text

    # As Text, for rich would read "[...]" in an error's message as markup.
    what = f"waterfall of {setting.recipes[0]}" if setting.bench == "waterfall" else "image encoder"
    title = Text(f"{setting.model}, {what}, seed {setting.seed}, on {setting.device}", style="table.title")
    shown = Table(title=title, title_justify="left", caption=Text(_caption(setting, rows)), caption_justify="left")
    shown.add_column("what", min_width=16)
    shown.add_column("batch", justify="right")
    columns = {name: of for name, of in COLUMNS.items() if _says_something(name, setting, rows)}
    for heading, _ in columns.values():
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(Text(row.what), str(row.batch_size), *figures(columns, row))
    return shown


def _says_something(name: str, setting: Setting, rows: Sequence[Row]) -> bool:
    """Whether a column is shown: a terminal is narrow, and all figures are in the JSON."""
    if name == "share" and setting.bench == "waterfall":
        return False
    known = [value for row in rows if (value := getattr(row, name)) is not None]
    return any(known) if name == "peak_gib" else bool(known)


def figures(columns: Mapping[str, tuple[str, str]], row: Any) -> list[str]:
    """A row's figures as a table shows them, of columns by attribute: title, and how the figure is written."""
    values = ((form, getattr(row, name)) for name, (_, form) in columns.items())
    return ["-" if value is None else form.format(value) for form, value in values]


def _caption(setting: Setting, rows: Sequence[Row]) -> str:
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status != TIMED:
            said.setdefault((row.what, f", {outcome(row)}"), []).append(str(row.batch_size))
        elif row.remark:
            said.setdefault((row.what, f": {row.remark}"), []).append(str(row.batch_size))
    lines = [f"{what}, batch {' and '.join(sizes)}{text}" for (what, text), sizes in said.items()]
    lines += [f"{name}: {text}" for name in ("weights", "pictures", "masks") if (text := getattr(setting, name))]
    lines.append(f"{setting.image_tflop:.3g} TFLOP an image; matmul rate {setting.matmul_tflops:.3g} TFLOP/s")
    return "\n".join([*lines, ", ".join(map(" ".join, setting.versions.items()))])


def outcome(row: Row) -> str:
    """A row in words, but for its name."""
    if row.milliseconds is None:
        return f"{row.status}: {row.note or row.remark}"
    return f"{row.milliseconds:.2f} ms/img" + (f" ({row.remark})" if row.remark else "")


def to_dict(setting: Setting, rows: Sequence[Row]) -> dict[str, Any]:
    """The setting and its rows, for JSON."""
    whole: dict[str, Any] = json.loads(json.dumps({**asdict(setting), "rows": [asdict(row) for row in rows]}))
    return whole


def read_json(path: str | Path) -> Any:
    """What a file holds as JSON.

    Raises:
        InvalidInput: it is missing, or no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InvalidInput(f"{path}: not JSON ({error})") from error


def check_results(found: Any, path: str | Path) -> dict[str, Any]:
    """What `read_json` found, where it is what `to_dict` made, of this version or an earlier one.

    Raises:
        InvalidInput: it is none.
    """
    rows = found.get("rows") if isinstance(found, dict) else None
    whole = isinstance(rows, list) and all(
        isinstance(row, dict) and {"what", "batch_size", "milliseconds"} <= row.keys() for row in rows
    )
    if not whole or "model" not in found:
        raise InvalidInput(f"{path}: no results of a benchmark: name a file that samopt bench wrote with --json")
    return dict(found)


def from_dict(found: Mapping[str, Any], path: str | Path) -> tuple[Setting, list[Row]]:
    """The setting and the rows of results that `check_results` passed; fields of later versions are passed over.

    Raises:
        InvalidInput: there is no row, or a field is missing that has been there since.
    """
    if not found["rows"]:
        raise InvalidInput(f"{path}: results without a row; run the benchmark again")
    try:
        setting = Setting(**_fields_of(Setting, found))
        rows = [Row(**_fields_of(Row, row)) for row in found["rows"]]
    except TypeError as error:
        raise InvalidInput(
            f"{path}: results of another version of samopt ({error}); run the benchmark again"
        ) from error
    return setting, rows


def _fields_of(kind: type[Setting | Row], found: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: found[name] for name in (field.name for field in fields(kind)) if name in found}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


def to_csv(setting: Setting, rows: Sequence[Row]) -> str:
    """The rows as CSV with a header; the setting is repeated in columns of every row, so that files can be joined.

    Names in a list are joined by "+". A version's column is its name with "_version".
    """
    common = asdict(setting)
    common |= {f"{name}_version": version for name, version in common.pop("versions").items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(field.name for field in fields(Row)), *common], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {**asdict(row), **common}
        writer.writerow({name: "+".join(of) if isinstance(of, tuple) else of for name, of in values.items()})
    return text.getvalue()
