"""Which rows a benchmark has: recipes and peers side by side, or one recipe introduced step by step.

Only passes that stood verification are timed: on the model itself where its weights are trained, else on the embedded
model, whose weights are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from samopt.base import Pass, Phase
from samopt.bench import Entry
from samopt.bench_build import eager, optimised, unmodified
from samopt.bench_model import BenchModel
from samopt.errors import Unsupported
from samopt.optimize import optimize
from samopt.passes import CastDtype, TritonLayerNorm
from samopt.peers import Peer
from samopt.recipe import Recipe, Step, pass_name
from samopt.report import report
from samopt.result import Site

TF32_BATCH, PEER_BATCH = 8, 16  # the largest of the batch sizes that these rows take unasked


@dataclass(frozen=True)
class Verified:
    """A recipe, and which of its passes stood verification.

    Attributes:
        recipe: as it was given.
        lost: of the passes that did not stand, why.
    """

    recipe: Recipe
    lost: Mapping[type[Pass], str]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The entries that stood."""
        return tuple(step for step in self.recipe.steps if type(step.pass_) not in self.lost)

    @property
    def stood(self) -> Recipe:
        """The recipe of the entries that stood."""
        return self.only(self.steps)

    def only(self, steps: Sequence[Step]) -> Recipe:
        """The recipe of some entries."""
        return replace(self.recipe, steps=steps, bench_rows=())


def verified(recipe: Recipe, device: torch.device, model: BenchModel | None = None, samples: Any = None) -> Verified:
    """Which of the recipe's steps stand verification on this device.

    The embedded model is narrow: a pass that leaves narrow norms alone is verified on them all the same, and one that
    is to be kept only if it is faster is not judged by it. Of passes that quantise, each is verified without the
    others: where the first turns out no faster, the next takes its place.

    Args:
        recipe: the steps.
        device: where they will run.
        model: on which; None, or one with random weights, takes the embedded model.
        samples: pictures to verify on; None draws scenes.

    Raises:
        AccuracyError, Unsupported: a step that is required and does not stand.
    """
    from samopt.tiny import load_tiny

    subject = model.sam if model is not None and model.trained else load_tiny()
    quantizing = [step for step in recipe.steps if step.pass_.phase is Phase.QUANTIZE]
    alternatives: list[Step | None] = [*quantizing] or [None]
    lost: dict[type[Pass], str] = {}
    stood: set[type[Pass]] = set()
    for one in alternatives:
        steps = [step for step in recipe.steps if step not in quantizing or step is one]
        everywhere = [replace(step, pass_=_anywhere(step.pass_), keep="always") for step in steps]
        tried = replace(recipe, steps=tuple(everywhere), bench_rows=())
        rows = report(optimize(copy.deepcopy(subject).to(device), tried, samples=samples, inplace=True)).steps
        for step, row in zip(steps, rows, strict=True):
            if row.status == "applied":
                stood.add(type(step.pass_))
            else:
                lost[type(step.pass_)] = f"{pass_name(step.pass_)} {row.status}: {row.reason}"
    return Verified(recipe, {kind: reason for kind, reason in lost.items() if kind not in stood})


def _anywhere(pass_: Pass) -> Pass:
    return replace(pass_, wider_than=0) if isinstance(pass_, TritonLayerNorm) else pass_


def forgiving(recipe: Recipe) -> Recipe:
    """The recipe with no step that must stand: of one that does not, a waterfall's row says so."""
    return replace(recipe, steps=[replace(step, required=False, on_fail="drop") for step in recipe.steps])


def side_by_side(
    recipes: Sequence[Verified],
    batch_sizes: Sequence[int],
    device: torch.device,
    peers: Sequence[Peer] = (),
    peer_batch_sizes: Sequence[int] = (),
) -> list[Entry]:
    """The rows of a comparison of recipes, the base of its ratios first.

    Args:
        recipes: each at every batch size, the steps of it that stood.
        batch_sizes: for the recipes. The unmodified model runs at batch 1; where there is TF32 also with it, at batch 1
            and the largest size up to 8; and in eager half precision at batch 1 and the first size above it.
        device: where the rows will run.
        peers: each at every size of `peer_batch_sizes`.
        peer_batch_sizes: without any, the largest of `batch_sizes` up to 16: some peers compile for minutes per size.
    """
    sizes = list(dict.fromkeys(batch_sizes))
    entries = [Entry("unmodified", 1, unmodified)]
    if device.type == "cuda":
        largest = max((size for size in sizes if size <= TF32_BATCH), default=1)
        entries += [Entry("unmodified, TF32", size, unmodified, tf32=True) for size in dict.fromkeys([1, largest])]
    above = next(([size] for size in sizes if size > 1), [])
    casts = (each.recipe.find(CastDtype) or CastDtype() for each in recipes)
    for half in dict.fromkeys(CastDtype(cast.dtype) for cast in casts):
        entries += [Entry(f"eager {half.dtype}", size, eager(half)) for size in [1, *above]]
    for each in recipes:
        stood, most_error = each.stood, each.recipe.accuracy.embedding_error
        entries += [Entry(stood.name, size, optimised(stood, size), most_error=most_error) for size in sizes]
    return entries + _peer_entries(peers, sizes, peer_batch_sizes)


def waterfall(
    found: Verified,
    model: BenchModel,
    batch_sizes: Sequence[int],
    device: torch.device,
    *,
    each: bool = False,
    samples: Any = None,
    peers: Sequence[Peer] = (),
    peer_batch_sizes: Sequence[int] = (),
) -> list[Entry]:
    """The rows of one recipe introduced step by step, after the unmodified model at batch 1, the base of all ratios.

    Args:
        found: the recipe, and what of it stood. A row none of whose passes did is not timed, and says why.
        model: what is timed.
        batch_sizes: every row at the first of them, then every row at the next.
        device: where the rows will run.
        each: adds each pass alone at the smallest batch size; with the recipe's dtype where it needs half precision.
        samples: for passes that calibrate.
        peers: as in `side_by_side`.
        peer_batch_sizes: likewise.
    """
    sizes = list(dict.fromkeys(batch_sizes))
    limit = None if model.trained else found.recipe.accuracy.embedding_error  # masks tell more where there are some

    def entry(what: str, adds: Sequence[Step], steps: Sequence[Step], size: int, cumulative: bool) -> Entry:
        kinds = [type(step.pass_) for step in adds]
        names = tuple(pass_name(step.pass_) for step in adds)
        lost = "; ".join(found.lost[kind] for kind in kinds if kind in found.lost)
        build = None
        if not all(kind in found.lost for kind in kinds):
            recipe = found.only([step for step in steps if type(step.pass_) not in found.lost])
            build = optimised(recipe, size, samples, kinds)
        return Entry(what, size, build, most_error=limit, adds=names, cumulative=cumulative, remark=lost)

    entries = [Entry("unmodified", 1, unmodified)]
    for size in sizes:
        so_far: list[Step] = []
        for adds in introductions(found.recipe):
            so_far += adds
            steps = [step for step in found.recipe.steps if step in so_far]
            what = "+ " + ", ".join(pass_name(step.pass_) for step in adds)
            entries.append(entry(what, adds, steps, size, cumulative=True))
    if each:
        for what, steps in _alone(found, model, device):
            entries.append(entry(what, steps[-1:], steps, min(sizes), cumulative=False))
    return entries + _peer_entries(peers, sizes, peer_batch_sizes)


def introductions(recipe: Recipe) -> list[list[Step]]:
    """The entries that each row of a recipe's waterfall adds, all of the recipe's together.

    As its `[bench] rows` say, and what they do not name in a last row; without them, what compiles first, so that every
    row is compiled, then one entry after the other.
    """
    if not recipe.bench_rows:
        compiling = [step for step in recipe.steps if step.pass_.phase is Phase.COMPILE]
        others = [[step] for step in recipe.steps if step not in compiling]
        return [compiling, *others] if compiling else others
    by_name = {pass_name(step.pass_): step for step in recipe.steps}
    rows = [[by_name.pop(name) for name in row] for row in recipe.bench_rows]
    return [*rows, list(by_name.values())] if by_name else rows


def _alone(found: Verified, model: BenchModel, device: torch.device) -> Iterator[tuple[str, list[Step]]]:
    """Each pass alone, last in its list; where it finds nothing to do in float32, after the recipe's dtype."""
    cast = next((step for step in found.steps if isinstance(step.pass_, CastDtype)), None)
    whole = copy.deepcopy(model.sam).to(device)
    for step in found.recipe.steps:
        name = pass_name(step.pass_)
        needs_half = cast is not None and type(step.pass_) not in found.lost and not _applies(step.pass_, whole)
        if cast is not None and needs_half:
            yield f"{name} alone, with {pass_name(cast.pass_)}", [cast, step]
        else:
            yield f"{name} alone", [step]


def _applies(pass_: Pass, model: nn.Module) -> bool:
    try:
        pass_.requires(model)
        return any(isinstance(found, Site) for found in pass_.match(model))
    except Unsupported:
        return False


def _peer_entries(peers: Sequence[Peer], sizes: Sequence[int], asked: Sequence[int]) -> list[Entry]:
    unasked = max((size for size in sizes if size <= PEER_BATCH), default=min(sizes))
    return [Entry(peer.label, size, peer.build) for peer in peers for size in dict.fromkeys(asked or [unasked])]
