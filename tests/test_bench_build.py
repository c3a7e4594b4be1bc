"""What is said of a row under a recipe: in the recipe's own words, and where its batch is filled up."""

from __future__ import annotations

from typing import Any

import pytest
from segment_anything.modeling import Sam

from samopt.bench_build import Candidate, optimised
from samopt.errors import SamoptError
from samopt.passes import Compile, Float8Dynamic, Int8Dynamic, SDPAttention, TritonLayerNorm
from samopt.recipe import Recipe, Step
from tests.benches import CPU
from tests.toys import Refuses, Rounding

SIZES = (1, 2, 4, 8, 16, 32)


def candidate(sam: Sam, batch_size: int, *steps: Step) -> Candidate:
    with optimised(Recipe(steps), batch_size)(sam, CPU) as found:
        assert isinstance(found, Candidate)
        return found


@pytest.mark.usefixtures("kernels_anywhere")
def test_what_is_left_out_is_named_as_recipes_do_with_the_reason_once(sam: Sam) -> None:
    steps = [TritonLayerNorm(1024), Float8Dynamic(), Int8Dynamic()]
    found = candidate(sam, 1, *(Step(pass_, required=False) for pass_ in steps))
    assert found.passes == (repr(steps[1]),)
    assert found.remark == (
        "without layer_norm: its rows of 64 are fast as they are, TorchInductor keeps them in registers (2 modules); "
        "without int8: its weights are float8 already (8 modules)"
    )


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([Refuses()], "Refuses skipped: this is the wrong planet; move to Mars"),
        ([Rounding()], r"Rounding left out image_encoder\.patch_embed: it is \[left\] alone"),
    ],
)
def test_a_row_that_is_not_what_it_says_is_none(sam: Sam, passes: list[Any], message: str) -> None:
    with pytest.raises(SamoptError, match=f"^{message}$"):
        candidate(sam, 1, *(Step(pass_, required=False) for pass_ in passes))


@pytest.mark.parametrize(
    ("batch_size", "sizes", "run_as"),
    [(9, SIZES, "16"), (3, SIZES, "4"), (41, SIZES, "32 + 16"), (8, SIZES, ""), (33, SIZES, ""), (1, (4,), "4")],
)
def test_a_batch_that_is_filled_up_has_a_remark(sam: Sam, batch_size: int, sizes: tuple[int, ...], run_as: str) -> None:
    compiling = Compile(scope="none", batch_sizes=sizes)
    found = candidate(sam, batch_size, Step(SDPAttention()), Step(compiling))
    known = ", ".join(map(str, sizes))
    told = f"{batch_size} image{'s' if batch_size > 1 else ''} run{'s' if batch_size == 1 else ''}"
    assert found.remark == (f"{told} as {run_as}: compiled batch sizes are {known}" if run_as else "")


def test_without_compiled_sizes_a_batch_runs_as_it_is(sam: Sam) -> None:
    assert candidate(sam, 9, Step(SDPAttention())).remark == ""


def test_a_filled_up_batch_is_told_after_what_was_left_out(sam: Sam) -> None:
    steps = [Float8Dynamic(), Int8Dynamic(), Compile(scope="none", batch_sizes=(4,))]
    found = candidate(sam, 3, *(Step(pass_, required=False) for pass_ in steps))
    assert found.remark == (
        "without int8: its weights are float8 already (8 modules); 3 images run as 4: compiled batch sizes are 4"
    )
