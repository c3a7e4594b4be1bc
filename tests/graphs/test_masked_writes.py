"""Masked reads and writes in toy modules: rewritten bit for bit where it is sound, a Skip with the reason where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samopt import NoSites
from samopt.passes.where_indexing import WhereIndexing
from tests import mask_toys, unsound_mask_toys
from tests.mask_toys import SHAPE, Toy
from tests.snapshot import Snapshot
from tests.toy_graphs import assert_same_bits, rewritten


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(SHAPE)
    x[0, 0], x[1, 1, 1], x[2, 2, 2], x[2, 3] = float("nan"), float("inf"), -0.0, 0.0
    return x.to(dtype), torch.randint(-1, 5, SHAPE[:2])


@pytest.mark.usefixtures("no_original")
@pytest.mark.parametrize("toy", mask_toys.SOUND)
def test_a_sound_method_is_rewritten_bit_for_bit(toy: type[Toy]) -> None:
    module = toy()
    ours = rewritten(module, WhereIndexing())
    for _ in range(5):
        x, labels = inputs()
        before = x.clone(), labels.clone()
        assert_same_bits(ours(x, labels), module(x, labels))
        assert_same_bits(x, before[0])
        assert torch.equal(labels, before[1])
    code = vars(ours)["forward"].func.code
    assert "torch.where(" in code
    assert "] = " not in code


def outcome(module: nn.Module, *args: Tensor) -> Any:
    try:
        return module(*(x.clone(memory_format=torch.preserve_format) for x in args))
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("toy", mask_toys.SOUND)
def test_what_the_code_alone_does_not_tell_is_left_to_the_original(toy: type[Toy]) -> None:
    module = toy()
    ours = rewritten(module, WhereIndexing())
    x, labels = inputs()
    transposed = x.transpose(0, 2).contiguous().transpose(0, 2), labels.T.contiguous().T
    misfits = [(x[:1], labels), (x, labels[:, :1]), (x[..., :3], labels), (x[..., 0], labels), (x, labels[None])]
    cases = [transposed, *misfits, *((x.to(dtype), labels) for dtype in (torch.float64, torch.bfloat16))]
    for case in cases:
        mine, other = outcome(ours, *case), outcome(module, *case)
        if isinstance(other, Tensor):
            assert_same_bits(mine, other)
            assert mine.stride() == other.stride()
        else:
            assert mine is other


@pytest.mark.parametrize("toy", unsound_mask_toys.DECLINED)
def test_an_unsound_method_is_a_skip_with_its_reason(toy: Any) -> None:
    module = toy()
    before = Snapshot(module)
    with pytest.raises(NoSites, match=toy.reason):
        WhereIndexing()(module)
    before.assert_unchanged(module)
    assert not module.log


def test_a_method_for_each_of_bool_and_optional_arguments() -> None:
    module = mask_toys.Optional()
    ours = rewritten(module, WhereIndexing())
    x, labels = inputs()
    assert_same_bits(ours(x), module(x))
    for twice in (False, True):
        assert_same_bits(ours(x, labels, twice), module(x, labels, twice))
        assert_same_bits(ours(twice=twice, labels=labels, x=x), module(x, labels, twice))
    assert len(vars(ours)["forward"].func.variants) == 2  # without labels there is nothing to rewrite
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ours(x, label=labels)


def test_a_hooked_child_may_keep_what_it_returns() -> None:
    module = mask_toys.FromChild()
    module.linear.register_forward_hook(lambda *_: None)
    with pytest.raises(NoSites, match=r"what `self.linear` returned, which others may hold"):
        WhereIndexing()(module)


def test_toys_compile_without_a_graph_break() -> None:
    torch._dynamo.reset()
    for toy in (mask_toys.Row, mask_toys.Chain, mask_toys.FromChild):
        module = toy()
        ours = torch.compile(rewritten(module, WhereIndexing()), backend="eager", fullgraph=True)
        assert_same_bits(ours(*(case := inputs())), module(*case))
    torch._dynamo.reset()


class Grows(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x[..., :1] * 1
        x[labels == 1] += self.row
        return x


class Aligns(Toy):
    def forward(self, x: Tensor, labels: Tensor, other: Tensor) -> Tensor:
        mask = labels == 1
        x = x * 1
        x[mask] = x[mask] + other[mask]
        return x


class PerTrue(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        x[labels == 1] = self.memory[0]  # five rows
        return x


class Promotes(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        rows = x[labels == 1] * 0.5
        rows += 1
        x[labels == 1] = rows
        return x


class PromotesByShape(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(1, 1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        x[labels == 1] = x[labels == 1] + self.wide
        return x


def test_a_dtype_that_does_not_fit_raises_as_the_original_does() -> None:
    x, labels = torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5)
    assert outcome(Promotes(), x, labels) is RuntimeError
    assert outcome(rewritten(Promotes(), WhereIndexing()), x, labels) is RuntimeError
    assert outcome(PromotesByShape(), x.float(), labels) is RuntimeError
    assert outcome(rewritten(PromotesByShape(), WhereIndexing()), x.float(), labels) is RuntimeError


def test_what_only_broadcasts_on_all_rows_runs_the_original() -> None:
    x, labels = torch.randn(5, 5, 5), torch.ones(5, 5)
    ours = rewritten(module := Aligns(), WhereIndexing())
    for shape in [(5, 5), (5, 5, 1), (5, 5, 1, 5)]:
        other = torch.randn(shape)
        mine, theirs = outcome(ours, x, labels, other), outcome(module, x, labels, other)
        assert (mine is theirs) if isinstance(theirs, type) else torch.equal(mine, theirs)
    assert outcome(rewritten(Grows(), WhereIndexing()), *inputs()) is RuntimeError
    labels = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    for case in (labels, labels.clamp(0, 0)):
        x = torch.randn(SHAPE)
        mine, theirs = outcome(rewritten(PerTrue(), WhereIndexing()), x, case), outcome(PerTrue(), x, case)
        assert (mine is theirs) if isinstance(theirs, type) else torch.equal(mine, theirs)
