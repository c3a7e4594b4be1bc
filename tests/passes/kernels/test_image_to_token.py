"""The kernel of the image tokens' step in Triton's interpreter, and the operator on a CPU, against float64.

Triton's interpreter multiplies the bits of bfloat16, not its values: there the kernel is for `test_on_gpu`.
"""

from __future__ import annotations

import pytest
import torch

from samopt.errors import Unsupported
from samopt.passes.kernels import image_to_token
from samopt.passes.kernels.image_to_token import CANDIDATES, FEW, MANY, launch, padded, problem, unfit
from samopt.passes.kernels.tuning import Config, Problem
from tests.attention_problems import poisoned
from tests.image_token_problems import EPS, random_problem, truth
from tests.numerics import assert_bit_equal, relative_error

pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")

TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4}
SMALL = Config.of(BLOCK_M=16, STEPS=1, GROUP=64)
CONFIGS = {
    "a block a program": SMALL,
    "many blocks a program": Config.of(BLOCK_M=16, STEPS=4, GROUP=64),
    "heads in groups": Config.of(BLOCK_M=32, STEPS=1, GROUP=16),
    "heads in groups, many blocks": Config.of(BLOCK_M=16, STEPS=2, GROUP=32),
}


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 64])
def test_the_kernel_is_right(tokens: int, dtype: torch.dtype) -> None:
    given = random_problem(tokens=tokens, dtype=dtype)
    before = [tensor.clone() for tensor in given]
    with poisoned():
        ours = launch(SMALL, given, 8, EPS)
    assert (ours.shape, ours.dtype) == ((3, 37, 64), dtype)
    assert relative_error(ours, truth(given)) < TOLERANCE[dtype]
    assert_bit_equal(given, before)


@interpreted
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("positions", [1, 3])
def test_what_is_shared_by_all_prompts_may_be_one(positions: int, images: int, case: str) -> None:
    given = random_problem(images=images, positions=positions)
    with poisoned():
        ours = launch(CONFIGS[case], given, 8, EPS)
    assert ours.shape == (3, 37, 64)
    assert relative_error(ours, truth(given)) < 5e-7


@interpreted
def test_one_prompt_for_several_images() -> None:
    given = random_problem(prompts=1, images=3)
    assert relative_error(launch(SMALL, given, 8, EPS), truth(given)) < 5e-7


@interpreted
@pytest.mark.parametrize(
    ("channels", "inner", "heads"), [(16, 16, 1), (32, 48, 2), (128, 24, 8), (64, 64, 16)], ids=str
)
def test_other_widths_and_heads(channels: int, inner: int, heads: int) -> None:
    given = random_problem(channels=channels, inner=inner)
    with poisoned():
        ours = launch(SMALL, given, heads, EPS)
    assert relative_error(ours, truth(given, heads)) < 5e-7


@interpreted
def test_tokens_lie_in_memory_in_any_order() -> None:
    given = random_problem()
    keys, key_pe = (side.mT.contiguous().mT for side in given[:2])
    rearranged = given._replace(keys=keys, key_pe=key_pe)
    assert_bit_equal(launch(SMALL, rearranged, 8, EPS), launch(SMALL, given, 8, EPS))


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of the interpreter's maximum
def test_logits_may_be_large_and_what_is_not_finite_stays_in_its_token() -> None:
    given = random_problem(images=3)
    given = given._replace(k=1e4 * given.k)
    wanted = truth(given)
    assert relative_error(launch(SMALL, given, 8, EPS), wanted) < 1e-5
    given.keys[1, 5, 3] = torch.nan
    ours = launch(SMALL, given, 8, EPS)
    assert ours[1, 5].isnan().all()
    assert relative_error(ours[1, 6:], wanted[1, 6:]) < 1e-5
    assert ours.isnan().sum() == 64


@interpreted
def test_every_candidate_is_right() -> None:
    given = random_problem(prompts=1, tokens=9, channels=16, inner=16)
    for config in CANDIDATES:
        assert relative_error(launch(config, given, 8, EPS), truth(given)) < 5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("prompts", "images"), [(3, 1), (3, 3), (1, 3)])
def test_the_operator_on_a_cpu_rounds_once(prompts: int, images: int, dtype: torch.dtype) -> None:
    given = random_problem(prompts=prompts, images=images, dtype=dtype)
    ours = torch.ops.samopt.image_to_token(*given, 8, EPS)
    assert (ours.shape, ours.dtype) == ((3, 37, 64), dtype)
    assert relative_error(ours, truth(given)) < 0.25 * torch.finfo(dtype).eps + 3e-7


def test_no_prompts_are_none() -> None:
    given = random_problem(prompts=0)
    assert torch.ops.samopt.image_to_token(*given, 8, EPS).shape == (0, 37, 64)


@pytest.mark.parametrize("case", ["no configuration", "tokens", "channels", "heads", "dtype"])
def test_what_the_kernel_does_not_take_is_pytorchs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for a GPU, run on a CPU."""
    sought = []

    def none(problem: Problem) -> Config:
        sought.append(problem)
        raise Unsupported("no configuration")

    monkeypatch.setattr(image_to_token, "choose", none)
    heads = 4 if case != "heads" else 6
    given = random_problem(
        tokens=65 if case == "tokens" else 7,
        channels=96 if case == "channels" else 64,
        inner=24,
        dtype=torch.float32 if case == "dtype" else torch.float16,
    )
    assert relative_error(image_to_token._cuda(*given, heads, EPS), truth(given, heads)) < 1e-3
    assert len(sought) == (case == "no configuration")


@interpreted
def test_the_kernel_is_chosen_for_padded_tokens_and_few_or_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[str] = []

    def first(asked: Problem) -> Config:
        sought.append(asked.key().partition(" on ")[0])
        return SMALL

    monkeypatch.setattr(image_to_token, "choose", first)
    for prompts, tokens in ((1, 7), (2, 9), (9, 5)):
        given = random_problem(prompts=prompts, tokens=tokens, dtype=torch.float16)
        assert relative_error(image_to_token._cuda(*given, 8, EPS), truth(given)) < 1e-3
    sizes = [(FEW, 8), (FEW, 16), (MANY, 8)]
    assert sought == [f"image_to_token(prompts={n},M=37,C=64,heads=8,T={tokens}) float16" for n, tokens in sizes]


@interpreted
def test_a_problem_is_what_a_candidate_solves() -> None:
    sought = problem(1, 40, 64, 8, 7, torch.float16, torch.device("cpu"))
    out = sought.output()
    sought.run(SMALL, out)
    assert relative_error(out, sought.reference()) < 1e-3
    out.fill_(torch.nan)
    sought.run(SMALL, out)
    assert not out.isnan().any()


def test_padding_makes_products_of_at_least_sixteen_columns() -> None:
    assert [padded(tokens, 8) for tokens in (1, 7, 8, 9, 17, 64)] == [8, 8, 8, 16, 32, 64]
    assert [padded(5, heads) for heads in (1, 2, 4)] == [16, 8, 8]


def test_sizes_that_do_not_fit() -> None:
    assert unfit(256, 8) is None
    assert unfit(192, 8) == "its tokens have 192 channels, which is no power of two from 16 to 512"
    assert unfit(1024, 8) == "its tokens have 1024 channels, which is no power of two from 16 to 512"
    assert unfit(256, 6) == "its 6 heads are no power of two"
