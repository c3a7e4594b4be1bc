"""The command line: `samopt demo`, `optimize`, `verify`, `profile`, `passes`, `recipes`, `bench`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from samopt.errors import AccuracyError, InvalidInput, SamoptError, first_line

if TYPE_CHECKING:
    import torch
    from segment_anything.modeling import Sam

    from samopt.samples import Sample


class _Commands(TyperGroup):
    """Turns samopt's errors into one line and an exit code: 1 where accuracy fell short, 2 for anything else."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SamoptError as error:
            if isinstance(error, AccuracyError):
                _print(error.report)
            typer.secho(f"error: {error}", err=True, fg="red")
            raise typer.Exit(1 if isinstance(error, AccuracyError) else 2) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False)

bench = typer.Typer(no_args_is_help=True, help="Measures speed; every figure comes with machine and versions.")
app.add_typer(bench, name="bench")

Checkpoint = Annotated[Path | None, typer.Option(help="Meta's .pth file. Without it: the embedded model, sam_tiny.")]
ModelType = Annotated[
    str | None,
    typer.Option(help="vit_b, vit_l or vit_h: which model the checkpoint is; without it, what it turns out to be."),
]
RecipeName = Annotated[str, typer.Option(help="A built-in recipe (see `samopt recipes`) or a TOML file.")]
Images = Annotated[
    Path | None, typer.Option(help="A picture, or a folder of them, to measure on. Without it: drawn scenes.")
]
Coco = Annotated[
    Path | None,
    typer.Option(help="COCO instances (JSON) with the ground truth of the pictures in the folder --images."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help='Images per call that keep = "if-faster" is for. Without it: 8 on a GPU, 1 on a CPU.'),
]
ImageLimit = Annotated[
    int | None, typer.Option(min=1, help="Pictures to measure on, at most. Without it: 4; of COCO's 100.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes the GPU where there is one.")]


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

    _writable(out)
    chosen = Recipe.of(recipe)
    scenes = scene_samples(2)
    shown = scenes[0] if image is None else read_image(image)
    sam = _load(None, None, device)
    _say(f"recipe {chosen.name}: {chosen.description}")
    fast = optimize(sam, chosen, samples=scenes)
    _print(report(fast))
    share = save_comparison(sam, fast, shown, out)
    _say(f"{out}: {shown.name}, masks before and after; {share:.3%} of the pixels differ")
    if image is not None:
        _say("(the table is measured on drawn scenes, the only pictures sam_tiny knows: its masks of photos are poor)")


@app.command()
def optimize(
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    batch_size: BatchSize = None,
    json_out: Annotated[Path, typer.Option("--json", help="Where to write the report.")] = Path("samopt-report.json"),
    device: Device = "auto",
) -> None:
    """Optimises a checkpoint with a recipe; prints what each pass did and writes it as JSON.

    It writes the report, not a model: in Python, samopt.optimize returns one.
    """
    from samopt.optimize import optimize as run
    from samopt.recipe import Recipe
    from samopt.report import report

    _writable(json_out)
    chosen, samples = Recipe.of(recipe), _samples(images, coco, limit)
    sam = _load(checkpoint, model_type, device)
    try:
        found = report(run(sam, chosen, samples=samples, inplace=True, batch_size=batch_size))
    except AccuracyError as error:
        _write_json(json_out, error.report.to_dict())
        raise
    _print(found)
    _write_json(json_out, found.to_dict())
    _say(f"{json_out}: the same, as JSON")


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

    chosen, samples = Recipe.of(recipe), _samples(images, coco, limit)
    sam = _load(checkpoint, model_type, device)
    model = run(sam, chosen, samples=samples, inplace=True, batch_size=batch_size)
    applied = [step for step in report(model).steps if step.status == "applied"]
    for step in report(model).steps:
        if step.status != "applied":
            _say(f"{step.name} {step.status}: {step.reason}")
    agreement = applied[-1].agreement if applied else None
    if agreement is None:
        raise SamoptError(f"recipe {chosen.name}: no pass applied here, so there was nothing to verify")
    _print(_kinds_table(agreement))
    _say(f"within the budget of recipe {chosen.name!r}: {agreement}")


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="A folder for traces, snapshots and profile.json; made if need be.")],
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: Images = None,
    limit: ImageLimit = 4,
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

    chosen, samples = Recipe.of(recipe), _samples(images, limit)
    sam = _load(checkpoint, model_type, device)
    figures = make_folder(out) / "profile.json"
    _writable(figures)
    found = compare(sam, chosen, samples, out=out, logs=logs, inplace=True)
    _write_json(figures, found.to_dict())
    _print(found)
    for of in (found.before, found.after):
        for kind, path in of.files.items():
            _say(f"{path}: open it at https://{'ui.perfetto.dev' if kind == 'trace' else 'pytorch.org/memory_viz'}")
    _say(f"{figures}: the figures, as JSON")


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
    _print(table)


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
    _print(table)


@bench.command()
def encoder(
    model_type: Annotated[str, typer.Option(help="vit_b, vit_l, vit_h or sam_tiny; one model a run.")],
    recipe: Annotated[list[str], typer.Option(help="A built-in recipe or a TOML file; repeatable.")] = ["fast"],  # noqa: B006 - typer copies it
    batch_size: Annotated[list[int], typer.Option(min=1, help="For the recipes; repeatable.")] = [1, 8, 16],  # noqa: B006
    peer: Annotated[
        list[str], typer.Option(help="segment_anything_fast or transformers, where installed; repeatable.")
    ] = [],  # noqa: B006
    peer_batch_size: Annotated[
        list[int],
        typer.Option(min=1, help="For the peers; repeatable. Without it: the largest of the others up to 16."),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of weights and pixels.")] = 0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, too.")] = None,
    csv_out: Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file, too.")] = None,
    device: Device = "auto",
) -> None:
    """Times one model's image encoder, random weights: unmodified, in recipes, and in other implementations.

    Exit code 1: a row failed; the others are there.
    """
    from samopt.bench import EncoderBench, plan, verified
    from samopt.bench_table import Row, table, to_csv, to_dict
    from samopt.peers import find_peer
    from samopt.recipe import Recipe

    for path in (json_out, csv_out):
        if path is not None:
            _writable(path)
    if peer_batch_size and not peer:
        raise InvalidInput("--peer-batch-size needs --peer")
    peers = [find_peer(name) for name in dict.fromkeys(peer)]
    chosen = [Recipe.of(name) for name in dict.fromkeys(recipe)]
    target = _device(device)
    run = EncoderBench(model_type, target, seed, peers)
    stood = [verified(each, target) for each in chosen]
    for each in stood:
        _say(f"{each.name}, stood verification on sam_tiny: {', '.join(repr(step.pass_) for step in each.steps)}")
    rows: list[Row] = []
    for row in run.rows(plan(stood, batch_size, target, peers, peer_batch_size)):
        rows.append(row)
        figure = f"failed: {row.note}" if row.note else f"{row.milliseconds:.2f} ms/img"
        figure += f" ({row.remark})" if row.remark else ""
        _say(f"{run.setting.model} {row.what} batch {row.batch_size}: {figure}")
        if json_out is not None:  # after every row, as the next one may take minutes, or be the end
            _write_json(json_out, to_dict(run.setting, rows))
        if csv_out is not None:
            csv_out.write_text(to_csv(run.setting, rows), encoding="utf-8")
    _print(table(run.setting, rows))
    if any(row.note for row in rows):
        raise typer.Exit(1)


def _load(checkpoint: Path | None, model_type: str | None, device: str) -> Sam:
    from samopt.checkpoint import load_checkpoint
    from samopt.tiny import load_tiny

    if checkpoint is None and model_type is not None:
        raise InvalidInput(f"--model-type {model_type} needs --checkpoint; without both, the model is sam_tiny")
    target = _device(device)
    sam = load_tiny() if checkpoint is None else load_checkpoint(checkpoint, model_type)
    _say(f"model: {'sam_tiny, the embedded one' if checkpoint is None else checkpoint}")
    return sam.to(target)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"device {name!r} cannot be used here ({first_line(error)}); try --device cpu") from error
    return device


def _samples(images: Path | None, coco: Path | None, limit: int | None) -> list[Sample]:
    from samopt.coco import coco_samples
    from samopt.samples import image_folder, read_image, scene_samples

    if coco is not None:
        if images is None:
            raise InvalidInput("--coco needs --images, the folder with its pictures")
        return coco_samples(coco, images, limit or 100)
    if images is None:
        return scene_samples(limit or 4)
    return [read_image(images)] if images.is_file() else image_folder(images, limit or 4)


def _writable(path: Path) -> None:
    """Refuses a place nothing can be written to before minutes of work, not after."""
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; name a file")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written ({error.strerror}); name another file") from error
    if not existed:
        path.unlink()


def _write_json(path: Path, figures: Any) -> None:
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _kinds_table(agreement: Any) -> Any:
    from rich.table import Table

    table = Table("prompts", "count", "mask IoU", "5 %", "min", "choices changed", "true mIoU before", "after")
    for kind, of in agreement.kinds.items():
        truth = ["" if value is None else f"{value:.4f}" for value in (of.reference_truth, of.truth)]
        figures = [f"{of.mean_iou:.4f}", f"{of.p5_iou:.4f}", f"{of.min_iou:.4f}", f"{of.changed:.1%}"]
        table.add_row(kind, str(len(of.ious)), *figures, *truth)
    return table


def _print(renderable: Any) -> None:
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 140).print(renderable)


def _say(text: str) -> None:
    typer.echo(text)
