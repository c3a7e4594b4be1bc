from __future__ import annotations

import pytest

from samopt import PassResult, SamoptError, Site, Skip
from samopt.result import by_reason


def test_sites_and_skips_read_well() -> None:
    assert str(Site("encoder.attn", {"grid": (4, 4), "window": 0})) == "encoder.attn (grid=(4, 4), window=0)"
    assert str(Site("")) == "(the model)"
    assert str(Skip("encoder.attn", "it is too wide")) == "encoder.attn: it is too wide"
    assert str(Skip("", "no")) == "(the model): no"


def test_each_reason_is_told_once() -> None:
    wide, odd = "it is too wide", "it is odd"
    skips = [Skip("a", wide), Skip("", odd), Skip("b", wide), Skip("c", wide), Skip("d", odd), Skip("e", "no")]
    assert by_reason(skips) == ["a and 2 others: it is too wide", "(the model) and 1 other: it is odd", "e: no"]
    assert by_reason([]) == []


def test_undo_that_failed_may_be_tried_again() -> None:
    calls: list[str] = []

    def undo() -> None:
        calls.append("undo")
        if len(calls) == 1:
            raise SamoptError("not yet")

    result = PassResult("Toy()", (Site("a"),), (), 0.5, undo)
    assert repr(result) == "PassResult(Toy(): 1 sites, 0 skipped, 0.50 s)"
    with pytest.raises(SamoptError, match="not yet"):
        result.undo()
    result.undo()
    with pytest.raises(SamoptError, match=r"Toy\(\) was undone already"):
        result.undo()
    assert len(calls) == 2
