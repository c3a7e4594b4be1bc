"""2:4 weights come out of their packed form bit for bit, in a little more than half of the bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from samopt.module_form import same_bits
from samopt.packing import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def every_block(dtype: torch.dtype) -> Tensor:
    """[16, 8]: every choice of up to two weights in a block that are not zero, beside one that is fixed."""
    rows = [
        [(-1) ** at * (at + 1.0) if at in kept else 0.0 for at in range(4)] + [0.0, 3.0, 0.0, -2.0]
        for count in range(3)
        for kept in itertools.combinations(range(4), count)
    ]
    return torch.tensor(rows).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: torch.dtype) -> None:
    weight = every_block(dtype)
    packed = pack(weight)
    assert packed is not None
    values, positions = packed
    assert values.dtype is dtype
    assert (values.shape, positions.shape) == ((11, 4), (11, 1))
    assert same_bits(unpack(values, positions), weight)


def test_negative_zero_is_a_value() -> None:
    weight = torch.tensor([[-0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -0.0]])
    packed = pack(weight)
    assert packed is not None
    assert same_bits(unpack(*packed), weight)


@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor([[1.0, -0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]),
        torch.zeros(2, 12),
        torch.zeros(8),
        torch.zeros(1, 8, dtype=torch.float64),
    ],
    ids=["three of four", "an odd block", "one dimension", "eight bytes"],
)
def test_what_has_no_packed_form(weight: Tensor) -> None:
    assert pack(weight) is None
