"""The command line: `samopt bench encoder`, `waterfall`, `everything`, `compare`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samopt.bench_processes import file_of, run_each
from samopt.cli_common import (
    Checkpoint,
    Coco,
    Device,
    ImageLimit,
    Images,
    RecipeName,
    check_writable,
    pick_device,
    read_samples,
    say,
    show,
    write_json,
    write_whole,
)
from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from samopt.bench import Bench, Entry
    from samopt.peers import Peer

bench = typer.Typer(no_args_is_help=True, help="Measures speed; every figure comes with machine and versions.")

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


@bench.command()
def encoder(
    context: typer.Context,
    model_type: Annotated[
        list[str], typer.Option(help="vit_b, vit_l, vit_h or sam_tiny; repeatable, each has a process of its own.")
    ],
    recipe: Annotated[list[str], typer.Option(help="A built-in recipe or a TOML file; repeatable.")] = ["fast"],  # noqa: B006 - typer copies it
    batch_size: BatchSizes = [1, 8, 16],  # noqa: B006
    peer: PeerNames = [],  # noqa: B006
    peer_batch_size: PeerBatchSizes = [],  # noqa: B006
    seed: Seed = 0,
    json_out: JsonRows = None,
    csv_out: CsvRows = None,
    device: Device = "auto",
) -> None:
    """Times a model's image encoder, random weights: unmodified, in recipes, and in other implementations.

    Of several models the results are in a file each, rows-vit_b.json for --json rows.json. Exit code 1: a row failed;
    the others are there.
    """
    from samopt.bench import Bench
    from samopt.bench_model import bench_model
    from samopt.bench_plan import side_by_side, verified
    from samopt.recipe import Recipe

    models = _models(model_type)
    peers = _peers(peer, peer_batch_size, *_files(models, json_out, csv_out))
    chosen = [Recipe.of(name) for name in dict.fromkeys(recipe)]
    if len(models) > 1:
        run_each(context, models)
        return
    target = pick_device(device)
    run = Bench(bench_model(models[0], seed=seed), target, seed, peers)
    run.setting = dataclasses.replace(run.setting, recipes=tuple(each.name for each in chosen), command=_command())
    found = [verified(each, target) for each in chosen]
    for each in found:
        names = ", ".join(repr(step.pass_) for step in each.steps)
        say(f"{each.recipe.name}, stood verification on sam_tiny: {names}")
    _run_bench(run, side_by_side(found, batch_size, target, peers, peer_batch_size), json_out, csv_out)


@bench.command()
def waterfall(
    context: typer.Context,
    checkpoint: Checkpoint = None,
    model_type: Annotated[
        list[str],
        typer.Option(
            help="vit_b, vit_l or vit_h; without --checkpoint its weights are random, and only speed is told. "
            "Repeatable without it, each has a process of its own."
        ),
    ] = [],  # noqa: B006 - typer copies it
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

    The steps are the rows that the recipe names for its bench, or its entries one by one, compiled. One that does not
    stand verification is a row that says so. Of several models the results are in a file each, rows-vit_b.json for
    --json rows.json. Exit code 1: a row failed; the others are there.
    """
    from samopt.bench import Bench
    from samopt.bench_model import bench_model
    from samopt.bench_plan import forgiving, verified
    from samopt.bench_plan import waterfall as plan
    from samopt.recipe import Recipe
    from samopt.samples import spread

    models = _models(model_type)
    if len(models) > 1 and checkpoint is not None:
        raise InvalidInput("a checkpoint is of one model: give --model-type once, or leave it out")
    peers = _peers(peer, peer_batch_size, *_files(models, json_out, csv_out))
    chosen = Recipe.of(recipe)
    if len(models) > 1:
        run_each(context, models)
        return
    target = pick_device(device)
    given = None if images is None and coco is None else read_samples(images, coco, limit)
    model = bench_model(models[0] if models else None, checkpoint, seed)
    samples = read_samples(None, None, limit) if given is None and model.trained else given
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
def everything(
    checkpoint: Checkpoint = None,
    model_type: Annotated[
        str | None, typer.Option(help="vit_b, vit_l or vit_h; without --checkpoint its weights are random.")
    ] = None,
    recipe: Annotated[list[str], typer.Option(help="A built-in recipe or a TOML file; repeatable.")] = ["max"],  # noqa: B006
    images: Images = None,
    limit: ImageLimit = None,
    points_per_side: Annotated[int, typer.Option(min=1, help="As in SamAutomaticMaskGenerator.")] = 32,
    pred_iou_thresh: Annotated[float, typer.Option(help="Likewise.")] = 0.88,
    stability_score_thresh: Annotated[float, typer.Option(help="Likewise.")] = 0.95,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls for each picture.")] = 3,
    seed: Seed = 0,
    json_out: JsonRows = None,
    device: Device = "auto",
) -> None:
    """Times every mask of a picture, and 64 points at once: the unmodified model, by Meta's classes, and recipes."""
    from samopt.bench import versions_of
    from samopt.bench_everything import CallsBench, table, to_dict
    from samopt.bench_model import bench_model
    from samopt.bench_plan import verified
    from samopt.recipe import Recipe

    if json_out is not None:
        check_writable(json_out)
    target, samples = pick_device(device), read_samples(images, None, limit)
    model = bench_model(model_type, checkpoint, seed)
    found = [verified(Recipe.of(name), target, model) for name in dict.fromkeys(recipe)]
    settings = {
        "points_per_side": points_per_side,
        "pred_iou_thresh": pred_iou_thresh,
        "stability_score_thresh": stability_score_thresh,
    }
    rows = []
    for row in CallsBench(model.sam.to(target), samples, repeats, **settings).rows([each.stood for each in found]):
        rows.append(row)
        say(f"{row.what}: {row.everything_ms:.1f} ms a picture, {row.predict_ms:.2f} ms for 64 points")
        if json_out is not None:  # after every row, as the next one may take minutes, or be the end
            about = {"model": model.name, "weights": model.weights, "command": _command(), **settings}
            write_json(json_out, {**about, "versions": versions_of(target, ()), "rows": to_dict(rows)})
    show(table(f"{model.name}, {len(samples)} pictures, {points_per_side}x{points_per_side} points", rows))


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(help="What `samopt bench ... --json` wrote.")],
    second: Annotated[Path, typer.Argument(help="The same of another run.")],
    threshold: Annotated[float, typer.Option(min=0, help="By how many percent times may differ.")] = 3.0,
) -> None:
    """Compares two runs row by row. Exit code 1: a time differs by more than the threshold."""
    from samopt.bench_compare import compare_runs

    found = compare_runs(first, second)
    show(found.table(threshold / 100))
    for line in (*found.warnings, *found.only):
        say(f"warning: {line}")
    beyond = found.beyond(threshold / 100)
    say(f"{len(beyond)} of {len(found.pairs)} rows differ by more than {threshold:g} %")
    if beyond:
        raise typer.Exit(1)


def _models(model_types: Sequence[str]) -> list[str]:
    """The models asked for; of several, one that is unknown is refused before any is timed."""
    from samopt.bench_model import check_model_type

    models = list(dict.fromkeys(model_types))
    if len(models) > 1:
        for model_type in models:
            check_model_type(model_type)
    return models


def _files(models: Sequence[str], *outputs: Path | None) -> list[Path | None]:
    """Where results will be written."""
    if len(models) < 2:
        return [*outputs]
    return [file_of(path, model_type) for path in outputs for model_type in models]


def _peers(names: list[str], batch_sizes: list[int], *outputs: Path | None) -> list[Peer]:
    """The peers asked for; refuses what a benchmark would stumble over after minutes."""
    from samopt.peers import find_peer

    for path in outputs:
        if path is not None:
            check_writable(path)
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
                    write_json(json_out, to_dict(run.setting, rows))
                if csv_out is not None:
                    write_whole(csv_out, to_csv(run.setting, rows))
                progress.step(entries[len(rows)].what if len(rows) < len(entries) else "")
                left = f"; {progress.left}" if progress.left else ""
                say(f"{run.setting.model} {row.what} batch {row.batch_size}: {outcome(row)}{left}")
    except KeyboardInterrupt:
        stopped = True
    if rows:
        show(table(run.setting, rows))
    if stopped:
        places = " and ".join(str(path) for path in (json_out, csv_out) if path is not None and rows)
        say(f"stopped: {len(rows)} of {len(entries)} rows are done" + (f", and in {places}" if places else ""))
        raise typer.Exit(130)
    if any(row.status == FAILED for row in rows):
        raise typer.Exit(1)


def _command() -> str:
    """What was typed, for the results."""
    return shlex.join(["samopt", *sys.argv[1:]])
