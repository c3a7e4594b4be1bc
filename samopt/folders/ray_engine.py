"""Shards on many GPUs or machines: an actor of Ray Data's for each, which runs the worker that runs here.

A row of the dataset is the number of a shard. The folders of images and of results are ones that all machines see
under the same names; the model goes to them through Ray's object store.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samopt.base import Phase
from samopt.errors import InvalidInput, first_line
from samopt.folders.engine import Plan, asks_of, make_pipeline, make_task
from samopt.folders.job import Job, Shard
from samopt.folders.stopping import Stop
from samopt.recipe import ATTRIBUTE as RECIPE
from samopt.report import ATTRIBUTE

STOP = "stop"  # a file in the output folder: actors finish the shard at hand
CPU_SHARE = 0.5  # of a processor, for an actor without a GPU: Ray's own tasks need a share too, or all wait for ever
PER_CALL = 8  # shards of an actor's call, at most: between two calls it reads nothing ahead
PROCESSORS = 8  # of the machine for a GPU's actor, where it has as many: they read images


def run_ray(
    model: nn.Module,
    job: Job,
    plan: Plan,
    shards: Sequence[Shard],
    stop: Stop,
    tell: Callable[[int], None],
) -> None:
    """Works on shards through Ray.

    Args:
        model: a Sam, on the kind of device that it is to run on everywhere.
        job: the output folder.
        plan: with Ray's address; None starts Ray on this machine.
        shards: which.
        stop: set by a signal.
        tell: called with a number of images whenever some are done.

    Raises:
        InvalidInput: Ray cannot be reached, or has no GPU for a model that is on one.
    """
    import ray

    if not shards:
        return
    with _connected(plan.address), _stop_file(job.folder, stop):
        gpu = torch.device(str(model.device)).type == "cuda"
        actors, resources = _resources(ray.cluster_resources(), gpu, len(shards))
        of = {shard.number: shard for shard in shards}
        dataset = ray.data.from_items([{"shard": number} for number in of], override_num_blocks=len(of))
        done = dataset.map_batches(
            _Actor,
            fn_constructor_args=(ray.put(copy.deepcopy(model).cpu()), job, plan, gpu),
            batch_size=max(1, min(PER_CALL, len(of) // (4 * actors))),
            compute=ray.data.ActorPoolStrategy(size=actors),
            **resources,
        )
        for row in done.iter_rows():
            tell(len(of[row["shard"]].images) if row["done"] else 0)


class _Actor:
    """The worker of one GPU, or of a share of a processor."""

    def __init__(self, model: Any, job: Job, plan: Plan, gpu: bool) -> None:
        import ray

        sam = compiled_again(ray.get(model).to("cuda" if gpu else "cpu"))
        self._job = job
        self._shards = {shard.number: shard for shard in job.shards()}
        images = [image for shard in self._shards.values() for image in shard.images]
        self._pipeline = make_pipeline(sam, make_task(sam, job.settings, asks_of(plan, images)), job.settings)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Does shards; tells which of them, as others than those begun are left after a signal."""
        shards = [self._shards[int(number)] for number in rows["shard"]]
        # A call that Ray repeats, as a machine was lost, does not repeat what was written.
        stop = self._job.folder / STOP
        self._pipeline.run([shard for shard in shards if not shard.path.exists()], stop.exists)
        return {"shard": rows["shard"], "done": [shard.path.exists() for shard in shards]}


def compiled_again(model: nn.Module) -> nn.Module:
    """The model, which lost its compilation on the way, compiled as it was."""
    report, recipe = vars(model).get(ATTRIBUTE), vars(model).get(RECIPE)
    if report is not None and recipe is not None:
        applied = {step.name for step in report.steps if step.status == "applied"}
        for step in recipe.steps:
            if step.pass_.phase is Phase.COMPILE and repr(step.pass_) in applied:
                step.pass_(model)
    return model


def _resources(cluster: dict[str, float], gpu: bool, most: int) -> tuple[int, dict[str, Any]]:
    """How many actors, at most one a shard, and what each needs."""
    processors = int(cluster.get("CPU", 1))
    if not gpu:
        return max(1, min(processors, most)), {"num_cpus": CPU_SHARE}
    gpus = int(cluster.get("GPU", 0))
    if gpus == 0:
        raise InvalidInput("the model is on a GPU, and Ray knows of none; put the model on the CPU, or add machines")
    # Never all of the processors, as Ray's own tasks need some.
    share = min(PROCESSORS, math.floor(processors / gpus / 2 * 4) / 4)
    return min(gpus, most), {"num_gpus": 1, "num_cpus": share}


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Ray: that which is at the address or this process uses already, or one started here and ended after."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            alone: dict[str, Any] = {} if address or "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **alone)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InvalidInput(f"Ray cannot be reached at {address!r}: {first_line(error)}") from error
    import ray.data

    context = ray.data.DataContext.get_current()
    bars, context.enable_progress_bars = context.enable_progress_bars, False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        if ours:
            ray.shutdown()


@contextmanager
def _stop_file(folder: Path, stop: Stop) -> Iterator[None]:
    """Tells actors of a signal by a file that they see."""
    path, ended = folder / STOP, threading.Event()
    path.unlink(missing_ok=True)

    def watch() -> None:
        while not ended.wait(0.5):
            if stop():
                path.touch()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        path.unlink(missing_ok=True)
