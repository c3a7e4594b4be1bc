"""What `optimize` does when a pass fails, refuses or costs too much: an error or a row, and the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything.modeling import Sam
from torch import nn

from samopt import (
    AccuracyError,
    AlreadyApplied,
    Budget,
    InvalidInput,
    NoSites,
    Pass,
    Recipe,
    Reference,
    SamoptError,
    Sample,
    Step,
    Unsupported,
    optimize,
    report,
    verify,
)
from samopt.passes import HoistRelPos, LinearPatchEmbed
from tests.snapshot import Snapshot
from tests.toys import Exact, Fails, Lossy, Refuses, Root, Rounding, ToyError

NAN = float("nan")
FIRST = (HoistRelPos(), Root(factor=1.0), LinearPatchEmbed())  # applied before the one that fails


@pytest.fixture(scope="module")
def pictures(pictures: list[Sample]) -> list[Sample]:
    """One picture: there are many cases."""
    return pictures[:1]


@pytest.fixture(params=[False, True], ids=["copy", "inplace"])
def inplace(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
def watched(sam: Sam) -> Iterator[Sam]:
    """A Sam in training, with hooks, gradients and a frozen weight, that must come out of the test as it went in."""
    sam.train()
    sam.mask_decoder.eval()
    sam.image_encoder.neck[0].weight.requires_grad_(False)
    sam.image_encoder(torch.zeros(1, 3, 64, 64)).sum().backward()
    sam.image_encoder.register_forward_hook(lambda module, args, output: None)
    vars(sam)["mine"] = object()
    before = Snapshot(sam)
    yield sam
    before.assert_unchanged(sam)


# Errors


@pytest.mark.parametrize("where", ["requires", "match", "calibrate", "rewrite", "install", "forward"])
@pytest.mark.parametrize("when", ["each", "end", "off"])
def test_a_pass_that_fails_names_itself_and_those_before_it(
    watched: Sam, pictures: list[Sample], inplace: bool, where: Any, when: Any
) -> None:
    if where == "forward" and when == "off":
        return  # nobody ran it
    with pytest.raises(SamoptError) as error:
        optimize(watched, [*FIRST, Fails(where)], samples=pictures, inplace=inplace, verify=when)
    if (where, when) == ("forward", "end"):
        assert "recipe recipe: the optimised model failed to run: ToyError: it does not run; verify='each'" in str(
            error.value
        )
    else:
        assert str(error.value).startswith(f"Fails(where='{where}') failed: ")
        assert "(passes applied before it: HoistRelPos(), Root(" in str(error.value)
        assert str(error.value).endswith("LinearPatchEmbed())")
    assert "details" not in str(error.value), "its first line"
    assert isinstance(error.value.__cause__, AttributeError if where == "install" else ToyError)


@pytest.mark.parametrize(
    ("pass_", "kind"),
    [
        (Refuses("unsupported"), Unsupported),
        (Refuses("no_sites"), NoSites),
        (Refuses("only_skips"), NoSites),
        (HoistRelPos(), AlreadyApplied),
    ],
)
def test_a_required_pass_that_refuses_is_its_own_error(
    watched: Sam, pictures: list[Sample], inplace: bool, pass_: Pass, kind: type[Unsupported]
) -> None:
    if kind is AlreadyApplied:
        done = HoistRelPos()(watched)
    with pytest.raises(kind) as error:
        optimize(watched, [*FIRST[1:], pass_], samples=pictures, inplace=inplace)
    assert type(error.value) is kind
    if kind is AlreadyApplied:
        done.undo()


@pytest.mark.parametrize(
    ("pass_", "message"),
    [
        (Exact(1 + 1e-5), r"Exact\(factor=.*\): it is to be exact, and the outputs are not bit-equal"),
        (Rounding(1.01), r"Rounding\(factor=.*\): it is only to round, and the embedding error rose"),
        (Lossy(-1.0), r"Lossy\(factor=.*\): mean mask IoU .* is below the budget's 0\.99"),
        (Exact(NAN), "the outputs hold NaN"),
        (Rounding(NAN), "the outputs hold NaN"),
        (Lossy(NAN), "the outputs hold NaN"),
        (Lossy(float("inf")), "the outputs hold NaN or infinity"),
    ],
)
@pytest.mark.parametrize("when", ["each", "end"])
def test_a_pass_that_costs_too_much_is_an_accuracy_error(
    watched: Sam, pictures: list[Sample], inplace: bool, pass_: Pass, message: str, when: Any
) -> None:
    steps = [Step(first) for first in (*FIRST, pass_)]
    if when == "end":
        steps, message = [Step(pass_)], r"recipe mine: .*verify='each' tells which pass it is"
    recipe = Recipe(steps, Budget(mean_iou=0.99), "mine")
    with pytest.raises(AccuracyError, match=message):
        optimize(watched, recipe, samples=pictures, inplace=inplace, verify=when)


def test_an_interrupt_undoes_too(watched: Sam, pictures: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Fails, module: nn.Module, site: Any, stats: Any) -> nn.Module:
        raise KeyboardInterrupt

    monkeypatch.setattr(Fails, "rewrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimize(watched, [*FIRST, Fails()], samples=pictures, inplace=True)


def test_a_model_that_answers_nan_is_told_before_any_pass(sam: Sam, pictures: list[Sample]) -> None:
    with torch.no_grad():
        sam.image_encoder.pos_embed.fill_(NAN)
    with pytest.raises(InvalidInput, match="the unmodified model hold NaN or infinity"):
        optimize(sam, [Exact()], samples=pictures, inplace=True)


def test_a_model_that_does_not_run_is_told_before_any_pass(sam: Sam, pictures: list[Sample]) -> None:
    before = Snapshot(sam.double())
    with pytest.raises(
        InvalidInput, match=r"the unmodified model failed to run: RuntimeError: .*dtype.*; pass it in float32"
    ):
        optimize(sam, [Exact()], samples=pictures, inplace=True)
    before.assert_unchanged(sam)
    sam.to("meta")
    with pytest.raises(InvalidInput, match="on the meta device"):
        optimize(sam, [Exact()], samples=pictures)
    assert report(optimize(sam, [Exact()], verify="off")).steps[0].status == "applied"


# Entries that may fail


@pytest.mark.parametrize(
    ("how", "reason"),
    [("unsupported", "this is the wrong planet; move to Mars"), ("alike", "it is a block (12 modules)")],
)
def test_an_entry_that_need_not_apply_is_skipped_with_the_reason(
    sam: Sam, pictures: list[Sample], how: Any, reason: str
) -> None:
    steps: list[Pass | Step] = [Exact(), Step(Refuses(how), required=False), Rounding()]
    first, skipped, last = report(optimize(sam, steps, samples=pictures)).steps
    assert (first.status, skipped.status, last.status) == ("applied", "skipped", "applied")
    assert skipped.reason == reason
    assert skipped.sites == ()


def test_an_entry_that_need_not_apply_and_fails_to_run_is_undone(watched: Sam, pictures: list[Sample]) -> None:
    fast = optimize(watched, [Exact(), Step(Fails("forward"), required=False), Rounding()], samples=pictures)
    _, skipped, last = report(fast).steps
    assert (skipped.status, last.status) == ("skipped", "applied")
    assert skipped.reason == "it failed to run: ToyError: it does not run"
    assert "forward" not in vars(fast.image_encoder.blocks[0])
    fast.image_encoder(torch.zeros(1, 3, 64, 64))


@pytest.mark.parametrize("where", ["match", "rewrite"])
def test_a_bug_in_a_pass_is_an_error_even_where_it_need_not_apply(
    watched: Sam, pictures: list[Sample], where: Any
) -> None:
    with pytest.raises(SamoptError, match=f"failed in {where}"):
        optimize(watched, [Step(Fails(where), required=False)], samples=pictures, inplace=True)


@pytest.mark.parametrize("bad", [Exact(1.1), Rounding(1.1), Lossy(-1.0), Lossy(NAN)], ids=str)
def test_what_costs_too_much_may_be_dropped(sam: Sam, pictures: list[Sample], bad: Pass) -> None:
    kept = Root(factor=1.0)
    fast = optimize(sam, Recipe([Step(kept), Step(bad, on_fail="drop")], Budget(mean_iou=0.99)), samples=pictures)
    row = report(fast).steps[1]
    assert row.status == "dropped"
    assert row.reason
    assert row.agreement is not None, "the figures that condemned it are shown"
    assert len(row.sites) == 1
    expected = Reference.record(optimize(sam, [kept], verify="off"), pictures)
    assert verify(fast, expected).equal


def test_a_dropped_pass_does_not_count_against_the_next(sam: Sam, pictures: list[Sample]) -> None:
    steps = [Step(Exact(1.5), on_fail="drop"), Step(Rounding(1 + 2**-21)), Step(Lossy(1.0))]
    made = report(optimize(sam, steps, samples=pictures))
    assert [step.status for step in made.steps] == ["dropped", "applied", "applied"]
    assert made.steps[0].agreement is not None
    assert made.steps[2].agreement is not None
    assert made.steps[0].agreement.embedding_error > 0.1 > made.steps[2].agreement.embedding_error


# Untrained weights


def specks() -> list[Sample]:
    """A picture of an object that random weights cannot find."""
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    mask = np.zeros((1, 48, 64), dtype=np.bool_)
    mask[0, 20, 30] = True
    return [Sample(image, mask)]


@pytest.mark.parametrize("asked", [False, True], ids=["found out", "asked for"])
def test_untrained_weights_are_held_to_the_embedding(sam: Sam, pictures: list[Sample], asked: bool) -> None:
    samples, budget = (pictures, Budget(masks=False)) if asked else (specks(), Budget())
    half = 2.0**-9  # what a bfloat16 cannot tell apart
    fast = optimize(sam, Recipe([Step(Lossy(1 + half / 4))], budget), samples=samples)
    assert report(fast).baseline is not None
    assert report(fast).baseline.masks is None  # type: ignore[union-attr]
    assert "masks: not measured, untrained weights" in str(report(fast))
    with pytest.raises(AccuracyError, match=r"Lossy.*: embedding error 1\.00e-01 is above"):
        optimize(sam, Recipe([Step(Lossy(1.1))], budget), samples=samples)
    with pytest.raises(AccuracyError, match="the outputs hold NaN"):
        optimize(sam, Recipe([Step(Lossy(NAN))], budget), samples=samples)
    generous = Budget(masks=budget.masks, embedding_error=0.2)
    optimize(sam, Recipe([Step(Lossy(1.1))], generous), samples=samples)


def test_a_model_without_an_encoder_to_cast_needs_no_yardstick(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    from samopt.passes import CastDtype

    monkeypatch.setattr(CastDtype, "match", lambda self, model: iter(()))
    optimize(sam, [Exact(), Rounding()], samples=specks())
