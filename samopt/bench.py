"""Speed of the image encoder: the unmodified model, and a recipe at several batch sizes, in one process.

Only passes that stood verification on the embedded model, whose weights are trained, are timed; the models timed
here have random weights, as speed does not depend on them.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samopt.optimize import optimize
from samopt.passes import CastDtype
from samopt.recipe import Recipe
from samopt.report import report
from samopt.verify import relative_error

if TYPE_CHECKING:
    from rich.table import Table
    from segment_anything.modeling import Sam

REPEATS, SECONDS = 20, 3.0  # timed calls of one row: this many, or as many as fit


@dataclass(frozen=True)
class Row:
    """One configuration's figures.

    Attributes:
        model: vit_b, vit_l, vit_h or sam_tiny.
        what: "unmodified", "eager" half precision, or the recipe.
        batch_size: images per call.
        milliseconds: median time per image.
        spread: (90th - 10th percentile) / median of the timed calls.
        ratio: speed over the unmodified model at batch 1.
        peak_gib: peak GPU memory, weights included; 0 on a CPU.
        error: relative error of the embedding against the unmodified float32 model, same images.
        first_seconds: time of the first call, compilation included.
    """

    model: str
    what: str
    batch_size: int
    milliseconds: float
    spread: float
    ratio: float
    peak_gib: float
    error: float
    first_seconds: float


def verified(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe's steps that stand verification on the embedded model, on this device."""
    from samopt.tiny import load_tiny

    steps = report(optimize(load_tiny().to(device), recipe)).steps
    kept = [step for step, row in zip(recipe.steps, steps, strict=True) if row.status == "applied"]
    return Recipe(kept, recipe.accuracy, recipe.name, recipe.description)


def bench_encoder(
    model_types: Sequence[str], recipe: Recipe, batch_sizes: Sequence[int], device: torch.device, seed: int = 0
) -> Iterator[Row]:
    """Times the image encoders, one row at a time.

    Args:
        model_types: names in Meta's registry, or "sam_tiny".
        recipe: applied without measuring accuracy; see `verified`.
        batch_sizes: for the recipe; the unmodified model runs at batch 1.
        device: where to run.
        seed: of weights and pixels.
    """
    half = recipe.find(CastDtype) or CastDtype()
    for model_type in model_types:
        torch._dynamo.reset()
        sam = random_model(model_type, seed).to(device)
        size = sam.image_encoder.img_size
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(max(batch_sizes), 3, size, size, generator=generator).to(device)
        base = _time(sam.image_encoder, pixels[:1])
        with torch.no_grad():
            truth = torch.cat([sam.image_encoder(image[None]) for image in pixels])
        row = functools.partial(_row, model_type, base, truth)
        yield row("unmodified", 1, base)
        eager = copy.deepcopy(sam)
        half(eager)
        yield row(f"eager {half.dtype}", 1, _time(eager.image_encoder, pixels[:1]))
        del eager
        sam = optimize(sam, recipe, inplace=True, verify="off")
        for batch in batch_sizes:
            yield row(recipe.name, batch, _time(sam.image_encoder, pixels[:batch]))
        del sam, pixels, truth, row


def _row(model: str, base: _Timed, truth: Tensor, what: str, batch: int, found: _Timed) -> Row:
    milliseconds = found.seconds * 1e3 / batch
    return Row(
        model=model,
        what=what,
        batch_size=batch,
        milliseconds=milliseconds,
        spread=found.spread,
        ratio=base.seconds * 1e3 / milliseconds,
        peak_gib=found.peak_gib,
        error=relative_error([found.output], [truth[:batch]]),
        first_seconds=found.first_seconds,
    )


def random_model(model_type: str, seed: int) -> Sam:
    """A Sam with random weights; positions too, which are zero when Meta's classes are built."""
    from segment_anything import sam_model_registry

    from samopt.tiny import load_tiny

    if model_type == "sam_tiny":
        return load_tiny()
    torch.manual_seed(seed)
    sam: Sam = sam_model_registry[model_type]()
    with torch.no_grad():
        for name, parameter in sam.image_encoder.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                nn.init.normal_(parameter, std=0.1)
    return sam


@dataclass(frozen=True)
class _Timed:
    output: Tensor
    seconds: float
    spread: float
    first_seconds: float
    peak_gib: float


@torch.no_grad()
def _time(encoder: nn.Module, pixels: Tensor) -> _Timed:
    cuda = pixels.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    output = encoder(pixels).clone()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    peak = 0.0
    if cuda:  # of a steady call: the first one's includes what compiling needed
        torch.cuda.reset_peak_memory_stats()
        encoder(pixels)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
    timer = _cuda_seconds if cuda else _cpu_seconds
    timer(lambda: encoder(pixels))  # warm-up
    seconds: list[float] = []
    while len(seconds) < REPEATS and (len(seconds) < 3 or sum(seconds) < SECONDS):
        seconds.append(timer(lambda: encoder(pixels)))
    deciles = statistics.quantiles(seconds, n=10)
    median = statistics.median(seconds)
    return _Timed(output, median, (deciles[-1] - deciles[0]) / median, first, peak)


def _cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows, for a terminal."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    shown.add_column("model")
    shown.add_column("what")
    for column in ("batch", "ms/img", "spread", "img/s", "ratio", "peak GiB", "embedding error", "first call s"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            row.model,
            row.what,
            str(row.batch_size),
            f"{row.milliseconds:.2f}",
            f"{row.spread:.1%}",
            f"{1e3 / row.milliseconds:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.peak_gib:.2f}" if row.peak_gib else "",
            f"{row.error:.2e}",
            f"{row.first_seconds:.1f}",
        )
    return shown


def to_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, for JSON."""
    return [asdict(row) for row in rows]
