"""The command line: `samopt demo`, `optimize`, `verify`, `profile`, `passes`, `recipes`, `bench`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from samopt.errors import AccuracyError, InvalidInput, SamoptError, first_line

if TYPE_CHECKING:
    import torch
    from segment_anything.modeling import Sam

    from samopt.bench import Bench, Entry
    from samopt.peers import Peer
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
BatchSizes = Annotated[list[int], typer.Option("--batch-size", min=1, help="For the recipe; repeatable.")]
PeerNames = Annotated[
    list[str], typer.Option("--peer", help="segment_anything_fast or transformers, where installed; repeatable.")
]
PeerBatchSizes = Annotated[
    list[int],
    typer.Option(
        "--peer-batch-size",
        min=1,
        help="For the peers; repeatable. Without it: the largest of the others up to 16.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of what is random: weights without a checkpoint, pixels without pictures.")]
JsonRows = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, too.")]
CsvRows = Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file, too.")]


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

    chosen, samples = Recipe.of(recipe), _samples(images, coco, limit)
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
    batch_size: BatchSizes = [1, 8, 16],  # noqa: B006
    peer: PeerNames = [],  # noqa: B006
    peer_batch_size: PeerBatchSizes = [],  # noqa: B006
    seed: Seed = 0,
    json_out: JsonRows = None,
    csv_out: CsvRows = None,
    device: Device = "auto",
) -> None:
    """Times one model's image encoder, random weights: unmodified, in recipes, and in other implementations.

    Exit code 1: a row failed; the others are there.
    """
    from samopt.bench import Bench
    from samopt.bench_model import bench_model
    from samopt.bench_plan import side_by_side, verified
    from samopt.recipe import Recipe

    peers = _peers(peer, peer_batch_size, json_out, csv_out)
    chosen = [Recipe.of(name) for name in dict.fromkeys(recipe)]
    target = _device(device)
    run = Bench(bench_model(model_type, seed=seed), target, seed, peers)
    run.setting = dataclasses.replace(run.setting, recipes=tuple(each.name for each in chosen), command=_command())
    found = [verified(each, target) for each in chosen]
    for each in found:
        names = ", ".join(repr(step.pass_) for step in each.steps)
        _say(f"{each.recipe.name}, stood verification on sam_tiny: {names}")
    _run_bench(run, side_by_side(found, batch_size, target, peers, peer_batch_size), json_out, csv_out)


@bench.command()
def waterfall(
    checkpoint: Checkpoint = None,
    model_type: Annotated[
        str | None,
        typer.Option(
            help="vit_b, vit_l or vit_h; without --checkpoint its weights are random, and only speed is told."
        ),
    ] = None,
    recipe: RecipeName = "fast",
    batch_size: BatchSizes = [1, 8],  # noqa: B006
    each: Annotated[
        bool, typer.Option("--each", help="Also time each pass alone, at the smallest batch size.")
    ] = False,
    images: Images = None,
    coco: Coco = None,
    limit: ImageLimit = None,
    peer: PeerNames = [],  # noqa: B006
    peer_batch_size: PeerBatchSizes = [],  # noqa: B006
    seed: Seed = 0,
    json_out: JsonRows = None,
    csv_out: CsvRows = None,
    device: Device = "auto",
) -> None:
    """Introduces a recipe step by step: what each step gains in speed and memory, and costs in accuracy.

    The steps are the recipe's [bench] rows, or its entries one by one, compiled. A step that does not stand
    verification is a row that says so. Exit code 1: a row failed; the others are there.
    """
    from samopt.bench import Bench
    from samopt.bench_model import bench_model
    from samopt.bench_plan import forgiving, verified
    from samopt.bench_plan import waterfall as plan
    from samopt.recipe import Recipe
    from samopt.samples import spread

    peers = _peers(peer, peer_batch_size, json_out, csv_out)
    chosen, target = Recipe.of(recipe), _device(device)
    given = None if images is None and coco is None else _samples(images, coco, limit)
    model = bench_model(model_type, checkpoint, seed)
    samples = _samples(None, None, limit) if given is None and model.trained else given
    run = Bench(model, target, seed, peers, samples=samples, whole=True)
    run.setting = dataclasses.replace(run.setting, bench="waterfall", recipes=(chosen.name,), command=_command())
    found = verified(forgiving(chosen), target, model, spread(samples, 4) if samples and model.trained else None)
    rows = plan(
        found,
        model,
        batch_size,
        target,
        each=each,
        samples=None if given is None else spread(given, 4),
        peers=peers,
        peer_batch_sizes=peer_batch_size,
    )
    _run_bench(run, rows, json_out, csv_out)


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(help="What `samopt bench ... --json` wrote.")],
    second: Annotated[Path, typer.Argument(help="The same of another run.")],
    threshold: Annotated[float, typer.Option(min=0, help="By how many percent times may differ.")] = 3.0,
) -> None:
    """Compares two runs row by row. Exit code 1: a time differs by more than the threshold."""
    from samopt.bench_compare import compare_runs

    found = compare_runs(first, second)
    _print(found.table(threshold / 100))
    for line in (*found.warnings, *found.only):
        _say(f"warning: {line}")
    beyond = found.beyond(threshold / 100)
    _say(f"{len(beyond)} of {len(found.pairs)} rows differ by more than {threshold:g} %")
    if beyond:
        raise typer.Exit(1)


def _peers(names: list[str], batch_sizes: list[int], *outputs: Path | None) -> list[Peer]:
    """The peers asked for; refuses what a benchmark would stumble over after minutes."""
    from samopt.peers import find_peer

    for path in outputs:
        if path is not None:
            _writable(path)
    if batch_sizes and not names:
        raise InvalidInput("--peer-batch-size needs --peer")
    return [find_peer(name) for name in dict.fromkeys(names)]


def _run_bench(run: Bench, entries: Sequence[Entry], json_out: Path | None, csv_out: Path | None) -> None:
    """Times the entries. Each row is shown and written as soon as it is there: the next may take minutes, or be the
    end. Ctrl-C ends the run with the rows that are done."""
    from samopt.bench_table import FAILED, Row, outcome, table, to_csv, to_dict
    from samopt.progress import Progress

    rows: list[Row] = []
    stopped = False
    try:
        with Progress(len(entries)) as progress:
            progress.step(entries[0].what)
            for row in run.rows(entries):
                rows.append(row)
                if json_out is not None:
                    _write_json(json_out, to_dict(run.setting, rows))
                if csv_out is not None:
                    _write(csv_out, to_csv(run.setting, rows))
                progress.step(entries[len(rows)].what if len(rows) < len(entries) else "")
                left = f"; {progress.left}" if progress.left else ""
                _say(f"{run.setting.model} {row.what} batch {row.batch_size}: {outcome(row)}{left}")
    except KeyboardInterrupt:
        stopped = True
    if rows:
        _print(table(run.setting, rows))
    if stopped:
        places = " and ".join(str(path) for path in (json_out, csv_out) if path is not None and rows)
        _say(f"stopped: {len(rows)} of {len(entries)} rows are done" + (f", and in {places}" if places else ""))
        raise typer.Exit(130)
    if any(row.status == FAILED for row in rows):
        raise typer.Exit(1)


def _command() -> str:
    """What was typed, for the results."""
    return shlex.join(["samopt", *sys.argv[1:]])


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
    _write(path, json.dumps(figures, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Writes a file as a whole: one that was there stays until the new one is complete."""
    if path.exists() and not path.is_file():  # a terminal or a pipe
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


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
