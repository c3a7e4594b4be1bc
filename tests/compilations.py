"""How often torch.compile compiled."""

from __future__ import annotations

import torch


def compilations() -> int:
    """Graphs that were compiled since the counters of the fixture `fresh_compiler` were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
