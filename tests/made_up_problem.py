"""A made-up problem for the tuner: candidates that are right, wrong, slow or refuse, as a test wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from samopt.passes.kernels import tuning
from samopt.passes.kernels.tuning import Config, Problem

ANSWER = torch.arange(1.0, 7.0).view(2, 3)


@dataclass(frozen=True)
class Candidate:
    """What a configuration does.

    Attributes:
        seconds: the time it takes.
        write: computes the answer into a tensor.
    """

    seconds: float
    write: Callable[[Tensor], object]


def right(out: Tensor) -> None:
    out.copy_(ANSWER)


def off_by(error: float) -> Callable[[Tensor], object]:
    """Writes an answer with a relative error."""
    return lambda out: out.copy_(ANSWER * (1 + error))


def one_row(out: Tensor) -> None:
    out[0] = ANSWER[0]


def nothing(out: Tensor) -> None:
    """Writes nothing: what lay there before remains."""


def refuse(out: Tensor) -> None:
    raise RuntimeError("out of resource: shared memory\nRequired: 3")


@dataclass
class Tuner:
    """The tuner, and what it was seen to do.

    Attributes:
        seconds: the time that each configuration takes.
        runs: configurations in the order they were run.
    """

    seconds: dict[Config, float] = field(default_factory=dict)
    runs: list[Config] = field(default_factory=list)

    def problem(
        self,
        *candidates: Candidate,
        kernel: str = "made_up",
        shape: tuple[tuple[str, int], ...] = (("N", 3),),
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        """A problem with these candidates, by default one that is right; the first has the block size 0, and so on."""
        known = {Config.of(BLOCK=index): one for index, one in enumerate(candidates or [Candidate(1.0, right)])}
        self.seconds.update({config: one.seconds for config, one in known.items()})

        def run(config: Config, out: Tensor) -> None:
            self.runs.append(config)
            known[config].write(out)

        return Problem(
            kernel,
            shape,
            dtype,
            torch.device("cpu"),
            sources=("tuning",),
            candidates=tuple(known),
            output=lambda: torch.empty_like(ANSWER),
            run=run,
            reference=lambda: ANSWER,
        )

    def chosen(self, problem: Problem) -> int:
        """The block size of the chosen configuration."""
        return dict(tuning.choose(problem).blocks)["BLOCK"]

    def forget(self) -> None:
        """What a new process knows: nothing but the files."""
        tuning._found.clear()
        self.runs.clear()


def tuner_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """A tuner whose clock says what the candidates say."""
    tuner = Tuner()

    def gpu_seconds(run: Callable[[], object]) -> float:
        run()
        return tuner.seconds[tuner.runs[-1]]

    monkeypatch.setattr(tuning, "gpu_seconds", gpu_seconds)
    monkeypatch.setattr(tuning, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tuner
