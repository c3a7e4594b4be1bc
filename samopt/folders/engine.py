"""Where shards are worked on: in this process, or elsewhere, by the same worker."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from samopt.errors import InvalidInput
from samopt.folders.job import Job, Shard
from samopt.folders.pipeline import Pipeline
from samopt.folders.prompts_file import Ask, assign, read_prompts
from samopt.folders.tasks import Embeddings, EveryMask, PromptedMasks
from samopt.folders.worker import Task, Worker

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Plan:
    """Where and from what results are made; they do not depend on it.

    Attributes:
        engine: "local" or "ray".
        address: of a Ray cluster.
        prompts: a file of prompts, whose content they do depend on; None for every mask.
    """

    engine: Engine = "local"
    address: str | None = None
    prompts: Path | None = None

    def check(self) -> None:
        """Raises InvalidInput for an engine that is not there."""
        if self.engine not in get_args(Engine):
            raise InvalidInput(f"engine is {self.engine!r}; it must be one of {', '.join(get_args(Engine))}")
        if self.address is not None and self.engine != "ray":
            raise InvalidInput("an address is that of a Ray cluster: it needs the engine ray")
        if self.engine == "ray" and importlib.util.find_spec("ray") is None:
            raise InvalidInput("the engine ray needs Ray, which is not installed: pip install 'samopt[ray]'")


def asks_of(plan: Plan, images: Iterable[str]) -> dict[str, list[Ask]] | None:
    """The prompts of a plan, by the paths of images; None where it has no file of them."""
    return None if plan.prompts is None else assign(read_prompts(plan.prompts), images, plan.prompts)


def make_task(model: nn.Module, settings: dict[str, Any], asks: dict[str, list[Ask]] | None) -> Task:
    """The task that settings ask for, and prompts where it is theirs."""
    options = settings["options"]
    if settings["task"] == "embed":
        return Embeddings(model, getattr(torch, options["dtype"]))
    return EveryMask(model, options) if asks is None else PromptedMasks(model, asks, options["multimask"])


def make_pipeline(model: nn.Module, task: Task, settings: dict[str, Any], readers: int | None = None) -> Pipeline:
    """What runs the task on shards."""
    worker = Worker(model, task, settings["batch_size"], settings["prompts_per_batch"])
    notes = {name: settings[name] for name in ("task", "model", "passes", "options")}
    return Pipeline(worker, settings["batch_size"], notes, readers)


def run_local(
    model: nn.Module,
    task: Task,
    job: Job,
    shards: Iterable[Shard],
    stopped: Callable[[], bool],
    tell: Callable[[int], None],
) -> dict[str, float]:
    """Works on shards in this process; returns the seconds that each stage took."""
    pipeline = make_pipeline(model, task, job.settings)
    pipeline.run(shards, stopped, tell)
    return pipeline.stages.seconds
