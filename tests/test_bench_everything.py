"""The benchmark of whole calls; its masks are compared in test_automatic_mask_generator.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from segment_anything.modeling import Sam
from typer.testing import CliRunner

from samopt.bench_everything import CallsBench, matched_iou, pairwise_iou
from samopt.bench_plan import Verified
from samopt.cli import app
from samopt.masks import Mask
from samopt.passes import SDPAttention
from samopt.recipe import Recipe, Step
from samopt.samples import scene_samples


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samopt.bench_everything.PROMPT_SIDE", 1)


SETTINGS = {"points_per_side": 3, "pred_iou_thresh": 0.4, "stability_score_thresh": 0.6}


def square(left: int, width: int) -> Mask:
    mask = np.zeros((4, 10), dtype=np.bool_)
    mask[:, left : left + width] = True
    return mask


def test_masks_are_matched_one_to_one_for_the_highest_sum() -> None:
    wanted, found = [square(0, 4), square(4, 4)], [square(5, 4), square(0, 3), square(9, 1)]
    assert matched_iou([wanted], [found]) == pytest.approx((3 / 5 + 3 / 4) / 2)
    assert matched_iou([wanted, []], [found, found]) == matched_iou([wanted], [found])
    assert matched_iou([wanted], [[]]) is None


def test_pairwise_iou_is_that_of_each_pair() -> None:
    first, second = [square(0, 4), square(0, 0)], [square(2, 4), square(0, 4), square(0, 0)]
    np.testing.assert_allclose(pairwise_iou(first, second), np.array([[2 / 6, 1, 0], [0, 0, 0]]))


def test_rows_tell_of_the_unmodified_model_and_of_recipes(tiny256: Sam) -> None:
    before = {name: value.clone() for name, value in tiny256.state_dict().items()}
    recipe = Recipe([Step(SDPAttention())], name="mine")
    base, row = CallsBench(tiny256, scene_samples(1, 256), repeats=1, **SETTINGS).rows([recipe])
    assert (base.what, row.what) == ("unmodified", "mine")
    assert base.records == row.records > 2
    assert base.matched_iou is None
    assert row.matched_iou == pytest.approx(1, abs=1e-3)
    assert row.everything_ratio == base.everything_ms / row.everything_ms
    assert row.predict_ratio == base.predict_ms / row.predict_ms
    assert all(torch.equal(value, before[name]) for name, value in tiny256.state_dict().items())


def test_the_command_writes_its_rows(tmp_path: Path, tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: tiny256)
    monkeypatch.setattr("samopt.bench_plan.verified", lambda recipe, *_: Verified(recipe, {}))
    mine, rows, picture = tmp_path / "mine.toml", tmp_path / "rows.json", tmp_path / "picture.png"
    mine.write_text('[[pass]]\nname = "where_indexing"\n')
    Image.fromarray(scene_samples(1, 64)[0].image).save(picture)
    arguments = ["--images", str(picture), "--points-per-side", "2", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "everything", "--recipe", str(mine), *arguments, "--json", str(rows)])
    assert result.exit_code == 0, result.output
    written = json.loads(rows.read_text())
    assert [row["what"] for row in written["rows"]] == ["unmodified", "mine"]
    assert written["model"] == "sam_tiny"
    assert "torch" in written["versions"]
    assert "64 points ms" in result.output
