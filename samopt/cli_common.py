"""What the commands share: options, what they read and write, and how they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samopt.errors import InvalidInput, first_line

if TYPE_CHECKING:
    import torch
    from segment_anything.modeling import Sam

    from samopt.samples import Sample

Checkpoint = Annotated[Path | None, typer.Option(help="Meta's .pth file. Without it: the embedded model, sam_tiny.")]
ModelType = Annotated[
    str | None,
    typer.Option(help="vit_b, vit_l or vit_h: which model the checkpoint is; without it, what it turns out to be."),
]
RecipeName = Annotated[
    str, typer.Option(help="A built-in recipe (see `samopt recipes`), a TOML file, or the folder of a saved model.")
]
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


def load_model(checkpoint: Path | None, model_type: str | None, device: str) -> Sam:
    """The model of a checkpoint, or the embedded one, on its device; says which it is."""
    from samopt.checkpoint import load_checkpoint
    from samopt.tiny import load_tiny

    if checkpoint is None and model_type is not None:
        raise InvalidInput(f"--model-type {model_type} needs --checkpoint; without both, the model is sam_tiny")
    target = pick_device(device)
    sam = load_tiny() if checkpoint is None else load_checkpoint(checkpoint, model_type)
    say(f"model: {'sam_tiny, the embedded one' if checkpoint is None else checkpoint}")
    return sam.to(target)


def pick_device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        InvalidInput: nothing can be put there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"device {name!r} cannot be used here ({first_line(error)}); try --device cpu") from error
    return device


def read_samples(images: Path | None, coco: Path | None, limit: int | None) -> list[Sample]:
    """The pictures to measure on: COCO's with their ground truth, the user's, or drawn scenes."""
    from samopt.coco import coco_samples
    from samopt.samples import image_folder, read_image, scene_samples

    if coco is not None:
        if images is None:
            raise InvalidInput("--coco needs --images, the folder with its pictures")
        return coco_samples(coco, images, limit or 100)
    if images is None:
        return scene_samples(limit or 4)
    return [read_image(images)] if images.is_file() else image_folder(images, limit or 4)


def check_writable(path: Path) -> None:
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


def write_json(path: Path, figures: Any) -> None:
    """Writes figures as JSON; see `write_whole`."""
    write_whole(path, json.dumps(figures, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file as a whole: one that was there stays until the new one is complete."""
    if path.exists() and not path.is_file():  # a terminal or a pipe
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def show(renderable: Any) -> None:
    """Prints a table or a report, as wide as the terminal is."""
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 140).print(renderable)


def say(text: str) -> None:
    """Prints a line."""
    typer.echo(text)
