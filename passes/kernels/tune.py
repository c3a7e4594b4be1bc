"""Finds configurations for Meta's models on this GPU: `python -m samopt.passes.kernels.tune [FILE]`.

They are added to FILE, by default to the `tuned.json` that samopt ships. What was tuned for other source of the kernels
is dropped from it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

from samopt.passes.kernels import tuning
from samopt.passes.kernels.attention_launch import Geometry
from samopt.passes.kernels.attention_problem import problem

# Heads and their dimension: of vit_b, vit_l and vit_h, and of sam_tiny.
HEADS = ((12, 64), (16, 64), (16, 80), (3, 64))


def main() -> None:
    """Tunes each geometry and writes the file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else tuning.SHIPPED
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    entries = {key: value for key, value in old.items() if key.endswith(f"source {tuning.source_hash()}")}
    device = torch.device("cuda", torch.cuda.current_device())
    for heads, dimension in HEADS:
        for window in (64, 14):
            for dtype in (torch.bfloat16, torch.float16):
                sought = problem(Geometry(64, 64, window, window, heads, dimension), dtype, device)
                config = tuning.tune(sought)
                entries[sought.key()] = dataclasses.asdict(config)
                print(f"{sought.key()}: {config}")
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
