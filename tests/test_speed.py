"""What is timed of the encoder's blocks, and how it is added up; how fast anything is, is never asserted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

import samopt.speed
import samopt.timing
from samopt import Pass
from samopt.passes import CastDtype, Compile, HoistRelPos, SDPAttention
from samopt.speed import Blocks, BlockSpeed, block_speed, blocks_of, median_seconds
from tests.models import random_sam
from tests.toys import Exact, LessWork

CPU = torch.device("cpu")


def test_faster_is_by_more_than_the_noise() -> None:
    assert BlockSpeed(1.0, 0.9, 1).faster
    assert not BlockSpeed(1.0, 0.995, 1).faster
    assert not BlockSpeed(1.0, 1.1, 1).faster
    assert str(BlockSpeed(7.92e-3, 5.134e-3, 8)) == "encoder blocks: 7.92 -> 5.13 ms an image at batch 8"


def test_blocks_alike_are_one_kind() -> None:
    sam = random_sam(img_size=64, depth=5, window=2, global_blocks=(1, 3))
    every: list[Pass] = [HoistRelPos(), SDPAttention(), CastDtype()]
    for pass_ in every:
        pass_(sam)
        blocks = blocks_of(sam, None)
        assert sorted(blocks.counts.values()) == [2, 3]
        assert {module.window_size for module in blocks.modules.values()} == {0, 2}
        assert {(kind.tokens, kind.dtype) for kind in blocks.counts} == {
            ((4, 4, 64), sam.image_encoder.pos_embed.dtype)
        }


def test_what_was_taken_before_a_pass_stays_as_it_was(sam: Sam) -> None:
    before = blocks_of(sam, None)
    x = torch.randn(1, *next(iter(before.counts)).tokens)
    expected = [module(x) for module in before.modules.values()]
    LessWork()(sam)
    HoistRelPos()(sam)
    sam.image_encoder.blocks[1].attn.qkv = nn.Identity()
    assert all(torch.equal(module(x), old) for module, old in zip(before.modules.values(), expected, strict=True))


def test_clones_share_the_weights(sam: Sam) -> None:
    weights = {parameter.data_ptr() for parameter in sam.parameters()}
    modules = blocks_of(sam, None).modules.values()
    assert {parameter.data_ptr() for module in modules for parameter in module.parameters()} <= weights


def per_window(seconds: dict[int, float]) -> Callable[..., list[float]]:
    """A timer in whose eyes a block takes what is given for its window, and half of it where a pass was applied."""

    def timed(calls: Any, device: torch.device) -> list[float]:
        assert device == CPU
        blocks = [call.func for call in calls]
        return [seconds[block.window_size] / (2 if "forward" in vars(block) else 1) for block in blocks]

    return timed


def test_medians_count_as_often_as_there_are_blocks_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sam = random_sam(img_size=64, depth=5, window=2, global_blocks=(1, 3))
    monkeypatch.setattr(samopt.speed, "median_seconds", per_window({2: 1.0, 0: 10.0}))
    before = blocks_of(sam, None)
    LessWork()(sam)
    assert block_speed(before, blocks_of(sam, None), 4) == BlockSpeed(23 / 4, 22.5 / 4, 4)


@pytest.mark.parametrize("pass_", [Exact(), None], ids=str)
def test_nothing_is_timed_where_the_blocks_are_as_they_were(sam: Sam, pass_: Pass | None) -> None:
    before = blocks_of(sam, None)
    if pass_ is not None:
        pass_(sam)
    assert block_speed(before, blocks_of(sam, None), 1) is None


class Other(nn.Module):
    """A block of other code than SAM's."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x + self.mix(x)


def test_blocks_of_other_code_are_timed_on_their_own_tokens(sam: Sam) -> None:
    sam.image_encoder.blocks = nn.ModuleList(Other() for _ in range(3))
    before = blocks_of(sam, None)
    CastDtype()(sam)
    after = blocks_of(sam, None)
    state = torch.get_rng_state()
    speed = block_speed(before, after, 2)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    assert speed is not None
    assert speed.before > 0 < speed.after
    for blocks, dtype in ((before, torch.float32), (after, torch.bfloat16)):
        (module,), (count,) = blocks.modules.values(), blocks.counts.values()
        assert count == 3
        assert isinstance(module, Other)
        assert {(x.shape, x.dtype) for x in module.seen} == {((2, 4, 4, 64), dtype)}
        assert all(x.float().std() > 0.5 for x in module.seen)


def test_an_encoder_that_does_not_say_its_tokens_has_no_blocks(sam: Sam) -> None:
    sam.image_encoder.pos_embed = None
    assert blocks_of(sam, None).counts, "it is known from the picture's size"
    del sam.image_encoder.img_size
    assert blocks_of(sam, None) == Blocks({}, {})


@pytest.mark.usefixtures("dynamo_only")
def test_blocks_run_as_the_recipe_compiles_them(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(calls: Any, device: torch.device) -> list[float]:
        return [float(call().dim()) for call in calls]

    monkeypatch.setattr(samopt.speed, "median_seconds", run)
    monkeypatch.setattr(Compile, "requires", lambda self, model: None)
    before = blocks_of(sam, Compile())
    LessWork()(sam)
    after = blocks_of(sam, Compile())
    assert block_speed(before, after, 1) is not None
    assert all(module._compiled_call_impl for module in before.modules.values())
    assert not any(module._compiled_call_impl for module in sam.modules()), "the model's own are not"
    eager = blocks_of(sam, None)
    assert block_speed(eager, after, 1) is not None, "compiling is a difference"
    assert not any(module._compiled_call_impl for module in eager.modules.values())


def test_blocks_run_eagerly_where_nothing_can_be_compiled(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.passes.compile, "_cpp_compiler", lambda: None)
    assert {kind.compiling for kind in blocks_of(sam, Compile()).counts} == {None}


def test_calls_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    times = iter([5.0, 1.0, 2.0, 1.0, 3.0, 9.0])

    def timer(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    monkeypatch.setattr(samopt.timing, "cpu_seconds", timer)
    assert median_seconds([lambda: made.append("a"), lambda: made.append("b")], CPU) == [3.0, 1.0]
    assert made == ["a", "b"] * 4, "once to warm up, then at least three times"
