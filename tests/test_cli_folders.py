"""`samopt segment` and `samopt embed` as commands: what they print, write, and exit with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from typer.testing import CliRunner, Result

import samopt
import samopt.samples
import samopt.tiny
from samopt.cli import app
from tests.folders.images import picture, plain_folder

ROUNDING = '[[pass]]\nname = "rel_pos"\n'


@pytest.fixture
def run(sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in a folder with three pictures, on a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samopt.tiny, "load_tiny", lambda: copy.deepcopy(sam))
    plain_folder(tmp_path / "photos", 3)
    (tmp_path / "quick.toml").write_text(ROUNDING)
    picture(7).save(tmp_path / "sample.png")
    common = ["--recipe", "quick.toml", "--images", "sample.png", "--device", "cpu"]
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments), *common])


def test_segment(run: Callable[..., Result], tmp_path: Path) -> None:
    options = ["--points-per-side", 2, "--pred-iou-thresh", 0, "--stability-score-thresh", 0, "--coco"]
    result = run("segment", "photos", "--out", "masks", *options)
    assert result.exit_code == 0, result.output
    assert "3 images done, 0 failed, 0 skipped" in result.output
    assert len(json.loads((tmp_path / "masks" / "coco.json").read_text())["images"]) == 3
    assert json.loads((tmp_path / "masks" / "job.json").read_text())["passes"] == ["HoistRelPos()"]
    (tmp_path / "photos" / "more.png").touch()
    result = run("segment", "photos/*.png", "--out", "masks", *options)
    assert result.exit_code == 1
    assert "0 images done, 1 failed, 3 skipped" in result.output
    assert "more.png: not a readable image" in result.output
    result = run("segment", "photos", "--out", "masks", "--points-per-side", 3)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: masks was made with ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_segment_takes_prompts(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "boxes.csv").write_text("image,x0,y0,x1,y1\n00.png,1,1,20,20\n")
    result = run("segment", "photos", "--prompts", "boxes.csv", "--no-multimask", "--out", "masks")
    assert result.exit_code == 0, result.output
    options = json.loads((tmp_path / "masks" / "job.json").read_text())["options"]
    assert options["multimask"] is False


def test_embed(run: Callable[..., Result], sam: Sam) -> None:
    result = run("embed", "photos", "--out", "embeddings", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "3 images done" in result.output
    predictor = SamPredictor(sam)
    samopt.load_embedding(predictor, "embeddings", "photos/01.png")
    assert predictor.is_image_set
