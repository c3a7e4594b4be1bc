"""The whole flow: a copy of the model, the recipe's passes one by one, each held to its accuracy."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from samopt.base import Numerics, Pass, refuse_compiled
from samopt.errors import AccuracyError, AlreadyApplied, InvalidInput, SamoptError, Unsupported, first_line
from samopt.fingerprint import fingerprint, weights_digest
from samopt.gate import failure
from samopt.observe import Outputs, observe
from samopt.progress import Progress
from samopt.rebind import clone, rebind
from samopt.recipe import ATTRIBUTE as RECIPE
from samopt.recipe import Recipe, Step
from samopt.report import ATTRIBUTE, Report, StepReport, versions
from samopt.result import PassResult, Site
from samopt.samples import Sample, as_samples
from samopt.speed import Blocks, block_speed, blocks_of
from samopt.structure import check_sam, describe
from samopt.verify import Agreement, Reference, compare, relative_error

M = TypeVar("M", bound=nn.Module)
Verify = Literal["each", "end", "off"]


def optimize(
    sam: M,
    recipe: str | Path | Recipe | Sequence[Pass | Step] = "fast",
    *,
    samples: Any = None,
    inplace: bool = False,
    verify: Verify = "each",
    batch_size: int | None = None,
) -> M:
    """Optimises a Segment Anything model for inference.

    Args:
        sam: a `segment_anything` Sam, on the device it will run on. It is left as it is.
        recipe: a built-in name ("exact", "fast", "max", "blog"), a TOML file, a `Recipe`, or a list of passes.
        samples: pictures to measure accuracy on, and for passes that calibrate (see `as_samples`), four of them where
            it is a folder; None draws four scenes with exact ground truth, and others to calibrate on.
        inplace: rewrite `sam` itself, which saves the memory of a copy.
        verify: measure accuracy after "each" pass, only at the "end", or not at all ("off"). Only "each" can tell which
            pass is at fault, and so drop one (`on_fail = "drop"`) or skip an optional one that fails to run.
        batch_size: images per call for which `keep = "if-faster"` is decided; None takes 8 on a GPU and 1 on a CPU.

    Returns:
        A Sam that does what `sam` did, in evaluation mode and without gradients. `report` tells what each pass did.

    Raises:
        InvalidInput: no Sam, an unusable sample, an unknown `verify`, no `batch_size`.
        RecipeError: an unknown recipe, or a mistake in it.
        Unsupported: a required pass that cannot run here; a model that is compiled, or was optimised, already.
        AccuracyError: a pass that cost more than its class or the budget allows, without `on_fail = "drop"`.

        After any error `sam` is as it was, `inplace` or not.
    """
    recipe = Recipe.of(recipe)
    check_sam(sam)
    refuse_compiled(sam, "pass the model as it was before: samopt.passes.Compile compiles it in place")
    if ATTRIBUTE in vars(sam):
        raise AlreadyApplied("this model came out of samopt.optimize", "optimise the unmodified model")
    if verify not in ("each", "end", "off"):
        raise InvalidInput(f"verify must be 'each', 'end' or 'off', not {verify!r}")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise InvalidInput(f"batch_size must be a number of images, 1 or more, not {batch_size!r}")
    pictures = None if samples is None else as_samples(samples)
    model = sam if inplace else copy.deepcopy(sam)
    with _unchanged_on_error(model) as applied, Progress(len(recipe.steps) + 1) as progress:
        model.eval().requires_grad_(False)
        run = _Run(model, recipe, pictures, verify, applied, batch_size)
        progress.step("recording the unmodified model's answers")
        run.record_reference()
        for step in recipe.steps:
            progress.step(repr(step.pass_))
            run.take(step)
        as_optimised(model, recipe, run.finish())
    del run, applied
    gc.collect()  # replaced modules hang in reference cycles: their memory is wanted now, not some time
    return model


def as_optimised(model: nn.Module, recipe: Recipe, report: Report) -> None:
    """Makes a rewritten model one that came out of `optimize`: with its recipe and report, and dtypes that it keeps."""
    vars(model)[RECIPE], vars(model)[ATTRIBUTE] = recipe, report
    rebind(model, "_apply", apply_but_keep_dtype)


class _Run:
    """One run of a recipe over a model: what was recorded, what was applied, what the report will say."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        samples: list[Sample] | None,
        verify: Verify,
        applied: list[PassResult],
        batch_size: int | None,
    ) -> None:
        self.model, self.recipe, self.samples, self.verify, self.applied = model, recipe, samples, verify, applied
        self.device = next(model.parameters()).device
        self.batch_size = batch_size or (1 if self.device.type == "cpu" else 8)
        self.budget = recipe.accuracy
        self.model_digest = fingerprint(model)
        self.steps: list[StepReport] = []
        self.reference: Reference | None = None
        self.baseline: Agreement | None = None
        self.standing: tuple[Outputs, Agreement] | None = None  # what the model answered when last it was measured

    def record_reference(self) -> None:
        """Records what the model answers before any pass, unless nothing is to be measured."""
        if self.verify == "off":
            return
        try:
            self.reference = Reference.record(self.model, self.samples, masks=self.budget.masks)
        except SamoptError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"the unmodified model failed to run: {first_line(error)}; pass it in float32, as Meta's code needs it"
            ) from error
        self.baseline = compare(self.reference.outputs, self.reference)
        self.standing = self.reference.outputs, self.baseline
        if not self.baseline.finite:
            raise InvalidInput("the outputs of the unmodified model hold NaN or infinity: check its weights")
        lossy = any(step.pass_.numerics is Numerics.LOSSY for step in self.recipe.steps)
        if lossy and not self.reference.trained and self.budget.embedding_error is None:
            yardstick = _half_precision_error(self.model, self.reference, self.recipe)
            self.budget = dataclasses.replace(self.budget, embedding_error=min(1.0, 1.1 * yardstick))

    def take(self, step: Step) -> None:
        """Applies one entry, measures it, and keeps, drops, undoes or refuses it."""
        pass_, standing = step.pass_, self.standing
        before = self._blocks(step, applied=False)
        try:
            if before is not None and self._all_emulated(pass_):
                reason = f"emulated on {self.device.type}, so not faster"
                self.steps.append(StepReport(repr(pass_), pass_.phase, pass_.numerics, "undone", reason))
                return
            result = pass_(self.model, self.samples)
        except Unsupported as error:
            if step.required:
                raise
            self.steps.append(StepReport(repr(pass_), pass_.phase, pass_.numerics, "skipped", error.why))
            return
        except SamoptError:
            raise
        except Exception as error:
            raise self._failed(step, error) from error
        self.applied.append(result)
        row = StepReport(
            result.name, pass_.phase, pass_.numerics, "applied", "", result.sites, result.skipped, result.seconds
        )
        if self.verify == "each":
            row = self._measure(step, row)
        if before is not None and row.status == "applied":
            row = self._keep_if_faster(step, row, before)
            if row.status != "applied":
                self.applied.pop().undo()
                self.standing = standing
        self.steps.append(row)

    def _measure(self, step: Step, row: StepReport) -> StepReport:
        assert self.reference is not None
        assert self.standing is not None
        try:
            outputs = self.reference.observe(self.model)
        except Exception as error:
            if step.required:
                raise self._failed(step, error) from error
            self.applied.pop().undo()
            return dataclasses.replace(row, status="skipped", reason=f"it failed to run: {first_line(error)}")
        agreement = compare(outputs, self.reference)
        row = dataclasses.replace(row, agreement=agreement)
        unchanged = outputs.equals(self.standing[0])
        reason = failure(step.pass_.numerics, unchanged, self.standing[1], agreement, self.budget)
        if reason is None:
            self.standing = outputs, agreement
            return row
        if step.on_fail == "raise":
            self.steps.append(dataclasses.replace(row, status="refused", reason=reason))
            remedy = "leave the pass out, give its entry on_fail = 'drop'"
            remedy += ", or loosen the budget" if step.pass_.numerics is Numerics.LOSSY else ""
            raise AccuracyError(f"{row.name}: {reason}; {remedy}", self.report())
        self.applied.pop().undo()
        return dataclasses.replace(row, status="dropped", reason=reason)

    def _blocks(self, step: Step, *, applied: bool) -> Blocks | None:
        """The encoder's blocks to time for an entry before it is applied, or after; None where none are to be timed."""
        from samopt.passes import Compile

        if step.keep == "always":
            return None
        compiling = self.recipe.find(Compile)
        return blocks_of(self.model, None if isinstance(step.pass_, Compile) and not applied else compiling)

    def _all_emulated(self, pass_: Pass) -> bool:
        """Whether all that a pass would rewrite is arithmetic that this device only emulates: it need not be tried."""
        pass_.requires(self.model)
        sites = [found for found in pass_.match(self.model) if isinstance(found, Site)]
        return bool(sites) and all(site.facts.get("emulated") for site in sites)

    def _keep_if_faster(self, step: Step, row: StepReport, before: Blocks) -> StepReport:
        """What becomes of an applied entry that is to be kept only if it is faster."""
        if self.device.type == "meta":
            return dataclasses.replace(row, reason="nothing takes time on the meta device: not timed, kept")
        if step.pass_.between_blocks:
            return dataclasses.replace(row, reason="its gain is between the encoder's blocks: not timed, kept")
        after = self._blocks(step, applied=True)
        assert after is not None
        if not after.counts:
            return dataclasses.replace(row, reason="the image encoder has no blocks to time: not timed, kept")
        try:
            speed = block_speed(before, after, self.batch_size)
        except Exception as error:
            if step.required:
                raise self._failed(step, error, f" while blocks were timed at batch_size={self.batch_size}") from error
            return dataclasses.replace(row, status="skipped", reason=f"it could not be timed: {first_line(error)}")
        if speed is None:
            return dataclasses.replace(row, reason="its sites are outside the encoder's blocks: not timed, kept")
        row = dataclasses.replace(row, speed=speed)
        return row if speed.faster else dataclasses.replace(row, status="undone", reason=f"not faster: {speed}")

    def _failed(self, step: Step, error: Exception, when: str = "") -> SamoptError:
        done = ", ".join(row.name for row in self.steps if row.status == "applied") or "none"
        return SamoptError(f"{step.pass_!r} failed{when}: {first_line(error)} (passes applied before it: {done})")

    def finish(self) -> Report:
        """Measures once at the end if that was asked for, and writes the report."""
        if self.verify == "end" and self.applied:
            assert self.reference is not None
            assert self.standing is not None
            try:
                outputs = self.reference.observe(self.model)
            except Exception as error:
                raise SamoptError(
                    f"recipe {self.recipe.name}: the optimised model failed to run: {first_line(error)}; "
                    "verify='each' tells which pass it is"
                ) from error
            agreement = compare(outputs, self.reference)
            classes = {row.numerics for row in self.steps if row.status == "applied"}
            worst = next(n for n in (Numerics.LOSSY, Numerics.ROUNDING, Numerics.EXACT) if n in classes)
            reason = failure(worst, outputs.equals(self.standing[0]), self.standing[1], agreement, self.budget)
            self._measured_last(agreement)
            if reason is not None:
                message = f"recipe {self.recipe.name}: {reason}; verify='each' tells which pass it is"
                raise AccuracyError(message, self.report())
        return self.report()

    def _measured_last(self, agreement: Agreement) -> None:
        last = max(index for index, row in enumerate(self.steps) if row.status == "applied")
        self.steps[last] = dataclasses.replace(self.steps[last], agreement=agreement)

    def report(self) -> Report:
        """What became of the entries so far."""
        samples = () if self.reference is None else tuple(sample.name for sample in self.reference.samples)
        return Report(
            self.recipe.name,
            describe(self.model),
            samples,
            str(self.device),
            self.baseline,
            tuple(self.steps),
            versions(),
            model_digest=self.model_digest,
            result_digest=weights_digest(self.model),
        )


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[list[PassResult]]:
    """Collects applied passes; on an error undoes them and restores modes and gradients."""
    training = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    applied: list[PassResult] = []
    try:
        yield applied
    except BaseException:
        for result in reversed(applied):
            result.undo()
        for module, mode in training:
            module.training = mode
        for parameter, required in gradients:
            parameter.requires_grad_(required)
        raise


def _half_precision_error(model: nn.Module, reference: Reference, recipe: Recipe) -> float:
    """The embedding error of the unmodified encoder in eager half precision: the yardstick for untrained weights."""
    from samopt.passes import CastDtype

    cast = recipe.find(CastDtype) or CastDtype()
    half = clone(model)
    CastDtype(cast.dtype, decoder=False)(half)
    outputs: Outputs = observe(half, reference.samples, lambda predictor, index: [])
    return relative_error(outputs.embeddings, reference.outputs.embeddings)


def apply_but_keep_dtype(model: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, by which `.to(...)` works, for an optimised model: it may move, not change dtype.

    Raises:
        InvalidInput: on a change of dtype, before anything is changed.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors if tensor.is_floating_point()}:
        becomes = function(torch.empty(0, dtype=dtype, device=device)).dtype
        if becomes != dtype:
            raise InvalidInput(
                f"an optimised model keeps its dtypes ({dtype} would become {becomes}): prompt coordinates need "
                "float32; optimise the original model with a recipe whose entry CastDtype names the dtype you want"
            )
    return nn.Module._apply(model, function, recurse)
