"""Trains the embedded model: ``python -m samopt.tiny.train --out DIR``.

Reproduces ``sam_tiny.safetensors`` on one GPU in pieces: each run trains for ``--minutes`` and the next one, with
``--resume``, goes on where it stopped, until ``--total-minutes`` are reached. The schedule follows elapsed time, so
that any machine completes it; a slower one takes fewer steps. Part of the steps see small pictures, which cost little
and make the model useful at 256 and 512 px.

``--evaluate WEIGHTS`` scores a file instead; ``--profile-steps N`` times N steps of each kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samopt.errors import InvalidInput, SamoptError
from samopt.precision import tf32_convolutions

from .evaluate import FIRST_SEED, evaluate
from .model import RECORD, WEIGHTS, check_size, load_weights
from .plans import AUTO, CANDIDATES
from .step import forward_error
from .trainer import Settings, Trainer

# What the second scores, at the other sizes and of earlier pieces, are taken over.
FEW_SCENES = 64
FORWARD_TOLERANCE = 1e-3
RECOMPILE_LIMIT = 64


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    # Off Linux torch comes without triton.
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    if device.type == "cuda":
        versions["device"] = torch.cuda.get_device_name(device)
    else:
        versions["device"] = platform.processor() or platform.machine()
    return versions


def _score(weights: Path, settings: Settings, complete: bool) -> dict[str, Any]:
    """Scores of a weights file per size: all scenes at the largest size when ``complete``, fewer elsewhere."""
    scores: dict[str, Any] = {}
    for size in sorted(settings.sizes, reverse=True):
        whole = complete and size == max(settings.sizes)
        count = settings.scenes if whole else min(FEW_SCENES, settings.scenes)
        began = time.perf_counter()
        found = evaluate(load_weights(weights, size, settings.device), range(FIRST_SEED, FIRST_SEED + count))
        scores[str(size)] = {"scenes": count, **found}
        print(f"{size} px, {count} scenes, {time.perf_counter() - began:.1f} s: {found}", flush=True)
    return scores


def _write_record(trainer: Trainer, scores: dict[str, Any]) -> None:
    settings = trainer.settings
    weights = settings.out / WEIGHTS
    names = ("seed", "sizes", "batch", "lr", "weight_decay", "ema", "total_minutes")
    record = {
        "steps": trainer.step,
        "minutes": round(trainer.elapsed / 60, 2),
        "finished": trainer.finished,
        "settings": {name: value for name, value in asdict(settings).items() if name in names},
        "versions": _versions(trainer.device),
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "first_scene_seed": FIRST_SEED,
        "scores": scores,
    }
    (settings.out / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _check_forward(device: torch.device) -> None:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with tf32_convolutions(False):
        error = forward_error(device)
    torch.set_float32_matmul_precision(precision)
    print(f"training arithmetic against segment_anything's: relative error {error:.1e}", flush=True)
    if not error < FORWARD_TOLERANCE:
        raise SamoptError(f"the training forward errs by {error:.1e} on {device}; it must match segment_anything's")


def profile(trainer: Trainer) -> None:
    """Times the first step (which compiles) and further steps of each size, with and without a second round."""
    for size in sorted(trainer.settings.sizes, reverse=True):
        for refine in (False, True):
            began = time.perf_counter()
            trainer.clock.wait(trainer.train_one(size, refine).marks[2])
            first = time.perf_counter() - began
            began = time.perf_counter()
            steps = [trainer.train_one(size, refine) for _ in range(trainer.settings.profile_steps)]
            issued = time.perf_counter() - began
            trainer.clock.wait(steps[-1].marks[2])
            wall = time.perf_counter() - began
            print(
                f"{size} px, refine {refine}: first step {first:.1f} s, then {1e3 * wall / len(steps):.1f} ms a step "
                f"(host {1e3 * issued / len(steps):.1f} ms)",
                flush=True,
            )
            trainer.log(steps)
    if trainer.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(trainer.device) / 2**30:.1f} GiB", flush=True)


def train(settings: Settings) -> dict[str, Any]:
    """Runs one piece and returns its scores, after writing checkpoint, weights and record to ``settings.out``."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("no CUDA device is available; train with --device cpu (slow) or on a machine with a GPU")
    for size in settings.sizes:
        check_size(size)
    torch.set_float32_matmul_precision("high")
    # Three sizes times a few kinds of block; beyond the default of 8, dynamo would silently stop compiling.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    began = time.perf_counter()
    _check_forward(torch.device(settings.device))
    trainer = Trainer(settings)
    print(f"ready after {time.perf_counter() - began:.1f} s on {_versions(trainer.device)}", flush=True)
    if settings.profile_steps:
        profile(trainer)
        trainer.save()
    else:
        trainer.run()
    scores = _score(settings.out / WEIGHTS, settings, trainer.finished)
    _write_record(trainer, scores)
    return scores


def _parser() -> argparse.ArgumentParser:
    defaults = {field.name: field.default for field in fields(Settings)}
    parser = argparse.ArgumentParser(prog="python -m samopt.tiny.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("sam_tiny"), help="folder for checkpoint, weights and record")
    parser.add_argument("--minutes", type=float, help="training time of this piece")
    parser.add_argument("--total-minutes", type=float, help="training time of the whole schedule")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint (or the weights) in --out")
    parser.add_argument("--batch", type=int, help="images a step at the largest size")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--sizes", type=_sizes, help="image sizes, such as 1024,512,256")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile on a GPU")
    parser.add_argument("--compile-from", type=int, help="smaller images run uncompiled: they are not worth the wait")
    parser.add_argument("--attention", choices=[AUTO, *CANDIDATES], help="how attention is computed on a GPU")
    parser.add_argument("--seed", type=int, help="of weights, scenes and prompts")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, help="of matrices")
    parser.add_argument("--ema", type=float, help="decay of the averaged weights")
    parser.add_argument("--scenes", type=int, help="scenes to score on")
    parser.add_argument("--max-steps", type=int, help="stop the piece after so many steps")
    parser.add_argument("--profile-steps", type=int, help="time so many steps of each kind instead of training")
    parser.add_argument("--evaluate", type=Path, metavar="WEIGHTS", help="score a weights file and exit")
    parser.set_defaults(**{name: value for name, value in defaults.items() if name != "out"})
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    weights: Path | None = options.pop("evaluate")
    settings = Settings(**options)
    try:
        if weights is not None:
            print(json.dumps(_score(weights, settings, complete=True), indent=2))
        else:
            train(settings)
    except SamoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
