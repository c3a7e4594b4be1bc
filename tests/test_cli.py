"""The command line: what it prints and writes, and that a user's mistake is one line and exit code 2."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from segment_anything.modeling import Sam
from typer.testing import CliRunner, Result

import samopt.bench
import samopt.peers
import samopt.speed
import samopt.timing
import samopt.tiny
from samopt import bench_plan
from samopt.cli import app
from samopt.cli_common import write_json
from samopt.passes import PASSES
from samopt.recipe import Recipe, built_in
from samopt.timing import Encoder
from tests.benches import bench_small
from tests.instances import write_instances

EAGER = """
[[pass]]
name = "rel_pos"

[[pass]]
name = "sdpa"

[[pass]]
name = "dtype"
"""


@pytest.fixture
def run(tiny256: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in an empty folder, with the embedded model and its scenes at 256 px."""
    import copy

    import samopt.samples

    scenes = samopt.samples.scene_samples
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samopt.tiny, "load_tiny", lambda: copy.deepcopy(tiny256))
    monkeypatch.setattr(samopt.samples, "scene_samples", lambda count=4, size=256: scenes(1, 256))
    (tmp_path / "eager.toml").write_text(EAGER)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """The one line a refused command printed."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def test_demo_prints_a_report_and_writes_a_picture(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("demo", "--recipe", "eager.toml", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for shown in ("unmodified", "HoistRelPos", "SDPAttention", "CastDtype", "mask IoU", "true mIoU"):
        assert shown in result.output
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 1000


@pytest.mark.slow
def test_demo_takes_a_photo(run: Callable[..., Result], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    result = run("demo", "--recipe", "eager.toml", "--device", "cpu", "--image", "photo.png", "--out", "out.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").exists()


def test_optimize_writes_the_report_as_json(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("optimize", "--recipe", "eager.toml", "--device", "cpu", "--json", "report.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "report.json").read_text())
    assert [step["pass"].partition("(")[0] for step in written["steps"]] == ["HoistRelPos", "SDPAttention", "CastDtype"]
    assert written["steps"][0]["accuracy"]["equal"] is True
    assert 0.9 < written["steps"][-1]["accuracy"]["masks"]["mean_iou"] < 1


def test_profile_writes_traces_and_figures(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text('[[pass]]\nname = "rel_pos"\n')
    result = run("profile", "--recipe", "quick.toml", "--device", "cpu", "--out", "made/here", "--logs")
    assert result.exit_code == 0, result.output
    for shown in ("before ms", "after ms", "matmul", "ui.perfetto.dev", "0 compilations", "no memory figures"):
        assert shown in result.output
    names = sorted(path.name for path in (tmp_path / "made" / "here").iterdir())
    assert names == ["after.trace.json.gz", "before.trace.json.gz", "profile.json"]
    written = json.loads((tmp_path / "made" / "here" / "profile.json").read_text())
    assert (written["recipe"], written["before"]["name"], written["after"]["name"]) == ("quick", "before", "after")
    assert written["after"]["files"] == {"trace": str(Path("made/here/after.trace.json.gz"))}


@pytest.mark.parametrize("command", ["optimize", "verify"])
def test_the_batch_size_that_passes_are_kept_for(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "judged.toml").write_text(f'[[pass]]\nname = "linear_patch_embed"\n{EAGER}keep = "if-faster"\n')
    monkeypatch.setattr(samopt.speed, "median_seconds", lambda calls, device: [1.0] * len(calls))
    written_to = ("--json", "report.json") if command == "optimize" else ()
    result = run(command, "--recipe", "judged.toml", "--device", "cpu", "--batch-size", 3, *written_to)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "undone: not faster: encoder blocks: 2.67e+03 -> 2.67e+03 ms an image at batch 3" in told
    if command == "optimize":
        written = json.loads((tmp_path / "report.json").read_text())["steps"][-1]
        assert (written["status"], written["speed"]["batch_size"]) == ("undone", 3)


def test_optimize_measures_on_a_folder(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for index, scene in enumerate(samopt.samples.scene_samples(2, 256)):
        Image.fromarray(scene.image).save(tmp_path / "photos" / f"{index}.png")
    result = run("optimize", "--recipe", "eager.toml", "--device", "cpu", "--images", "photos", "--limit", "1")
    assert result.exit_code == 0, result.output
    assert "true mIoU" not in result.output


def test_verify_measures_on_coco_instances(run: Callable[..., Result], tmp_path: Path) -> None:
    (scene,) = samopt.samples.scene_samples()
    assert scene.masks is not None
    write_instances(tmp_path, [scene.image], [[*scene.masks]])
    result = run("verify", "--recipe", "eager.toml", "--device", "cpu", "--coco", "instances.json", "--images", ".")
    assert result.exit_code == 0, result.output
    assert "ground-truth mIoU 0.8" in result.output


def test_verify_prints_every_kind_of_prompt(run: Callable[..., Result]) -> None:
    result = run("verify", "--recipe", "eager.toml", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for kind in samopt.prompts.KINDS:
        assert kind in result.output


def test_verify_tells_what_was_skipped(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["samopt.passes.compile"], "_cpp_compiler", lambda: None)
    (tmp_path / "optional.toml").write_text(f'{EAGER}\n[[pass]]\nname = "compile"\nrequired = false\n')
    result = run("verify", "--recipe", "optional.toml", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "found no C++ compiler" in result.output
    assert "within the budget" in result.output


def test_verify_over_budget_is_exit_code_1(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "strict.toml").write_text(f"[accuracy]\nmin_iou = 1.0\n{EAGER}")
    result = run("verify", "--recipe", "strict.toml", "--device", "cpu")
    assert result.exit_code == 1
    assert "minimum mask IoU" in result.stderr
    assert "refused" in result.output  # the table up to there


def test_optimize_over_budget_still_writes_the_report(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "strict.toml").write_text(f"[accuracy]\nmin_iou = 1.0\n{EAGER}")
    refused = run("optimize", "--recipe", "strict.toml", "--device", "cpu", "--json", "report.json", "--out", "model")
    assert refused.exit_code == 1
    written = json.loads((tmp_path / "report.json").read_text())
    assert [step["status"] for step in written["steps"]] == ["applied", "applied", "refused"]
    assert not (tmp_path / "model").exists()


def test_a_saved_model_loads_and_is_a_recipe(run: Callable[..., Result], tmp_path: Path) -> None:
    saved = run("optimize", "--recipe", "eager.toml", "--device", "cpu", "--out", "model")
    assert saved.exit_code == 0, saved.output
    assert "model: the model, 0.0" in saved.output
    loaded = run("load", "model", "--verify")
    assert loaded.exit_code == 0, loaded.output
    assert "CastDtype" in loaded.output
    assert "verified: its answers are those it gave when it was saved, bit for bit" in loaded.output
    again = run("optimize", "--recipe", "model", "--device", "cpu", "--out", "model")
    assert again.exit_code == 0, again.output
    assert Recipe.of(tmp_path / "model").steps == Recipe.of(tmp_path / "eager.toml").steps


@pytest.mark.slow
def test_export_takes_a_saved_model(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def export(model: Any, folder: Path, batch_sizes: list[int]) -> None:
        asked.extend((samopt.report(model).recipe, batch_sizes))
        folder.mkdir()

    monkeypatch.setattr(sys.modules["samopt.export"], "export", export)  # tests/test_export.py exports
    assert run("optimize", "--recipe", "eager.toml", "--device", "cpu", "--out", "model").exit_code == 0
    result = run("export", "model", "exported", "--batch-size", 4, "--batch-size", 1)
    assert result.exit_code == 0, result.output
    assert asked == ["eager", [1, 4]]
    assert "exported: the exported model, 0.000 GB" in result.output


def test_passes_lists_every_pass(run: Callable[..., Result]) -> None:
    result = run("passes")
    assert result.exit_code == 0
    for name in PASSES:
        assert name in result.output


def test_recipes_lists_and_prints(run: Callable[..., Result], tmp_path: Path) -> None:
    listed = run("recipes")
    for name in built_in():
        assert name in listed.output
        printed = run("recipes", name)
        (tmp_path / "copy.toml").write_text(printed.output)
        assert Recipe.of(tmp_path / "copy.toml").steps == Recipe.of(name).steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(run: Callable[..., Result], tmp_path: Path) -> None:
    assert "device 'cuda' cannot be used here" in refused(run("demo", "--device", "cuda"))
    assert not (tmp_path / "demo.png").exists()


BENCH = ("bench", "encoder", "--model-type", "vit_b", "--device", "cpu", "--recipe", "eager.toml")


def test_bench_writes_what_it_shows(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_small(monkeypatch)
    (tmp_path / "other.toml").write_text(EAGER)
    sizes = ("--batch-size", 1, "--batch-size", 2)
    result = run(*BENCH, "--recipe", "other.toml", *sizes, "--seed", 7, "--json", "rows.json", "--csv", "rows.csv")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "rows.json").read_text())
    assert (written["model"], written["seed"], written["device"]) == ("vit_b", 7, "cpu")
    assert written["versions"]["torch"] == str(torch.__version__)
    halves = [("eager bfloat16", 1), ("eager bfloat16", 2)]
    recipes = [(name, size) for name in ("eager", "other") for size in (1, 2)]
    assert [(row["what"], row["batch_size"]) for row in written["rows"]] == [("unmodified", 1), *halves, *recipes]
    with (tmp_path / "rows.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [float(record["milliseconds"]) for record in records] == [row["milliseconds"] for row in written["rows"]]
    assert {record["seed"] for record in records} == {"7"}
    assert f"{written['rows'][-1]['milliseconds']:.2f}" in result.output


def test_bench_with_a_peer_that_fails_is_exit_code_1(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def fail(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        raise RuntimeError("no kernel for this chip\nin detail")
        yield

    @contextlib.contextmanager
    def stand_in(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        yield sam.image_encoder

    bench_small(monkeypatch)
    for name, build in (("broken", fail), ("sound", stand_in)):
        monkeypatch.setitem(samopt.peers.PEERS, name, samopt.peers.Peer(name, "torch", build))
    result = run(
        *BENCH, "--batch-size", 1, "--peer", "broken", "--peer", "sound", "--peer-batch-size", 2, "--json", "rows.json"
    )
    assert result.exit_code == 1
    assert "broken, batch 2, failed: RuntimeError: no kernel for this chip" in result.output
    *_, broken, sound = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (broken["what"], broken["note"]) == ("broken", "RuntimeError: no kernel for this chip")
    assert broken["milliseconds"] is None
    assert (sound["what"], sound["batch_size"], sound["note"]) == ("sound", 2, "")


def test_bench_misses_a_peer_before_anything_is_timed(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was timed")

    for module, name in ((samopt.bench, "timed"), (samopt.bench, "matmul_tflops"), (bench_plan, "verified")):
        monkeypatch.setattr(module, name, refuse)
    peer = samopt.peers.Peer("absent", "a_package_that_is_absent", samopt.peers.PEERS["transformers"].build)
    monkeypatch.setitem(samopt.peers.PEERS, "absent", peer)
    line = refused(run(*BENCH, "--peer", "absent", "--json", "rows.json"))
    assert "peer absent cannot be imported (ModuleNotFoundError: No module named 'a_package_that_is_absent')" in line
    assert not (tmp_path / "rows.json").exists()


TWO = ("bench", "waterfall", "--model-type", "vit_b", "--model-type", "vit_l")
WATERFALL = ("bench", "waterfall", "--device", "cpu", "--recipe", "steps.toml", "--json", "rows.json")
STEPS = """
[accuracy]
embedding_error = 0.5

[[pass]]
name = "rel_pos"

[[pass]]
name = "sdpa"

[bench]
rows = [["sdpa"], ["rel_pos"]]
"""


def test_a_waterfall_of_the_embedded_model_has_speed_and_accuracy(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samopt.timing, "CPU_PRODUCT", 64)
    monkeypatch.setattr(samopt.timing, "REPEATS", 3)
    monkeypatch.setattr(sys, "argv", ["samopt", *WATERFALL])
    (tmp_path / "steps.toml").write_text('[[pass]]\nname = "sdpa"\n[[pass]]\nname = "triton_attention"\n')
    result = run(*WATERFALL, "--batch-size", 1, "--csv", "rows.csv")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "rows.json").read_text())
    assert (written["bench"], written["model"], written["recipes"]) == ("waterfall", "sam_tiny", ["steps"])
    assert written["command"] == " ".join(("samopt", *WATERFALL))
    assert [row["what"] for row in written["rows"]] == ["unmodified", "+ sdpa", "+ triton_attention"]
    *timed, left_out = written["rows"]
    assert left_out["status"] == "left out"
    assert left_out["remark"].startswith("triton_attention skipped: Triton kernels need a GPU")
    for row in timed:
        assert row["status"] == "timed"
        assert row["whole_milliseconds"] > row["milliseconds"] / 2
        assert 0.9 < row["mask_iou"] <= 1
        assert row["miou"] > 0.5
    assert "true mIoU" in result.output
    assert "about" in result.output
    assert (tmp_path / "rows.csv").read_text().count("\n") == 4


@pytest.mark.slow
def test_a_waterfall_of_random_weights_says_why_accuracy_is_missing(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_small(monkeypatch)
    (tmp_path / "steps.toml").write_text(STEPS)
    result = run(*WATERFALL, "--model-type", "vit_b", "--batch-size", 1, "--batch-size", 2, "--each")
    assert result.exit_code == 0, result.output
    assert "masks: not measured, random weights" in result.output
    assert "true mIoU" not in result.output
    rows = [(row["what"], row["batch_size"]) for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    steps = [(what, size) for size in (1, 2) for what in ("+ sdpa", "+ rel_pos")]
    assert rows == [("unmodified", 1), *steps, ("rel_pos alone", 1), ("sdpa alone", 1)]


def test_a_waterfall_on_coco_instances(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samopt.timing, "CPU_PRODUCT", 64)
    monkeypatch.setattr(samopt.timing, "REPEATS", 3)
    (scene,) = samopt.samples.scene_samples()
    assert scene.masks is not None
    write_instances(tmp_path, [scene.image], [[*scene.masks]])
    (tmp_path / "steps.toml").write_text('[[pass]]\nname = "sdpa"\n')
    result = run(*WATERFALL, "--batch-size", 1, "--coco", "instances.json", "--images", ".")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["masks"].startswith(f"{len(scene.masks)} on 1 pictures")
    assert written["pictures"] == "1: 0.png"


def test_ctrl_c_leaves_the_rows_that_are_done(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_small(monkeypatch)
    (tmp_path / "steps.toml").write_text(STEPS)
    timed, calls = samopt.timing.timed, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(samopt.bench, "timed", interrupted)
    result = run(*WATERFALL, "--model-type", "vit_b", "--batch-size", 1)
    assert result.exit_code == 130
    assert "stopped: 2 of 3 rows are done, and in rows.json" in result.output
    assert [row["what"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["unmodified", "+ sdpa"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eager.toml", "rows.json", "steps.toml"]
    calls[:] = [(), ()]
    result = run(*WATERFALL, "--model-type", "vit_b", "--batch-size", 1)
    assert result.exit_code == 130
    assert "stopped: 0 of 3 rows are done\n" in result.output


def test_compare_runs(run: Callable[..., Result], tmp_path: Path) -> None:
    def write(name: str, milliseconds: float, seed: int = 0) -> None:
        rows = [{"what": "fast", "batch_size": 8, "milliseconds": milliseconds}]
        (tmp_path / name).write_text(json.dumps({"model": "vit_b", "seed": seed, "rows": rows}))

    write("a.json", 10.0)
    write("b.json", 10.2, seed=1)
    write("c.json", 11.0)
    result = run("bench", "compare", "a.json", "b.json")
    assert result.exit_code == 0, result.output
    assert "warning: seed differs: 0 and 1" in result.output
    assert "0 of 1 rows differ by more than 3 %" in result.output
    result = run("bench", "compare", "a.json", "c.json")
    assert result.exit_code == 1
    assert "1 of 1 rows differ by more than 3 %" in result.output
    assert run("bench", "compare", "a.json", "c.json", "--threshold", "12").exit_code == 0


def test_what_is_written_replaces_a_file_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    write_json(path, {"rows": 1})

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"rows": 2})
    assert json.loads(path.read_text()) == {"rows": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optimize", "--recipe", "fastest"), "unknown recipe 'fastest'; built in: blog, exact, fast, max"),
        (("optimize", "--recipe", "none.toml"), "none.toml: cannot read this recipe file"),
        (("optimize", "--recipe", "broken.toml"), "broken.toml, entry 2 (dtype): unknown key 'dtpye'"),
        (("optimize", "--recipe", "unordered.toml"), "entry 2"),
        (("optimize", "--checkpoint", "none.pth", "--model-type", "vit_b"), "none.pth: there is no such checkpoint"),
        (("optimize", "--checkpoint", "eager.toml", "--model-type", "vit_b"), "not a PyTorch checkpoint of tensors"),
        (("optimize", "--checkpoint", "eager.toml", "--model-type", "vit_q"), "unknown model type 'vit_q'"),
        (("optimize", "--model-type", "vit_b"), "--model-type vit_b needs --checkpoint"),
        (("optimize", "--json", "/proc/report.json"), "/proc/report.json: cannot be written"),
        (("optimize", "--out", "no/model"), "no/model: there is no folder no"),
        (("optimize", "--out", "unreadable"), "unreadable holds 'photo.png' and no saved model"),
        (("optimize", "--recipe", "empty"), "empty: no saved model: it has no samopt.json"),
        (("export", "nowhere", "out"), "nowhere: there is no such folder"),
        (("load", "nowhere"), "nowhere: there is no such folder"),
        (("optimize", "--images", "nowhere"), "nowhere: there is no such folder"),
        (("optimize", "--images", "empty"), "empty: no image in this folder"),
        (("optimize", "--images", "unreadable"), "photo.png: not a readable image"),
        (("optimize", "--coco", "eager.toml"), "--coco needs --images"),
        (("verify", "--coco", "eager.toml", "--images", "empty"), "eager.toml: not a file of COCO annotations"),
        (("optimize", "--json", "no/report.json"), "there is no folder no"),
        (("optimize", "--device", "tpu9"), "device 'tpu9' cannot be used here"),
        (("demo", "--image", "none.png"), "none.png: there is no such image file"),
        (("demo", "--out", "empty"), "empty is a folder"),
        (("profile", "--out", "broken.toml"), "broken.toml: no folder can be made there"),
        (("profile", "--out", "new", "--recipe", "fastest"), "unknown recipe 'fastest'"),
        (("profile", "--out", "new", "--checkpoint", "none.pth"), "none.pth: "),
        (("recipes", "fastest"), "unknown recipe 'fastest'"),
        (("verify", "--recipe", "fastest"), "unknown recipe 'fastest'"),
        (("bench", "encoder", "--model-type", "vit_q"), "unknown model type 'vit_q'"),
        (("bench", "encoder", "--model-type", "vit_b", "--model-type", "vit_q"), "unknown model type 'vit_q'"),
        ((*TWO, "--checkpoint", "none.pth"), "a checkpoint is of one model: give --model-type once"),
        ((*TWO, "--json", "no/rows.json"), "no/rows-vit_b.json: there is no folder no"),
        (("bench", "encoder", "--model-type", "vit_b", "--peer", "rival"), "unknown peer 'rival'; known: segment_any"),
        (("bench", "encoder", "--model-type", "vit_b", "--peer-batch-size", "2"), "--peer-batch-size needs --peer"),
        (("bench", "encoder", "--model-type", "vit_b", "--csv", "no/rows.csv"), "there is no folder no"),
        (("bench", "waterfall", "--model-type", "vit_q"), "unknown model type 'vit_q'"),
        (("bench", "waterfall", "--json", "no/rows.json"), "there is no folder no"),
        (("bench", "waterfall", "--coco", "eager.toml"), "--coco needs --images"),
        (("bench", "waterfall", "--checkpoint", "none.pth"), "none.pth: there is no such checkpoint"),
        (("bench", "compare", "eager.toml", "eager.toml"), "eager.toml: not JSON"),
    ],
)
def test_mistakes(run: Callable[..., Result], tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "photo.png").write_bytes(b"\x89PNG and then nothing")
    (tmp_path / "broken.toml").write_text('[[pass]]\nname = "sdpa"\n[[pass]]\nname = "dtype"\ndtpye = "float16"\n')
    (tmp_path / "unordered.toml").write_text('[[pass]]\nname = "compile"\n[[pass]]\nname = "dtype"\n')
    before = sorted(tmp_path.rglob("*"))
    assert message in refused(run(*arguments))
    assert sorted(tmp_path.rglob("*")) == before
