"""The README's code is run as it stands there, on a small Sam."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

import samopt
import samopt.profiling.profiler
from samopt.bench_table import to_dict
from samopt.passes import SDPAttention
from tests.made_up_results import COMPARISON, ROWS, SETTING
from tests.models import random_sam

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str, mark: str) -> str:
    """The one code block of a language that holds `mark`."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if mark in text)
    return found


@pytest.fixture
def names(sam: Sam, pictures: list[samopt.Sample], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets take for granted; drawn scenes are small ones."""
    monkeypatch.setattr(sys.modules["samopt.verify"], "scene_samples", lambda: pictures)
    labels = np.zeros((64, 64), int)
    labels[8:24, 8:24], labels[30:60, 30:50] = 1, 7
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return {"samopt": samopt, "sam": sam, "np": np, "SDPAttention": SDPAttention, "labels": labels, "image": image}


def test_one_pass_at_a_time(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "result.undo()"), names)
    assert "embedding error" in capsys.readouterr().out


def test_a_pass_of_your_own(names: dict[str, Any]) -> None:
    exec(block("python", "class TanhGELU"), names)
    assert [step.status for step in samopt.report(names["fast"]).steps] == ["applied", "applied"]


def test_every_mask_of_an_image(names: dict[str, Any]) -> None:
    names["fast"] = names["sam"]
    exec(block("python", "generate_batch"), names)
    assert isinstance(names["records"], list)
    assert len(names["per_image"]) == 2


def test_a_worker(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samopt.save(samopt.optimize(names["sam"], [SDPAttention()], verify="off"), tmp_path / "fast_sam")
    Image.fromarray(names["image"]).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a.png 30 20\nmissing.png 1 2\na.png 5.5 6\n"))
    worker = block("python", "sys.stdin")
    exec(worker, {})
    told = capsys.readouterr()
    assert told.out == "a.png.mask.png\n" * 2
    assert "missing.png: " in told.err
    with Image.open("a.png.mask.png") as mask:
        assert (mask.size, mask.mode) == ((64, 64), "1")
    assert len([line for line in worker.splitlines() if line]) <= 20


def test_an_exported_model(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(samopt, "load_exported", loaded.append)  # tests/test_export.py loads one
    exec(block("python", "load_exported"), names)
    assert loaded == ["exported_sam"]


def test_many_pictures_and_prompts(names: dict[str, Any]) -> None:
    names["fast"] = names["sam"]
    exec(block("python", "BatchPredictor"), names)
    assert [len(answer.masks) for answer in names["answers"]] == [2, 0, 2]
    names["predictor"].set_embeddings(names["kept"][2:])
    assert names["predictor"].predict([names["again"]])[0].masks.shape == (1, 3, 64, 64)


def test_folders_of_images(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Image.fromarray(names["image"]).save("photos/a.jpg")
    Path("quick.toml").write_text('[accuracy]\nmasks = false\n[[pass]]\nname = "rel_pos"\n')
    snippet = block("python", "samopt.segment").replace('"fast"', '"quick.toml"')
    exec(snippet, {**names, "SamPredictor": SamPredictor})
    assert json.loads(Path("masks/summary.json").read_text())["done"] == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
def test_where_the_time_goes(
    names: dict[str, Any],
    pictures: list[samopt.Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samopt.profiling.profiler, "scene_samples", lambda count: pictures[:count])
    exec(block("python", "import profiling"), names)
    groups, *syncs = capsys.readouterr().out.splitlines()
    assert "matmul" in groups
    assert "4 segment_anything/modeling/image_encoder.py" in syncs[0]
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["model.trace.json.gz"]


def test_charts_and_a_report(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "vit_b.json").write_text(json.dumps(to_dict(SETTING, ROWS)))
    monkeypatch.setattr(samopt.profiling, "compare", lambda sam, recipe: COMPARISON)
    exec(block("python", "import charts"), {**names, "profiling": samopt.profiling})
    assert {"report.html", "kernels.svg", "kernels.png"} <= {path.name for path in (tmp_path / "report").iterdir()}


def test_the_notebooks_are_there() -> None:
    links = re.findall(r"\]\((notebooks/[^)]*)\)", README)
    assert len(links) == 5
    assert all((Path(__file__).parents[1] / link).is_file() for link in links)


def test_ground_truth_from_a_label_map(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(samopt, "optimize", lambda sam, **arguments: seen.update(arguments))
    exec(block("python", "label map").replace("labels = ...", "labels = labels"), names)
    (sample,) = seen["samples"]
    assert sample.masks.sum(axis=(1, 2)).tolist() == [16 * 16, 30 * 20]


def test_the_recipe_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(block("toml", "[accuracy]"))
    model = samopt.optimize(random_sam(), tmp_path / "mine.toml", verify="off")
    assert [step.name.partition("(")[0] for step in samopt.report(model).steps] == [
        "SDPAttention",
        "CastDtype",
        "Compile",
    ]
