"""The training run: model, averaged weights, optimiser, and the loop over steps; files it reads and writes."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from samopt.errors import CheckpointError, SamoptError

from .layout import sample_layout
from .model import TRAINED_SIZE, WEIGHTS, build_tiny, load_weights
from .plans import AUTO
from .raster import Painters
from .schedule import batch_for, learning_rate, sharpness, step_kind
from .step import Kernels, SizeSetup, compiled_painters, draw, train_step

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

CHECKPOINT = "checkpoint.pt"
LOG_SECONDS = 20.0
SAVE_SECONDS = 120.0
# How many steps the host may be ahead of the device, so that time as the host sees it is the device's.
RUN_AHEAD = 4


@dataclass(frozen=True)
class Settings:
    """What the command line of ``samopt.tiny.train`` sets; its ``--help`` explains."""

    out: Path
    minutes: float = 6.5
    total_minutes: float = 13.0
    resume: bool = False
    batch: int = 32
    device: str = "cuda"
    sizes: tuple[int, ...] = (TRAINED_SIZE, 512, 256)
    compile: bool = True
    compile_from: int = 512
    attention: str = AUTO
    seed: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.05
    ema: float = 0.999
    scenes: int = 256
    max_steps: int | None = None
    profile_steps: int = 0


class DivergedError(SamoptError):
    """The loss is no longer finite; the last checkpoint is from before that."""


class Clock:
    """Times spans of work on a device, without waiting for it until asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if self.device.type == "cuda":
            mark.synchronize()

    def milliseconds(self, first: Any, second: Any) -> float:
        if self.device.type == "cuda":
            return float(first.elapsed_time(second))
        return float(second - first) * 1e3


@dataclass(frozen=True)
class Timed:
    """One step, for the log: marks before drawing, after it, and at the end; loss and IoU still on the device."""

    size: int
    marks: tuple[Any, Any, Any]
    loss: Tensor
    iou: Tensor


def build_for_training(seed: int, device: torch.device) -> Sam:
    """The untrained model in training mode, float32, the same from the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sam = build_tiny()
        positions = sam.image_encoder.pos_embed
        assert positions is not None
        torch.nn.init.trunc_normal_(positions, std=0.02)
    # The file stores half precision: frequencies that it holds exactly are the frequencies trained with.
    frequencies = sam.prompt_encoder.pe_layer.positional_encoding_gaussian_matrix
    frequencies.copy_(frequencies.half().float())
    return sam.to(device).train()


def build_optimizer(sam: Sam, settings: Settings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on biases, norms, embeddings and positions."""
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in sam.named_parameters():
        plain = parameter.dim() < 2 or any(part in name for part in ("pos", "_embed", "token", "embeddings"))
        (rest if plain and "patch_embed" not in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=settings.device.startswith("cuda"))


class Trainer:
    """A run of one piece. ``step`` and ``elapsed`` (seconds) count over all pieces."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.sam = build_for_training(settings.seed, self.device)
        self.parameters = list(self.sam.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = build_optimizer(self.sam, settings)
        self.step = 0
        self.elapsed = 0.0
        self.clock = Clock(self.device)
        self.compiled = settings.compile and self.device.type == "cuda"
        self.painters = compiled_painters() if self.compiled else Painters()
        self.compiled_kernels = Kernels.compiled() if self.compiled else Kernels()
        self.setups: dict[int, SizeSetup] = {}
        self.generator = torch.Generator(self.device)
        if settings.resume:
            self._resume()

    @property
    def progress(self) -> float:
        return min(1.0, self.elapsed / (60 * self.settings.total_minutes))

    @property
    def finished(self) -> bool:
        """Whether the schedule is complete, give or take a second."""
        return self.elapsed >= 60 * self.settings.total_minutes - 1

    def setup(self, size: int) -> SizeSetup:
        """What steps at a size need, made at first use."""
        if size not in self.setups:
            settings = self.settings
            kernels = self.compiled_kernels if size >= settings.compile_from else Kernels()
            batch = batch_for(size, settings.sizes, settings.batch)
            self.setups[size], note = SizeSetup.choose(self.sam, size, batch, kernels, settings.attention)
            print(f"{size} px, batch {batch}: attention {note}", flush=True)
        return self.setups[size]

    def run(self) -> None:
        """Trains until the piece's or the whole schedule's time is over, saving now and then."""
        settings = self.settings
        start, before = time.perf_counter(), self.elapsed
        deadline = min(before + 60 * settings.minutes, 60 * settings.total_minutes)
        first_step = self.step
        logged = saved = start
        ahead: deque[Any] = deque()
        pending: list[Timed] = []
        while self.elapsed < deadline and (settings.max_steps is None or self.step - first_step < settings.max_steps):
            pending.append(self.train_one())
            ahead.append(pending[-1].marks[2])
            if len(ahead) > RUN_AHEAD:
                self.clock.wait(ahead.popleft())
            now = time.perf_counter()
            self.elapsed = before + now - start
            if now - logged >= LOG_SECONDS:
                self.log(pending)
                pending, logged = [], now
                if now - saved >= SAVE_SECONDS:
                    self.save()
                    saved = time.perf_counter()
        if pending:
            self.log(pending)
        self.elapsed = before + time.perf_counter() - start
        self.save()

    def train_one(self, size: int | None = None, refine: bool | None = None) -> Timed:
        """One optimiser step, of the schedule's kind unless told otherwise."""
        settings = self.settings
        kind = step_kind(settings.seed, self.step, settings.sizes, self.progress)
        setup = self.setup(kind.size if size is None else size)
        seed = (settings.seed << 32) + self.step
        layout = sample_layout(torch.Generator().manual_seed(seed), setup.batch)
        self.generator.manual_seed(seed)
        began = self.clock.mark()
        drawn = draw(self.sam, layout, setup.size, self.painters)
        ready = self.clock.mark()
        weight = torch.full((), sharpness(self.progress), device=self.device)
        result = train_step(self.sam, setup, drawn, self.generator, weight, kind.refine if refine is None else refine)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings.lr, self.step, self.progress)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The average forgets quickly at first, when the weights are far from good.
        decay = min(settings.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(self.average, self.parameters, self.step)
        self.step += 1
        return Timed(setup.size, (began, ready, self.clock.mark()), result.loss.detach(), result.iou)

    def log(self, steps: list[Timed]) -> None:
        """One line about the steps since the last one.

        Raises:
            DivergedError: the loss is not finite.
        """
        loss = float(torch.stack([timed.loss for timed in steps]).mean())
        parts = [
            f"step {self.step}",
            f"{self.elapsed / 60:.2f} min ({100 * self.progress:.0f} %)",
            f"loss {loss:.3f}",
            f"lr {self.optimizer.param_groups[0]['lr']:.1e}",
        ]
        for size in sorted({timed.size for timed in steps}):
            chosen = [timed for timed in steps if timed.size == size]
            drawing = sum(self.clock.milliseconds(timed.marks[0], timed.marks[1]) for timed in chosen) / len(chosen)
            model = sum(self.clock.milliseconds(timed.marks[1], timed.marks[2]) for timed in chosen) / len(chosen)
            iou = float(torch.stack([timed.iou for timed in chosen]).mean())
            parts.append(f"{size} px: iou {iou:.3f}, {len(chosen)} x ({drawing:.0f} + {model:.0f} ms)")
        print(" | ".join(parts), flush=True)
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} after {self.step} steps; resume from the last checkpoint")

    def averaged_state(self) -> dict[str, Tensor]:
        """The averaged weights, and the buffers, under the model's own keys."""
        state = dict(self.sam.state_dict())
        names = [name for name, _ in self.sam.named_parameters()]
        return {**state, **dict(zip(names, self.average, strict=True))}

    def save(self) -> None:
        """Writes the checkpoint and the half-precision weights, each in one piece or not at all."""
        from safetensors.torch import save_file

        out = self.settings.out
        out.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "model": self.sam.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "seed": self.settings.seed,
        }
        partial = out / (CHECKPOINT + ".partial")
        torch.save(checkpoint, partial)
        os.replace(partial, out / CHECKPOINT)
        half = {name: tensor.half().contiguous().cpu() for name, tensor in self.averaged_state().items()}
        partial = out / (WEIGHTS + ".partial")
        save_file(half, partial, metadata={"step": str(self.step), "elapsed": f"{self.elapsed:.1f}"})
        os.replace(partial, out / WEIGHTS)

    def _resume(self) -> None:
        """Takes up the checkpoint in the output folder; without one, its weights alone, with a fresh optimiser.

        Raises:
            CheckpointError: there is neither, or the checkpoint cannot be read.
        """
        out = self.settings.out
        if (out / CHECKPOINT).exists():
            try:
                saved = torch.load(out / CHECKPOINT, map_location=self.device, weights_only=True)
                self.sam.load_state_dict(saved["model"])
                self.optimizer.load_state_dict(saved["optimizer"])
                torch._foreach_copy_(self.average, saved["average"])
                self.step, self.elapsed = saved["step"], saved["elapsed"]
            except (RuntimeError, LookupError, ValueError, EOFError, UnpicklingError) as error:
                raise CheckpointError(f"{out / CHECKPOINT} cannot be resumed: {error}") from error
        elif (out / WEIGHTS).exists():
            from safetensors import safe_open

            with safe_open(out / WEIGHTS, framework="pt") as file:
                metadata = file.metadata()
            self.sam.load_state_dict(load_weights(out / WEIGHTS).state_dict())
            with torch.no_grad():
                torch._foreach_copy_(self.average, self.parameters)
            self.step, self.elapsed = int(metadata["step"]), float(metadata["elapsed"])
        else:
            raise CheckpointError(f"{out} has neither {CHECKPOINT} nor {WEIGHTS}; run without --resume to start anew")
        print(f"resumed at step {self.step}, {self.elapsed / 60:.2f} min", flush=True)
