"""Folders of images, to the end: `segment` and `embed`."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from samopt.automatic_mask_generator import AutomaticMaskGenerator
from samopt.errors import InvalidInput
from samopt.fingerprint import fingerprint
from samopt.folders.engine import Engine, Plan, asks_of, make_task, run_local
from samopt.folders.exports import write_coco, write_pictures
from samopt.folders.inputs import list_images
from samopt.folders.job import (
    SUMMARY,
    check_free,
    check_same,
    locked,
    open_job,
    read_manifest,
    read_settings,
    write_json,
)
from samopt.folders.stopping import stopping_on_signals
from samopt.folders.summary import Pace, Summary, summarise
from samopt.memory import PROMPTS, images_at_once, memory_budget, prompts_at_once
from samopt.optimize import optimize
from samopt.progress import Progress
from samopt.recipe import ATTRIBUTE as RECIPE
from samopt.recipe import Recipe, Step
from samopt.report import ATTRIBUTE
from samopt.structure import check_sam

SHARD_SIZE = 128
DTYPES = {"float16": torch.float16, "float32": torch.float32}
Inputs = str | Path | Iterable[str | Path]


def segment(
    model: nn.Module,
    inputs: Inputs,
    out: str | Path,
    *,
    prompts: str | Path | None = None,
    multimask: bool | None = None,
    generator: Mapping[str, Any] | None = None,
    coco: bool = False,
    label_maps: bool = False,
    overlays: bool = False,
    recipe: Any = None,
    samples: Any = None,
    inplace: bool = False,
    batch_size: int | None = None,
    shard_size: int | None = None,
    engine: Engine = "local",
    address: str | None = None,
) -> Summary:
    """Finds the masks of many images, and writes them to a folder as Parquet, in shards of so many images.

    A run that ended early, however it did, is continued by the same call, and one that did not is left as it is.

    Args:
        model: a Sam, on its device.
        inputs: files, folders, which are searched to all depths, and patterns.
        out: the folder for the results; see the README for what is in it.
        prompts: a file of prompts, see `samopt.folders.prompts_file.read_prompts`; None for every mask of an image.
        multimask: of three masks for a prompt keep the one rated best, or take the single one; None for three where the
            prompt is a single point.
        generator: arguments of `AutomaticMaskGenerator`, where there are no prompts.
        coco: write the masks to coco.json, too.
        label_maps: write a PNG of 16 bits per image, too: 0, or the number of the mask, from 1.
        overlays: write pictures of the masks, too.
        recipe: optimise the model so first; see `optimize`. None takes it as it is.
        samples: pictures to measure accuracy on then.
        inplace: optimise the model itself, not a copy.
        batch_size: images encoded together; None for up to 8, as fit into memory.
        shard_size: images whose results are one file; None for 128.
        engine: "local", or "ray" for several GPUs or machines.
        address: of the Ray cluster; None starts Ray on this machine.

    Raises:
        InvalidInput: inputs, options or prompts that cannot be used; a folder with other things, or results of other
            settings, which stay as they are.
        SamoptError: as `optimize` raises.
    """
    if prompts is None:
        if multimask is not None:
            raise InvalidInput("multimask is for prompts of a file; every mask of an image is found with three a point")
        options = _generator_options(model, generator or {})
    else:
        if generator:
            raise InvalidInput(f"{', '.join(generator)}: for every mask of an image, not for prompts of a file")
        digest = hashlib.sha256(_content(Path(prompts))).hexdigest()
        options = {"prompts": digest, "multimask": multimask}
    folder = Path(out)
    summary = _run(
        model,
        inputs,
        folder,
        {"task": "segment", "options": options, "batch_size": batch_size, "shard_size": shard_size},
        Plan(engine, address, None if prompts is None else Path(prompts)),
        recipe,
        samples,
        inplace,
        pictures=(label_maps, overlays),
    )
    if coco:
        write_coco(folder)
    return summary


def embed(
    model: nn.Module,
    inputs: Inputs,
    out: str | Path,
    *,
    dtype: Literal["float16", "float32"] | None = None,
    recipe: Any = None,
    samples: Any = None,
    inplace: bool = False,
    batch_size: int | None = None,
    shard_size: int | None = None,
    engine: Engine = "local",
    address: str | None = None,
) -> Summary:
    """Encodes many images, and writes the embeddings to a folder as safetensors, in shards of so many images.

    `load_embedding` puts one back into a predictor. For the other arguments see `segment`.

    Args:
        model: a Sam, on its device.
        inputs: files, folders, and patterns.
        out: the folder for the results.
        dtype: of the embeddings; None for float16.
        recipe: see `segment`, and the others likewise.

    Raises:
        InvalidInput: as `segment`.
        SamoptError: as `optimize` raises.
    """
    if dtype not in (None, *DTYPES):
        raise InvalidInput(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    known = read_settings(out)
    kept = known["options"] if known is not None and dtype is None and known["task"] == "embed" else None
    settings = {
        "task": "embed",
        "options": kept or {"dtype": dtype or "float16"},
        "batch_size": batch_size,
        "shard_size": shard_size,
    }
    return _run(model, inputs, Path(out), settings, Plan(engine, address), recipe, samples, inplace)


def _run(
    model: nn.Module,
    inputs: Inputs,
    out: Path,
    settings: dict[str, Any],
    plan: Plan,
    recipe: Any,
    samples: Any,
    inplace: bool,
    pictures: tuple[bool, bool] = (False, False),
) -> Summary:
    check_sam(model)
    for name in ("batch_size", "shard_size"):
        if settings[name] is not None and settings[name] < 1:
            raise InvalidInput(f"{name} must be at least 1, not {settings[name]}")
    plan.check()
    before = read_settings(out)
    if before is None:
        check_free(out)
    images = list_images([inputs] if isinstance(inputs, (str, Path)) else inputs, leave_out=out)
    earlier = [image for shard in read_manifest(out) for image in shard]
    asks = asks_of(plan, dict.fromkeys([*earlier, *images]))
    with locked(out), warnings.catch_warnings():
        # What PIL warns of is an error here, and recorded as one.
        warnings.filterwarnings("ignore", category=_bomb_warning())
        chosen = None if recipe is None else Recipe.of(recipe)
        known = chosen or vars(model).get(RECIPE)
        entries = [] if known is None else [repr(step.pass_) for step in known.steps]
        settings |= {"model": fingerprint(model), "recipe": entries}
        if before is not None:
            check_same(out, before, settings)
        if chosen is not None:
            model = _optimised(model, chosen, before, samples, inplace)
        report = vars(model).get(ATTRIBUTE)
        applied = [] if report is None else [step.name for step in report.steps if step.status == "applied"]
        settings["passes"] = applied
        if before is None:
            settings |= _sizes(model, settings)
        task = make_task(model, settings, asks)
        job = open_job(out, json.loads(json.dumps(settings)), task.suffix, images)
        shards = list(job.shards())
        pending = [shard for shard in shards if not shard.path.exists()]
        with (
            Progress(sum(len(shard.images) for shard in pending), unit="img") as progress,
            stopping_on_signals(progress.say) as stop,
        ):
            progress.name(settings["task"])
            pace, stages = Pace(progress.advance), {}
            if plan.engine == "ray":
                from samopt.folders.ray_engine import run_ray

                run_ray(model, job, plan, pending, stop, pace)
            else:
                stages = run_local(model, task, job, pending, stop, pace)
            summary = summarise(job, shards, {shard.number for shard in pending}, pace, stages, stop.signal)
        if any(pictures):
            write_pictures(job, *pictures)
        write_json(out / SUMMARY, summary.to_dict())
    return summary


def _optimised(model: nn.Module, recipe: Recipe, before: dict[str, Any] | None, samples: Any, inplace: bool) -> Any:
    """The optimised model; where results are to be continued, by the passes that they were made with: which are kept
    depends on measurements, and those may come out differently each time."""
    if before is None:
        return optimize(model, recipe, samples=samples, inplace=inplace)
    kept = [Step(step.pass_) for step in recipe.steps if repr(step.pass_) in before["passes"]]
    return optimize(model, kept, samples=samples, inplace=inplace, verify="off") if kept else model


def _sizes(model: Any, settings: dict[str, Any]) -> dict[str, int]:
    """How many images and prompts at once, as fit into memory, where nothing else was asked."""
    budget = memory_budget(torch.device(str(model.device)))
    return {
        "batch_size": settings["batch_size"] or images_at_once(model, budget),
        "prompts_per_batch": prompts_at_once(model, budget, PROMPTS),
        "shard_size": settings["shard_size"] or SHARD_SIZE,
    }


def _generator_options(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    taken = {"self", "model", "output_mode", "points_per_batch", "views_per_batch"}
    known = inspect.signature(AutomaticMaskGenerator.__init__).parameters.keys() - taken
    if unknown := options.keys() - known:
        raise InvalidInput(f"unknown options of the generator: {', '.join(sorted(unknown))}; known: {sorted(known)}")
    AutomaticMaskGenerator(model, **options)
    found: dict[str, Any] = json.loads(json.dumps(options, default=lambda array: array.tolist()))
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: the prompts cannot be read ({error.strerror})") from error


def _bomb_warning() -> type[Warning]:
    from PIL.Image import DecompressionBombWarning

    return DecompressionBombWarning
