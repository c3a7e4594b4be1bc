"""Finds configurations for Meta's models on this GPU: `python -m samopt.passes.kernels.tune [FILE]`.

They are added to FILE, by default to the `tuned.json` that samopt ships. What it has already stays, and is not sought
again; what was tuned for other source of the kernels is dropped from it. Each is written as it is found; where none
works, that is told, and the others are still sought.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from samopt.errors import Unsupported, first_line
from samopt.passes.kernels import cublaslt, image_to_token, linear, tuning
from samopt.passes.kernels.attention_launch import Geometry
from samopt.passes.kernels.attention_problem import problem
from samopt.passes.kernels.cublaslt import Product
from samopt.passes.kernels.devices import HALVES, cannot_run
from samopt.passes.kernels.scaled_problem import float8_problem, int8_problem
from samopt.passes.kernels.tuning import Problem

# Heads and their dimension: of vit_b, vit_l and vit_h, and of sam_tiny.
HEADS = ((12, 64), (16, 64), (16, 80), (3, 64))
# Channels of vit_b and vit_h, and the rows of 1, 2, 4, and 8 or more images.
CHANNELS = (768, 1280)
ROWS = (4096, 8192, 16384, 32768)
# The decoder's image tokens, their channels and heads; prompts; and the tokens of a prompt.
DECODER = (4096, 256, 8)
PROMPTS = (image_to_token.FEW, image_to_token.MANY)
TOKENS = (8, 16)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes each problem and writes the file."""
    parser = argparse.ArgumentParser("python -m samopt.passes.kernels.tune", description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "file", nargs="?", type=Path, default=tuning.SHIPPED, help="JSON file to add to; by default samopt's own"
    )
    file: Path = parser.parse_args(arguments).file
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := cannot_run(device):
        parser.error(f"nothing can be tuned here: {reason}")
    current = {f", source {tuning.source_hash(sought.sources)}, " for sought in problems(device)}
    try:
        entries = {key: value for key, value in tuning.read(file).items() if any(source in key for source in current)}
    except (OSError, ValueError) as error:
        parser.error(f"{file} cannot be added to: {first_line(error)}")
    if device.type == "cuda" and (reason := cublaslt.unavailable(device)):
        print(f"linear: {reason}", flush=True)
    for sought in problems(device):  # one after the other: each holds its inputs
        if sought.versioned_key() in entries:
            continue
        try:
            config = tuning.tune(sought)
        except Unsupported as error:
            print(f"{sought.key()}: {error}", flush=True)
            continue
        entries[sought.versioned_key()] = tuning.encode(config)
        tuning.write(file, entries)
        print(f"{sought.key()}: {config}", flush=True)


def problems(device: torch.device) -> Iterator[Problem]:
    """What Meta's models need on `device`."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for (heads, dimension), window, dtype in itertools.product(HEADS, (64, 14), HALVES):
        yield problem(Geometry(64, 64, window, window, heads, dimension), dtype, device)
    for prompts, tokens, dtype in itertools.product(PROMPTS, TOKENS, HALVES):
        yield image_to_token.problem(prompts, *DECODER, tokens, dtype, device)
    for channels, rows in itertools.product(CHANNELS, ROWS):
        for outputs, inputs in ((3, 1), (1, 1), (4, 1), (1, 4)):  # a block's layers; the last takes GELU at its entry
            yield int8_problem(rows, outputs * channels, inputs * channels, False, torch.bfloat16, device)
            if not cublaslt.unavailable(device):
                gelu = outputs == 4
                sizes = rows, outputs * channels, inputs * channels
                yield linear.problem(Product(*sizes, torch.bfloat16, True, gelu, device))
        yield float8_problem(rows, 4 * channels, channels, device)


if __name__ == "__main__":
    main()
