"""Where the time of a whole call goes, and its memory, and what it waits for.

A call is `SamPredictor.set_image` and `predict` with one point. It is profiled when it was made a few times, so that
nothing compiles, tunes or is captured meanwhile. Figures besides the trace's own are measured without the profiler.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from samopt.errors import InvalidInput, Unsupported
from samopt.observe import check_size
from samopt.profiling.call import CALLS, STAGES, WholeCall, named_blocks
from samopt.profiling.kernels import Kernel, by_group, kernels_of
from samopt.profiling.memory import Memory, memory_of
from samopt.profiling.sync_audit import Audit, audit
from samopt.progress import Progress
from samopt.samples import Sample, scene_samples
from samopt.shown import Shown
from samopt.structure import check_sam
from samopt.timing import cpu_seconds

if TYPE_CHECKING:
    from rich.console import Group

WARM_UPS, REPEATS = 3, 5  # calls before anything is measured, and calls whose median is the call's time


@dataclass(frozen=True)
class StageTime:
    """One of the named ranges of a call: `set_image`, `predict`, and the stages inside them.

    Attributes:
        name: of CALLS or STAGES.
        seconds: of the host, while profiled; on a CPU that is where the work is done.
        gpu_seconds: of the kernels that it launched; 0 on a CPU.
    """

    name: str
    seconds: float
    gpu_seconds: float


@dataclass(frozen=True)
class Profile(Shown):
    """What was found of one model's call.

    Attributes:
        name: what to call it.
        device: where it ran.
        seconds: median time of a call, as the host sees it, until the masks are there.
        stages: its named ranges, in the order in which they begin.
        kernels: on a GPU what ran there, on a CPU the operators, longest first.
        audit: what it waits for; None where that could not be found out.
        memory: of the GPU; None on a CPU.
        notes: what is missing, and why.
        files: what was written, by kind: "trace", "memory".
    """

    name: str
    device: str
    seconds: float
    stages: tuple[StageTime, ...]
    kernels: tuple[Kernel, ...]
    audit: Audit | None
    memory: Memory | None
    notes: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)

    @property
    def kernel_seconds(self) -> float:
        """Of all kernels together."""
        return sum(kernel.seconds for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON; times in seconds.

        {name, device, seconds, kernel_seconds, stages: [{name, seconds, gpu_seconds}],
        groups: [{group, seconds, share, calls, names}], kernels: [{name, group, seconds, calls}],
        audit: {syncs: [{stage, reason, place, file, line, function, code, count}], stopped} or null,
        memory: {peak_bytes, weight_bytes} or null, notes: [text], files: {trace, memory}}
        """
        found = dataclasses.asdict(self)
        found["kernel_seconds"] = self.kernel_seconds
        found["groups"] = [dataclasses.asdict(group) for group in by_group(self.kernels)]
        found["audit"] = self.audit and self.audit.to_dict()
        return found

    def __rich__(self) -> Group:
        from samopt.profiling.tables import of_profile

        return of_profile(self)


def profile(
    model: nn.Module, sample: Sample | None = None, *, out: str | Path | None = None, name: str = "model"
) -> Profile:
    """Profiles a whole call of a model, optimised or not; the model stays as it is.

    Args:
        model: a Sam, on the device it runs on.
        sample: the picture, and the object whose point is the prompt; None draws a scene.
        out: a folder, made where there is none, for NAME.trace.json.gz, which https://ui.perfetto.dev opens, and on a
            GPU NAME.memory.pickle, which https://pytorch.org/memory_viz opens. None writes nothing.
        name: what to call the model, and its files.

    Raises:
        InvalidInput: no Sam, a model without weights, a picture it cannot take, or a folder that cannot be made.
    """
    check_sam(model)
    device = next(model.parameters()).device
    if device.type == "meta":
        raise InvalidInput("the model is on the meta device, without weights to run: load them first")
    folder = None if out is None else make_folder(out)
    call = _call(model, sample)
    files: dict[str, str] = {}
    notes = []
    with Progress(4) as progress:
        progress.step(f"{name}: warming up")
        for _ in range(WARM_UPS):
            call(model)
        progress.step(f"{name}: timing and profiling")
        seconds = statistics.median(cpu_seconds(lambda: call(model)) for _ in range(REPEATS))
        trace = None if folder is None else folder / f"{name}.trace.json.gz"
        stages, kernels = _trace(model, call, device, trace)
        if trace is not None:
            files["trace"] = str(trace)
        progress.step(f"{name}: memory")
        memory = None
        if device.type == "cuda":
            snapshot = None if folder is None else folder / f"{name}.memory.pickle"
            memory = memory_of(model, lambda: call(model), device, snapshot)
            if snapshot is not None:
                files["memory"] = str(snapshot)
        else:
            notes.append(f"no memory figures and no snapshot: PyTorch records them on a GPU, not on {device.type}")
        progress.step(f"{name}: sync audit")
        audited = None
        try:
            audited = audit(model, call)
        except Unsupported as error:
            notes.append(f"no sync audit: {error}")
    return Profile(name, str(device), seconds, stages, kernels, audited, memory, tuple(notes), files)


def _call(model: nn.Module, sample: Sample | None) -> WholeCall:
    from segment_anything.utils.transforms import ResizeLongestSide

    encoder: Any = model.image_encoder
    if sample is None:
        (sample,) = scene_samples(1)
    check_size(ResizeLongestSide(encoder.img_size), sample)
    return WholeCall.of(sample)


def _trace(
    model: nn.Module, call: WholeCall, device: torch.device, path: Path | None
) -> tuple[tuple[StageTime, ...], tuple[Kernel, ...]]:
    """Profiles one call; the one before it, which the profiler needs to get going, is left out of the trace."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with (
        named_blocks(model),
        torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as found,
    ):
        for _ in range(2):
            call(model, record_function)
            found.step()
    if path is not None:
        found.export_chrome_trace(str(path))
    return stages_of(found.events() or []), kernels_of(found.key_averages(), cuda)


def stages_of(events: Iterable[Any]) -> tuple[StageTime, ...]:
    """The times of the named ranges among the profiler's events.

    On a GPU a range spans what was launched inside it. Kernels are found by lying in it, one after the other as they
    run: those of a CUDA graph belong to no operator.
    """
    ranges = [event for event in events if event.name in (*CALLS, *STAGES)]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    stages = []
    for name in dict.fromkeys(event.name for event in ranges):
        on_host, on_gpu = (
            [event.time_range for event in ranges if event.name == name and event.device_type == device]
            for device in (DeviceType.CPU, DeviceType.CUDA)
        )
        inside = (
            kernel.time_range.elapsed_us()
            for kernel in kernels
            if any(span.start <= kernel.time_range.start < span.end for span in on_gpu)
        )
        stages.append(StageTime(name, sum(span.elapsed_us() for span in on_host) / 1e6, sum(inside) / 1e6))
    return tuple(stages)


def make_folder(path: str | Path) -> Path:
    """The folder `path`, made where there is none.

    Raises:
        InvalidInput: it cannot be made, or is a file.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder}: no folder can be made there ({error.strerror}); name another") from error
    return folder
