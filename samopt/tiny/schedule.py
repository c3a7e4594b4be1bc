"""What a training step looks like at a given moment, as pure functions of step number and progress in [0, 1]."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

WARM_UP_STEPS = 200
EARLY = 0.4  # the share of the schedule spent below the full size
REFINED = 0.5  # the share of steps with a second round of prompts
LAST_RATE = 0.01  # the final learning rate, as a share of the first
SHARPNESS = (0.01, 0.15)  # weight of the cross entropy per object pixel, first and last


@dataclass(frozen=True)
class StepKind:
    """The size of the images and whether the answers are refined."""

    size: int
    refine: bool


def size_shares(sizes: tuple[int, ...], progress: float) -> dict[int, float]:
    """How often each size is drawn: early on only sizes below the largest, then mostly the largest."""
    descending = sorted(sizes, reverse=True)
    if len(descending) == 1:
        return {descending[0]: 1.0}
    largest, second, *rest = descending
    if progress < EARLY:
        return {second: 3.0} | dict.fromkeys(rest, 1.0)
    return {largest: 0.65} | {size: 0.35 / len(descending[1:]) for size in descending[1:]}


def step_kind(seed: int, step: int, sizes: tuple[int, ...], progress: float) -> StepKind:
    """The kind of a step; equal arguments give equal kinds."""
    chance = random.Random(f"{seed}/{step}")
    shares = size_shares(sizes, progress)
    size = chance.choices(list(shares), weights=list(shares.values()))[0]
    return StepKind(size, chance.random() < REFINED)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up over steps, cosine decay over time."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)


def sharpness(progress: float) -> float:
    """The weight of ``mask_losses``' last term."""
    first, last = SHARPNESS
    return first + (last - first) * min(progress, 1.0)


def batch_for(size: int, sizes: tuple[int, ...], batch: int) -> int:
    """Smaller pictures come in larger batches, at most three times the full size's."""
    return min(3 * batch, batch * max(sizes) // size)
