"""A profile that was written reads back as it was."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from samopt.errors import InvalidInput
from samopt.profiling.reading import comparison_from_dict
from tests.made_up_results import COMPARISON

BARE = dataclasses.replace(
    COMPARISON, before=dataclasses.replace(COMPARISON.before, audit=None, memory=None), compilations=None
)


@pytest.mark.parametrize("comparison", [COMPARISON, BARE])
def test_round_trip(comparison: Any) -> None:
    assert comparison_from_dict(json.loads(json.dumps(comparison.to_dict())), "profile.json") == comparison


@pytest.mark.parametrize("change", [{"before": None}, {"before": {}}, {"passes": [1]}, {"compilations": {}}])
def test_what_is_no_profile_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^mine\.json: no profile of this version"):
        comparison_from_dict({**COMPARISON.to_dict(), **change}, "mine.json")
