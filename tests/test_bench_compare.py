"""Two runs side by side; the files are those that benchmarks write."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from samopt.bench_compare import Pair, compare_runs
from samopt.bench_table import Row, Setting, to_dict
from samopt.errors import InvalidInput

SETTING = Setting("vit_b", 0, "cuda", 1.0, 700.0, {"torch": "2.11.0", "gpu": "H200"})
ROWS = [Row("unmodified", 1, 40.0, 0.01), Row("fast", 1, 2.0, 0.02), Row("fast", 8, 1.5, 0.02)]


def write(path: Path, setting: Setting, rows: list[Row]) -> Path:
    path.write_text(json.dumps(to_dict(setting, rows)))
    return path


def changed(row: Row, **other: Any) -> Row:
    return dataclasses.replace(row, **other)


def test_rows_are_matched_by_name_and_batch_size(tmp_path: Path) -> None:
    slower = [changed(ROWS[2], milliseconds=1.44), changed(ROWS[0], milliseconds=41.0), Row("max", 8, 1.0)]
    found = compare_runs(write(tmp_path / "a", SETTING, ROWS), write(tmp_path / "b", SETTING, slower))
    assert [(pair.what, pair.batch_size) for pair in found.pairs] == [("unmodified", 1), ("fast", 8)]
    assert [pair.ratio for pair in found.pairs] == pytest.approx([41 / 40, 1.44 / 1.5])
    assert [pair.what for pair in found.beyond(0.03)] == ["fast"], "4 % faster differs, 2.5 % slower does not"
    assert found.only == (
        f"only in {tmp_path / 'a'}: vit_b fast batch 1",
        f"only in {tmp_path / 'b'}: vit_b max batch 8",
    )
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("after", "threshold", "differs"),
    [
        (103.0, 0.03, False),
        (103.1, 0.03, True),
        (97.1, 0.03, False),  # 100 is 2.99 % above it
        (97.0, 0.03, True),
        (100.0, 0.0, False),
        (None, 0.5, True),
    ],
)
def test_the_longer_time_is_held_against_the_shorter(after: float | None, threshold: float, differs: bool) -> None:
    assert Pair("row", 1, 100.0, after, (None, None)).differs(threshold) is differs


def test_rows_that_neither_run_timed_do_not_differ() -> None:
    assert not Pair("row", 1, None, None, (None, None)).differs(0.03)


def test_other_machines_versions_and_seeds_are_warned_of(tmp_path: Path) -> None:
    other = dataclasses.replace(SETTING, seed=1, versions={"torch": "2.14.0", "cuda": "13.0", "gpu": "H200"})
    found = compare_runs(write(tmp_path / "a", SETTING, ROWS), write(tmp_path / "b", other, ROWS))
    assert found.warnings == (
        "seed differs: 0 and 1",
        "torch differs: 2.11.0 and 2.14.0",
        "cuda differs: None and 13.0",
    )
    assert found.beyond(0.0) == []


def test_files_without_the_newer_fields_can_be_compared(tmp_path: Path) -> None:
    old = {"model": "vit_b", "seed": 0, "device": "cuda", "versions": SETTING.versions}
    rows = [{"what": "fast", "batch_size": 8, "milliseconds": 1.5, "spread": 0.01}]
    (tmp_path / "old").write_text(json.dumps({**old, "rows": rows}))
    found = compare_runs(tmp_path / "old", write(tmp_path / "b", SETTING, ROWS))
    assert [pair.ratio for pair in found.pairs] == [1.0]
    assert found.warnings == ()


def test_the_table_marks_what_differs(tmp_path: Path) -> None:
    rows = [ROWS[0], changed(ROWS[1], milliseconds=3.0), changed(ROWS[2], milliseconds=None, what="[fast]")]
    named = [*ROWS[:2], changed(ROWS[2], what="[fast]")]
    found = compare_runs(write(tmp_path / "a", SETTING, named), write(tmp_path / "b", SETTING, rows))
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(found.table(0.03))
    same, slower, missing = (line for line in console.export_text().splitlines() if line.startswith("│ "))
    assert "1.000" in same
    assert "differs" not in same
    for figure in ("2.00", "3.00", "2.0%", "1.500", "differs by more than 3.0%"):
        assert figure in slower
    assert "[fast]" in missing
    assert "differs" in missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "no results of a benchmark"),
        ('{"model": "vit_b"}', "no results of a benchmark"),
        ('{"model": "vit_b", "rows": [{"what": "fast"}]}', "no results of a benchmark"),
        ('{"model": "vit_b", "rows": []}', "have no row in common"),
        (json.dumps(to_dict(dataclasses.replace(SETTING, model="vit_h"), ROWS)), "have no row in common"),
    ],
)
def test_mistakes(tmp_path: Path, text: str | None, message: str) -> None:
    other = write(tmp_path / "b", SETTING, ROWS)
    if text is not None:
        (tmp_path / "a").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        compare_runs(tmp_path / "a", other)
