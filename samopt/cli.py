"""The command line: what each command does is in its help."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from samopt import cli_folders
from samopt.cli_bench import bench
from samopt.cli_common import (
    BatchSize,
    Checkpoint,
    Coco,
    Device,
    ImageLimit,
    Images,
    ModelType,
    RecipeName,
    check_writable,
    load_model,
    read_samples,
    say,
    show,
    write_json,
)
from samopt.cli_report import report
from samopt.errors import AccuracyError, InvalidInput, SamoptError


class _Commands(TyperGroup):
    """Turns samopt's errors into one line and an exit code: 1 where accuracy fell short, 2 for anything else."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SamoptError as error:
            if isinstance(error, AccuracyError):
                show(error.report)
            typer.secho(f"error: {error}", err=True, fg="red")
            raise typer.Exit(1 if isinstance(error, AccuracyError) else 2) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False)
app.add_typer(bench, name="bench")
app.command()(cli_folders.segment)
app.command()(cli_folders.embed)
app.command()(report)

Out = Annotated[Path | None, typer.Option(help="A folder to save the model to; samopt.load loads it.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"samopt {version('samopt')}")
        raise typer.Exit


@app.callback()
def samopt(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Optimises Segment Anything, measured pass by pass."""


@app.command()
def demo(
    image: Annotated[Path | None, typer.Option(help="A photo of your own instead of a drawn scene.")] = None,
    recipe: RecipeName = "fast",
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("demo.png"),
    device: Device = "auto",
) -> None:
    """Takes the embedded model through a recipe; prints the report and writes a picture of the masks."""
    from samopt.optimize import optimize
    from samopt.picture import save_comparison
    from samopt.recipe import Recipe
    from samopt.report import report
    from samopt.samples import read_image, scene_samples

    check_writable(out)
    chosen = Recipe.of(recipe)
    scenes = scene_samples(2)
    shown = scenes[0] if image is None else read_image(image)
    sam = load_model(None, None, device)
    say(f"recipe {chosen.name}: {chosen.description}")
    fast = optimize(sam, chosen, samples=scenes)
    show(report(fast))
    share = save_comparison(sam, fast, shown, out)
    say(f"{out}: {shown.name}, masks before and after; {share:.3%} of the pixels differ")
    if image is not None:
        say("(the table is measured on drawn scenes, the only pictures sam_tiny knows: its masks of photos are poor)")


@app.command()
def optimize(
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    batch_size: BatchSize = None,
    out: Out = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the report to this file, too.")] = None,
    device: Device = "auto",
) -> None:
    """Optimises a checkpoint with a recipe, prints what each pass did, and saves the model."""
    from samopt.optimize import optimize as run
    from samopt.recipe import Recipe
    from samopt.report import report
    from samopt.save import save
    from samopt.saved_folder import check_target

    if json_out is not None:
        check_writable(json_out)
    if out is not None:
        check_target(out)
    chosen, samples = Recipe.of(recipe), read_samples(images, coco, limit)
    sam = load_model(checkpoint, model_type, device)
    try:
        model = run(sam, chosen, samples=samples, inplace=True, batch_size=batch_size)
    except AccuracyError as error:
        if json_out is not None:
            write_json(json_out, error.report.to_dict())
        raise
    show(report(model))
    if json_out is not None:
        write_json(json_out, report(model).to_dict())
    if out is not None:
        save(model, out)
        say(f"{out}: the model, {_gigabytes(out)}; samopt.load({str(out)!r}) loads it")
    else:
        say("the model was not saved: name a folder with --out")


@app.command()
def load(
    folder: Annotated[Path, typer.Argument(help="What `samopt optimize --out` or samopt.save wrote.")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; without it, as it was saved from.")] = None,
    compile_cache: Annotated[
        bool,
        typer.Option("--compile-cache", help="Use the compiled code in the folder: if you trust whoever made it."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold it to what it answered when it was saved. Exit code 1: it does not.")
    ] = False,
) -> None:
    """Loads a saved model, and prints its report: whether it runs here, and how long it takes to start."""
    import time

    from samopt.load import load as run
    from samopt.report import report

    start = time.perf_counter()
    model = run(folder, device, compile_cache=compile_cache, verify=verify)
    seconds = time.perf_counter() - start
    show(report(model))
    say(f"{folder}: {_gigabytes(folder)}, loaded in {seconds:.1f} s")


@app.command()
def export(
    saved: Annotated[Path, typer.Argument(help="The folder of a saved model.")],
    out: Annotated[Path, typer.Argument(help="A folder for the exported one; samopt.load_exported loads it.")],
    batch_size: Annotated[list[int], typer.Option(min=1, help="Of the image encoder; repeatable.")] = [1],  # noqa: B006 - typer copies it
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; without it, as it was saved from.")] = None,
) -> None:
    """Compiles a saved model ahead of time, for this kind of processor or GPU and these versions. Takes minutes."""
    from samopt.export import export as run
    from samopt.load import load
    from samopt.saved_folder import check_target

    check_target(out)
    run(load(saved, device), out, sorted(set(batch_size)))
    say(f"{out}: the exported model, {_gigabytes(out)}; samopt.load_exported({str(out)!r}) loads it")


@app.command()
def verify(
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
) -> None:
    """Measures a whole recipe against the unmodified model, per kind of prompt. Exit code 1: over its budget."""
    from samopt.optimize import optimize as run
    from samopt.recipe import Recipe
    from samopt.report import report

    chosen, samples = Recipe.of(recipe), read_samples(images, coco, limit)
    sam = load_model(checkpoint, model_type, device)
    model = run(sam, chosen, samples=samples, inplace=True, batch_size=batch_size)
    applied = [step for step in report(model).steps if step.status == "applied"]
    for step in report(model).steps:
        if step.status != "applied":
            say(f"{step.name} {step.status}: {step.reason}")
    agreement = applied[-1].agreement if applied else None
    if agreement is None:
        raise SamoptError(f"recipe {chosen.name}: no pass applied here, so there was nothing to verify")
    show(_kinds_table(agreement))
    say(f"within the budget of recipe {chosen.name!r}: {agreement}")


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="A folder for traces, snapshots and profile.json; made if need be.")],
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    logs: Annotated[bool, typer.Option("--logs", help="Tell of graph breaks and recompilations, too.")] = False,
    device: Device = "auto",
) -> None:
    """Profiles set_image and predict before a recipe and after: kernels, memory, and what the host waits for.

    The first picture is profiled; the recipe is verified on all of them, as by `samopt optimize`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says when it starts, and that it misses a GPU
    from samopt.profiling import compare
    from samopt.profiling.profiler import make_folder
    from samopt.recipe import Recipe

    chosen, samples = Recipe.of(recipe), read_samples(images, coco, limit)
    sam = load_model(checkpoint, model_type, device)
    figures = make_folder(out) / "profile.json"
    check_writable(figures)
    found = compare(sam, chosen, samples, out=out, logs=logs, inplace=True)
    write_json(figures, found.to_dict())
    show(found)
    for of in (found.before, found.after):
        for kind, path in of.files.items():
            say(f"{path}: open it at https://{'ui.perfetto.dev' if kind == 'trace' else 'pytorch.org/memory_viz'}")
    say(f"{figures}: the figures, as JSON")


@app.command()
def passes() -> None:
    """Lists the passes: phase, numerics, options."""
    from rich.table import Table

    from samopt.passes import PASSES

    table = Table("name", "phase", "numerics", "what it does", "options")
    for name, kind in PASSES.items():
        summary = (kind.__doc__ or "").partition("\n")[0]
        options = ", ".join(f"{option.name}={option.default!r}" for option in dataclasses.fields(kind))
        table.add_row(name, kind.phase.name, kind.numerics.value, summary, options)
    show(table)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Print this recipe's TOML.")] = None) -> None:
    """Lists the built-in recipes, or prints one to start your own from."""
    from importlib import resources

    from rich.table import Table

    from samopt.recipe import Recipe, built_in

    if name is not None:
        if name not in built_in():
            raise InvalidInput(f"unknown recipe {name!r}; built in: {', '.join(built_in())}")
        typer.echo((resources.files("samopt.recipes") / f"{name}.toml").read_text(encoding="utf-8").rstrip())
        return
    table = Table("name", "what it is", "passes")
    for known in built_in():
        recipe = Recipe.of(known)
        table.add_row(known, recipe.description, ", ".join(repr(step.pass_) for step in recipe.steps))
    show(table)


def _gigabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e9:.3f} GB"


def _kinds_table(agreement: Any) -> Any:
    from rich.table import Table

    table = Table("prompts", "count", "mask IoU", "5 %", "min", "choices changed", "true mIoU before", "after")
    for kind, of in agreement.kinds.items():
        truth = ["" if value is None else f"{value:.4f}" for value in (of.reference_truth, of.truth)]
        figures = [f"{of.mean_iou:.4f}", f"{of.p5_iou:.4f}", f"{of.min_iou:.4f}", f"{of.changed:.1%}"]
        table.add_row(kind, str(len(of.ious)), *figures, *truth)
    return table
