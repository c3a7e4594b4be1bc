"""`samopt segment` and `samopt embed`: folders of images."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from samopt.cli_common import Checkpoint, Device, ModelType, RecipeName, load_model, read_samples, say


class EngineName(enum.StrEnum):
    """Where images are worked on."""

    local = "local"
    ray = "ray"


class Dtype(enum.StrEnum):
    """Of embeddings."""

    float16 = "float16"
    float32 = "float32"


Inputs = Annotated[
    list[str], typer.Argument(metavar="INPUT", help='Images; folders, with all below them; patterns, "a/**/*.jpg".')
]
Out = Annotated[
    Path, typer.Option(help="The folder for the results. One that has some of the same settings is continued.")
]
VerifyOn = Annotated[
    Path | None,
    typer.Option("--images", help="A picture, or a folder of them, to verify the recipe on. Without it: drawn scenes."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Images encoded together. Without it: up to 8, as fit into memory.")
]
ShardSize = Annotated[int | None, typer.Option(min=1, help="Images whose results are one file. Without it: 128.")]
EngineOption = Annotated[EngineName, typer.Option(help="ray: on all GPUs of this machine, or of a cluster.")]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster; without it, Ray is started on this machine.")]


def segment(
    inputs: Inputs,
    out: Out,
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: VerifyOn = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Points and boxes: a COCO, CSV or JSON file. Without it: every mask there is.")
    ] = None,
    multimask: Annotated[
        bool | None,
        typer.Option(
            help="For a prompt the best rated of three masks, or the single one. "
            "Without it: of three where the prompt is a single point."
        ),
    ] = None,
    points_per_side: Annotated[int | None, typer.Option(min=1, help="Of the grid that finds every mask: 32.")] = None,
    pred_iou_thresh: Annotated[float | None, typer.Option(help="Masks rated lower are dropped: 0.88.")] = None,
    stability_score_thresh: Annotated[float | None, typer.Option(help="Less stable masks are dropped: 0.95.")] = None,
    crop_n_layers: Annotated[int | None, typer.Option(min=0, help="Layers of crops searched, too: 0.")] = None,
    min_mask_region_area: Annotated[int | None, typer.Option(min=0, help="Removes smaller holes, islands: 0.")] = None,
    coco: Annotated[bool, typer.Option("--coco", help="Write coco.json, too.")] = False,
    label_maps: Annotated[bool, typer.Option("--label-maps", help="Write a 16-bit PNG per image, too.")] = False,
    overlays: Annotated[bool, typer.Option("--overlays", help="Write pictures of the masks, too.")] = False,
    batch_size: BatchSize = None,
    shard_size: ShardSize = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    device: Device = "auto",
) -> None:
    """Finds the masks of many images and writes them to a folder, as Parquet.

    The same command continues a run that ended early. Exit code 1: some images have no results, and summary.json says
    why; 128 + its number: a signal ended the run.
    """
    from samopt.folders import segment as run

    options = {
        "points_per_side": points_per_side,
        "pred_iou_thresh": pred_iou_thresh,
        "stability_score_thresh": stability_score_thresh,
        "crop_n_layers": crop_n_layers,
        "min_mask_region_area": min_mask_region_area,
    }
    _end(
        run(
            load_model(checkpoint, model_type, device),
            inputs,
            out,
            prompts=prompts,
            multimask=multimask,
            generator={name: value for name, value in options.items() if value is not None},
            coco=coco,
            label_maps=label_maps,
            overlays=overlays,
            recipe=recipe,
            samples=None if images is None else read_samples(images, None, None),
            inplace=True,
            batch_size=batch_size,
            shard_size=shard_size,
            engine=engine.value,
            address=address,
        ),
    )


def embed(
    inputs: Inputs,
    out: Out,
    checkpoint: Checkpoint = None,
    model_type: ModelType = None,
    recipe: RecipeName = "fast",
    images: VerifyOn = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the embeddings. Without it: float16.")] = None,
    batch_size: BatchSize = None,
    shard_size: ShardSize = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    device: Device = "auto",
) -> None:
    """Encodes many images and writes the embeddings to a folder, as safetensors.

    samopt.load_embedding puts one back into a predictor. Exit codes as for segment.
    """
    from samopt.folders import embed as run

    _end(
        run(
            load_model(checkpoint, model_type, device),
            inputs,
            out,
            dtype=None if dtype is None else dtype.value,
            recipe=recipe,
            samples=None if images is None else read_samples(images, None, None),
            inplace=True,
            batch_size=batch_size,
            shard_size=shard_size,
            engine=engine.value,
            address=address,
        ),
    )


def _end(summary: Any) -> None:
    """Says what became of the images, and ends with the exit code that says so, too."""
    say(str(summary))
    say(f"{summary.folder}: the results")
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)
