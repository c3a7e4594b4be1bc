"""`samopt report`: what it writes, and that a mistake writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from samopt.bench_table import to_dict
from tests.made_up_results import COMPARISON, ROWS, SETTING
from tests.test_cli import refused, run

__all__ = ["run"]  # the fixture


def test_results_become_a_page_and_pictures(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(to_dict(SETTING, ROWS)))
    (tmp_path / "profile.json").write_text(json.dumps(COMPARISON.to_dict()))
    result = run("report", "rows.json", "profile.json", "--out", "shown/here")
    assert result.exit_code == 0, result.output
    files = {path.name for path in (tmp_path / "shown/here").iterdir()}
    assert {"report.html", "vit_q-waterfall-throughput.svg", "profile-kernels.png"} <= files
    assert all(name in result.output for name in files)


def test_a_recipe_adds_accuracy_and_masks(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text('[[pass]]\nname = "sdpa"\n')
    result = run("report", "--recipe", "quick.toml", "--device", "cpu", "--out", "shown")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "shown").iterdir()} == {"report.html", "masks-1.png"}
    page = (tmp_path / "shown" / "report.html").read_text(encoding="utf-8")
    for text in ("Accuracy of quick, pass by pass", "SDPAttention", "true mIoU", "scene 2000000, "):
        assert text in page
    assert page.count("<img ") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to report"),
        (("none.json",), "none.json: cannot be read"),
        (("eager.toml",), "eager.toml: not JSON"),
        (("rows.json", "--limit", "2"), "need --recipe"),
        (("rows.json", "--recipe", "fastest"), "unknown recipe 'fastest'"),
        (("rows.json", "--recipe", "fast", "--checkpoint", "none.pth"), "none.pth: there is no such checkpoint"),
        (("rows.json", "--out", "eager.toml"), "eager.toml: no folder can be made there"),
    ],
)
def test_mistakes_write_nothing(
    run: Callable[..., Result],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(to_dict(SETTING, ROWS)))
    before = sorted(tmp_path.rglob("*"))
    assert message in refused(run("report", "--out", "shown", *arguments))
    assert sorted(tmp_path.rglob("*")) == before
