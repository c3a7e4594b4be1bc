"""The command line: `samopt report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samopt.cli_common import (
    BatchSize,
    Checkpoint,
    Coco,
    Device,
    ImageLimit,
    Images,
    ModelType,
    check_writable,
    load_model,
    read_samples,
    say,
)
from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

    from samopt.html_report import Section
    from samopt.recipe import Recipe
    from samopt.samples import Sample

MOST_PICTURES = 4  # whose masks are shown


def report(
    out: Annotated[Path, typer.Option(help="A folder for report.html and the pictures; made if need be.")],
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="What `samopt bench ... --json` wrote, and profile.json of `samopt profile`."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Also run this recipe, and show its accuracy pass by pass and the masks before and after."),
    ] = None,
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
) -> None:
    """Makes one page, report.html, of benchmarks, profiles and masks, and each picture as a file.

    The page needs no other file and no network. Options but --out are for --recipe.
    """
    from samopt.html_report import of_file, write
    from samopt.profiling import make_folder
    from samopt.recipe import Recipe

    if not results and recipe is None:
        raise InvalidInput("nothing to report: name the results of samopt bench or samopt profile, or a --recipe")
    if recipe is None and any(given is not None for given in (checkpoint, model_type, images, coco, limit, batch_size)):
        raise InvalidInput("--checkpoint, --model-type, --images, --coco, --limit and --batch-size need --recipe")
    sections = [of_file(path) for path in results or []]
    masks = None
    if recipe is not None:
        chosen, samples = Recipe.of(recipe), read_samples(images, coco, limit)
        masks = chosen, samples, load_model(checkpoint, model_type, device)
    check_writable(make_folder(out) / "report.html")
    if masks is not None:
        sections.append(_masks(*masks, batch_size))
    page, *pictures = write(out, sections)
    for path in pictures:
        say(str(path))
    say(f"{page}: open it in a browser; it needs no other file")


def _masks(recipe: Recipe, samples: list[Sample], sam: Sam, batch_size: int | None) -> Section:
    from samopt.html_report import of_masks
    from samopt.optimize import optimize
    from samopt.picture import compare_masks
    from samopt.report import report as report_of
    from samopt.samples import spread

    fast = optimize(sam, recipe, samples=samples, batch_size=batch_size)
    masks = [compare_masks(sam, fast, sample) for sample in spread(samples, MOST_PICTURES)]
    return of_masks(report_of(fast), masks)
