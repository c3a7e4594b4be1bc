"""GPU memory of one call: its peak, and who allocated what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samopt.memory import kept_by_graphs

MOST_EVENTS = 200_000  # allocations and frees that a snapshot keeps: a call makes some thousands


@dataclass(frozen=True)
class Memory:
    """What a call takes of the GPU's memory.

    Attributes:
        peak_bytes: the model's weights and all that is alive with them at the worst moment, and what CUDA graphs keep.
        weight_bytes: the weights alone, buffers included.
    """

    peak_bytes: int
    weight_bytes: int


def memory_of(model: nn.Module, call: Callable[[], Any], device: torch.device, snapshot: Path | None) -> Memory:
    """Measures a call that was made before, and so allocates only what each call does.

    What else is on the GPU, another model for one, is not counted.

    Args:
        model: what is called, for the size of its weights.
        call: what to do.
        device: a GPU.
        snapshot: where to write the history of allocations, for https://pytorch.org/memory_viz; None writes none. That
            page reads the pickle that PyTorch writes, plain lists and dictionaries. Nothing here ever loads it.
    """
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graphs = kept_by_graphs(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if snapshot is not None:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
        try:
            call()
            peak = torch.cuda.max_memory_allocated()
            if snapshot is not None:
                torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            if snapshot is not None:
                torch.cuda.memory._record_memory_history(enabled=None)
    return Memory(peak - before + weights + graphs, weights)
