"""Makes what a benchmark's row times: the unmodified model, in half precision, or under a recipe."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samopt.base import Pass, Phase
from samopt.errors import SamoptError
from samopt.optimize import optimize
from samopt.passes import CastDtype, Compile, TritonLayerNorm
from samopt.passes.batches import run_as
from samopt.peers import Build
from samopt.recipe import Recipe, pass_name
from samopt.report import report
from samopt.result import by_reason
from samopt.timing import Encoder

if TYPE_CHECKING:
    from segment_anything.modeling import Sam


@dataclass(frozen=True)
class Candidate:
    """A whole model to time, called as its encoder.

    Attributes:
        sam: the model.
        passes: what was applied to it: masks of the same passes are the same, whatever the batch size.
        remark: what its row has to say of it.
    """

    sam: Any
    passes: tuple[str, ...] = ()
    remark: str = ""

    def __call__(self, pixels: Tensor) -> Tensor:
        embedding: Tensor = self.sam.image_encoder(pixels)
        return embedding


class NothingAdded(SamoptError):
    """Nothing of what a row adds applies to this model or is faster here, so that it would time the row before."""


@contextlib.contextmanager
def unmodified(sam: Sam, device: torch.device) -> Iterator[Encoder]:
    """The model as it is."""
    yield Candidate(copy.deepcopy(sam).to(device))


def eager(half: CastDtype) -> Build:
    """The model in half precision, otherwise as it is."""

    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        model = copy.deepcopy(sam).to(device)
        half(model)
        yield Candidate(model, (repr(half),))

    return build


def optimised(recipe: Recipe, batch_size: int, samples: Any = None, adds: Sequence[type[Pass]] = ()) -> Build:
    """The model under a recipe whose passes stood verification, so that nothing is measured here.

    Args:
        recipe: the passes.
        batch_size: for which `keep = "if-faster"` is decided.
        samples: for passes that calibrate; None draws scenes.
        adds: the passes that the row is about; where none of them is applied, `NothingAdded` is raised.
    """

    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        model = copy.deepcopy(sam).to(device)
        model = optimize(model, recipe, samples=samples, inplace=True, verify="off", batch_size=batch_size)
        without, filled, applied, quantized, added = [], [], [], False, not adds
        for step, given in zip(report(model).steps, recipe.steps, strict=True):
            name = pass_name(given.pass_)
            if step.status == "applied":
                if step.skipped:  # it stood verification: without a part of it the row is not what it says
                    raise SamoptError(f"{name} left out {'; '.join(by_reason(step.skipped))}")
                applied.append(step.name)
                filled += _filled_up(given.pass_, batch_size)
                added |= type(given.pass_) in adds
                quantized |= step.phase is Phase.QUANTIZE
            elif step.status == "undone" or _may_find_nothing(given.pass_, quantized):
                without.append(f"without {name}: {step.reason}")
            else:
                raise SamoptError(f"{name} {step.status}: {step.reason}")
        if not added:
            raise NothingAdded("; ".join(without))
        free()  # what was compiled to judge passes is no saving of the row's first call
        yield Candidate(model, tuple(applied), "; ".join([*without, *filled]))

    return build


def _may_find_nothing(pass_: Pass, quantized: bool) -> bool:
    """Whether a pass may find nothing to do: norms may be narrow, and then are fast; layers are quantised once."""
    return isinstance(pass_, TritonLayerNorm) or (quantized and pass_.phase is Phase.QUANTIZE)


def _filled_up(pass_: Pass, batch_size: int) -> list[str]:
    """What there is to say of a batch that a pass fills up: time that the row's images are charged for."""
    if not isinstance(pass_, Compile) or sum(sizes := run_as(batch_size, pass_.batch_sizes)) == batch_size:
        return []
    images = "1 image runs" if batch_size == 1 else f"{batch_size} images run"
    known = ", ".join(map(str, pass_.batch_sizes))
    return [f"{images} as {' + '.join(map(str, sizes))}: compiled batch sizes are {known}"]


def free() -> None:
    """Gives back what the row before held, compilations included: peak memory and first call are a row's own."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
