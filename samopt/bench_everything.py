"""Speed of whole calls: every mask of a picture, and many prompts at once, unmodified and in recipes.

The unmodified model is served by Meta's SamAutomaticMaskGenerator, the others by samopt's; prompts by SamPredictor. A
call begins with the picture in the host's memory and ends with the answer there, so that whatever an implementation
does in between is in its time.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from samopt.automatic_mask_generator import AutomaticMaskGenerator
from samopt.bench_build import free
from samopt.bench_table import figures
from samopt.crops import unit_grid
from samopt.masks import Mask
from samopt.memory import peak_bytes
from samopt.optimize import optimize
from samopt.recipe import Recipe
from samopt.samples import Sample
from samopt.timing import cpu_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from segment_anything.modeling import Sam

PROMPT_SIDE = 8  # 64 points, as Meta's generator decodes together


@dataclass(frozen=True)
class Calls:
    """What was measured of one implementation.

    Attributes:
        what: "unmodified", or the recipe.
        everything_ms: of everything mode, per picture: the mean over pictures of the median of the calls.
        everything_ratio: speed over the first row's.
        predict_ms: median of a `predict_torch` of 64 points, three masks each, of the picture encoded before.
        predict_ratio: speed over the first row's.
        peak_gib: peak GPU memory of everything mode, weights and what CUDA graphs keep included; 0 on a CPU.
        records: masks found, of all pictures.
        matched_iou: mean IoU of the first row's masks with those found here, each matched with one; None without any.
        first_seconds: of the first call on the first picture, compilation included.
    """

    what: str
    everything_ms: float
    everything_ratio: float
    predict_ms: float
    predict_ratio: float
    peak_gib: float
    records: int
    matched_iou: float | None
    first_seconds: float


class CallsBench:
    """Times whole calls of one model on the same pictures.

    Args:
        sam: the unmodified model, on the device to run on. It is not changed.
        samples: the pictures.
        repeats: timed calls of everything mode for each picture.
        settings: arguments of both generators, as `points_per_side`.
    """

    def __init__(self, sam: Sam, samples: Sequence[Sample], repeats: int = 3, **settings: Any) -> None:
        self._sam, self._samples, self._repeats, self._settings = sam, samples, repeats, settings

    def rows(self, recipes: Sequence[Recipe]) -> Iterator[Calls]:
        """The unmodified model's figures, then each recipe's, applied without measuring accuracy."""
        from segment_anything import SamAutomaticMaskGenerator

        base, masks = self._row("unmodified", self._sam, SamAutomaticMaskGenerator, None)
        yield base
        for recipe in recipes:
            model = optimize(copy.deepcopy(self._sam), recipe, inplace=True, verify="off", batch_size=1)
            yield self._row(recipe.name, model, AutomaticMaskGenerator, (base, masks))[0]

    def _row(
        self, what: str, model: Any, kind: Callable[..., Any], base: tuple[Calls, list[list[Mask]]] | None
    ) -> tuple[Calls, list[list[Mask]]]:
        cuda = model.device.type == "cuda"
        free()
        generate = kind(model, **self._settings).generate
        first = cpu_seconds(functools.partial(generate, self._samples[0].image))
        masks = [[record["segmentation"] for record in generate(sample.image)] for sample in self._samples]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        everything = statistics.fmean(
            statistics.median(cpu_seconds(call) for _ in range(self._repeats))
            for call in (functools.partial(generate, sample.image) for sample in self._samples)
        )
        peak = peak_bytes(model.device) / 2**30 if cuda else 0.0
        predict = self._predict_seconds(model)
        row = Calls(
            what=what,
            everything_ms=1e3 * everything,
            everything_ratio=base[0].everything_ms / (1e3 * everything) if base else 1.0,
            predict_ms=1e3 * predict,
            predict_ratio=base[0].predict_ms / (1e3 * predict) if base else 1.0,
            peak_gib=peak,
            records=sum(map(len, masks)),
            matched_iou=matched_iou(base[1], masks) if base else None,
            first_seconds=first,
        )
        return row, masks

    @torch.no_grad()
    def _predict_seconds(self, model: Any) -> float:
        from segment_anything import SamPredictor

        predictor = SamPredictor(model)
        image = self._samples[0].image
        predictor.set_image(image)
        height, width = image.shape[:2]
        points = unit_grid(PROMPT_SIDE) * np.array([width, height])
        coordinates = torch.from_numpy(predictor.transform.apply_coords(points, (height, width)))
        coordinates = coordinates[:, None].to(model.device)
        labels = torch.ones(coordinates.shape[:2], dtype=torch.int, device=model.device)

        def call() -> None:
            predictor.predict_torch(coordinates, labels, multimask_output=True)
            if model.device.type == "cuda":
                torch.cuda.synchronize()

        for _ in range(3):
            call()
        return statistics.median(cpu_seconds(call) for _ in range(7 * self._repeats))


def matched_iou(expected: Sequence[Sequence[Mask]], found: Sequence[Sequence[Mask]]) -> float | None:
    """Mean IoU of expected masks and those found in the same picture, matched one to one for the highest sum.

    Masks without a partner do not count: that there are more or fewer of them the numbers of masks tell. None where
    there are no pairs.
    """
    from scipy.optimize import linear_sum_assignment

    ious: list[float] = []
    for wanted, given in zip(expected, found, strict=True):
        if wanted and given:
            table = pairwise_iou(wanted, given)
            ious += table[linear_sum_assignment(table, maximize=True)].tolist()
    return statistics.fmean(ious) if ious else None


def pairwise_iou(first: Sequence[Mask], second: Sequence[Mask]) -> NDArray[np.float64]:
    """IoU of every mask of `first` with every one of `second`: [N, M]."""
    one, other = (np.stack([mask.ravel() for mask in masks]).astype(np.float32) for masks in (first, second))
    common = one @ other.T
    return (common / np.maximum(one.sum(1)[:, None] + other.sum(1)[None] - common, 1)).astype(np.float64)


COLUMNS = {  # of the table: title, and how the figure is written
    "everything_ms": ("everything ms", "{:.1f}"),
    "everything_ratio": ("ratio", "{:.1f}x"),
    "records": ("masks", "{}"),
    "matched_iou": ("matched IoU", "{:.4f}"),
    "predict_ms": ("64 points ms", "{:.2f}"),
    "predict_ratio": ("ratio", "{:.1f}x"),
    "peak_gib": ("peak GiB", "{:.2f}"),
    "first_seconds": ("first call s", "{:.1f}"),
}


def table(title: str, rows: Sequence[Calls]) -> Table:
    """The rows, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(title, style="table.title"), title_justify="left")
    shown.add_column("what")
    for heading, _ in COLUMNS.values():
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(Text(row.what), *figures(COLUMNS, row))
    return shown


def to_dict(rows: Sequence[Calls]) -> list[dict[str, Any]]:
    """The rows, for JSON."""
    return [asdict(row) for row in rows]
