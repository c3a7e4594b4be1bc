"""segment: every image once, a run that goes on where another ended, and settings that do not mix."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

import samopt
from samopt import InvalidInput
from samopt.folders.inputs import list_images
from samopt.folders.records import printable
from samopt.folders.run import segment
from samopt.passes import HoistRelPos, SDPAttention
from tests.folders.images import OPTIONS, mixed_folder, plain_folder, processes, segment_in_process, shards_of
from tests.models import random_sam


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / "shards").to_pylist()
    return found


def test_every_good_image_is_there_once_and_every_bad_one_with_a_reason(sam: Sam, tmp_path: Path) -> None:
    made = mixed_folder(tmp_path / "in")
    summary = segment(sam, tmp_path / "in", tmp_path / "out", generator=OPTIONS, batch_size=4, shard_size=7)
    reasons = {printable(path): reason for path, reason in made.items()}
    bad = {path for path, reason in reasons.items() if reason}
    found = rows(tmp_path / "out")
    assert sorted(row["image"] for row in found) == sorted(reasons)
    assert [row["index"] for row in found] == list(range(40))
    assert {row["image"] for row in found if row["error"]} == bad
    for row in found:
        assert reasons[row["image"]] in (row["error"] or "")
        assert (row["masks"] is None) is bool(row["error"])
    assert (summary.done, summary.failed, summary.skipped, summary.left) == (40 - len(bad), len(bad), 0, 0)
    assert {image for image, _ in summary.failures} == bad
    assert summary.exit_code == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["failed"] == len(bad)


def test_masks_are_those_of_the_generator(sam: Sam, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "in", 5)
    segment(sam, folder, tmp_path / "out", generator=OPTIONS, batch_size=3, shard_size=4)
    for row in rows(tmp_path / "out"):
        pixels = np.array(Image.open(row["image"]).convert("RGB"))
        generator = samopt.AutomaticMaskGenerator(sam, **OPTIONS, output_mode="coco_rle")
        expected = generator.generate(pixels)
        assert (row["height"], row["width"]) == pixels.shape[:2]
        assert len(row["masks"]) == len(expected) > 0
        for mask, record in zip(row["masks"], expected, strict=True):
            assert mask["segmentation"] == record["segmentation"]
            assert mask["predicted_iou"] == pytest.approx(record["predicted_iou"], abs=1e-4)
            assert {name: mask[name] for name in ("area", "bbox", "point_coords", "crop_box")} == {
                name: record[name] for name in ("area", "bbox", "point_coords", "crop_box")
            }


@pytest.mark.parametrize("multimask", [None, False])
def test_masks_are_those_that_sam_predictor_answers_to_prompts(
    tiny256: Sam, tmp_path: Path, multimask: bool | None
) -> None:
    folder = plain_folder(tmp_path / "in", 3)
    asked: list[dict[str, Any]] = [
        {"image": "00.png", "box": [4, 4, 30, 30], "id": "a box"},
        {"image": "00.png", "points": [[20, 20]], "id": 7},
        {"image": "in/02.png", "points": [[20, 20], [1, 1]], "labels": [1, 0]},
        {"image": "in/02.png", "box": [0, 0, 20, 20], "points": [[9, 9]]},
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    segment(tiny256, folder, tmp_path / "out", prompts=tmp_path / "prompts.json", multimask=multimask, batch_size=4)
    first, second, third = rows(tmp_path / "out")
    assert [mask["prompt_id"] for mask in first["masks"]] == ["a box", "7"]
    assert second["masks"] == []
    assert [mask["point_coords"] for mask in third["masks"]] == [[[20, 20], [1, 1]], [[9, 9]]]
    predictor = SamPredictor(tiny256)
    for row, prompts in ((first, asked[:2]), (third, asked[2:])):
        predictor.set_image(np.asarray(Image.open(row["image"]).convert("RGB")))
        for mask, prompt in zip(row["masks"], prompts, strict=True):
            several = multimask is None and "box" not in prompt and len(prompt["points"]) == 1
            points = np.array(prompt["points"]) if "points" in prompt else None
            labels = None if points is None else np.array(prompt.get("labels", [1] * len(points)))
            box = np.array(prompt["box"]) if "box" in prompt else None
            masks, iou, _ = predictor.predict(points, labels, box, multimask_output=several)
            decoded = coco_mask.decode(mask["segmentation"]).astype(bool)
            assert (decoded != masks[iou.argmax()]).mean() < 1e-3
            assert mask["predicted_iou"] == pytest.approx(float(iou.max()), abs=1e-3)
            assert mask["area"] == decoded.sum()


def test_a_run_killed_at_any_time_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 40), tmp_path / "out"
    segment(random_sam(), folder, tmp_path / "whole", generator=OPTIONS, batch_size=2, shard_size=2)
    whole = shards_of(tmp_path / "whole")
    context, chance = processes(), random.Random(0)
    for _ in range(10):
        there = len(shards_of(out)) if out.exists() else 0
        wanted = there + chance.randint(0, 2)
        process = context.Process(target=segment_in_process, args=(str(folder), str(out), 2))
        process.start()
        while process.is_alive() and (not (out / "shards").exists() or len(shards_of(out)) < wanted):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        found = shards_of(out) if (out / "shards").exists() else {}
        assert found.items() <= whole.items(), "what is there is complete"
    assert len(found) < len(whole)
    summary = segment(random_sam(), folder, out, generator=OPTIONS, batch_size=2)
    assert shards_of(out) == whole
    assert summary.exit_code == 0
    assert not list(out.rglob("*.part"))


def test_a_signal_ends_a_run_after_the_shard_at_hand(tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 40), tmp_path / "out"
    process = processes().Process(target=segment_in_process, args=(str(folder), str(out), 2))
    process.start()
    while process.is_alive() and not (out / "shards").exists():
        time.sleep(0.002)
    while process.is_alive() and not shards_of(out):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    left = json.loads((out / "summary.json").read_text())["left"]
    assert left == 40 - 2 * len(shards_of(out)) > 0
    summary = segment(random_sam(), folder, out, generator=OPTIONS, batch_size=2)
    assert (summary.done, summary.skipped, summary.left) == (left, 40 - left, 0)


def test_what_is_done_is_not_done_again_and_new_images_are_added(sam: Sam, tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 3), tmp_path / "out"
    segment(sam, folder, out, generator=OPTIONS, shard_size=2)
    before = shards_of(out)
    (folder / "00.png").rename(tmp_path / "moved.png")
    Image.open(tmp_path / "moved.png").save(folder / "00a.png")
    summary = segment(sam, [folder], out, generator=OPTIONS)
    assert (summary.done, summary.skipped) == (1, 3)
    assert before.items() < shards_of(out).items()
    assert [Path(row["image"]).name for row in rows(out)] == ["00.png", "01.png", "02.png", "00a.png"]
    again = segment(sam, folder, out, generator=OPTIONS)
    assert (again.done, again.failed, again.skipped, again.exit_code) == (0, 0, 4, 0)


def test_other_settings_are_refused_and_nothing_is_changed(sam: Sam, tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 2), tmp_path / "out"
    segment(sam, folder, out, generator=OPTIONS, shard_size=2)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = {**OPTIONS, "points_per_side": 3}
    with pytest.raises(InvalidInput, match=r"out was made with points_per_side 2, and this run has 3: name another"):
        segment(sam, folder, out, generator=other)
    with pytest.raises(InvalidInput, match="was made with model"):
        segment(random_sam(seed=1), folder, out, generator=OPTIONS)
    with pytest.raises(InvalidInput, match="was made with recipe"):
        segment(sam, folder, out, generator=OPTIONS, recipe="exact")
    with pytest.raises(InvalidInput, match="was made with shard_size 2, and this run has 5"):
        segment(sam, folder, out, generator=OPTIONS, shard_size=5)
    with pytest.raises(InvalidInput, match=r'was made with task "segment", and this run has "embed"'):
        samopt.embed(sam, folder, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_prompts_reach_images_that_an_earlier_run_left(sam: Sam, tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 4), tmp_path / "out"
    asked = [{"image": f"{index:02d}.png", "box": [3, 3, 30, 30]} for index in range(4)]
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    arguments: dict[str, Any] = {"prompts": tmp_path / "prompts.json", "shard_size": 2}
    segment(sam, folder, out, **arguments)
    (out / "shards" / "000001.parquet").unlink()
    segment(sam, folder / "00.png", out, **arguments)
    assert [len(row["masks"]) for row in rows(out)] == [1] * 4


def test_passes_chosen_by_hand_are_held_to_those_of_the_folder(sam: Sam, tmp_path: Path) -> None:
    folder, out = plain_folder(tmp_path / "in", 2), tmp_path / "out"
    recipe = samopt.Recipe([samopt.Step(HoistRelPos()), samopt.Step(SDPAttention(), required=False)])
    fast = samopt.optimize(sam, recipe, verify="off")
    segment(fast, folder, out, generator=OPTIONS)
    other = samopt.optimize(sam, recipe, verify="off")
    report = samopt.report(other)
    vars(other)["_samopt_report"] = dataclasses.replace(report, steps=report.steps[:1])
    with pytest.raises(InvalidInput, match=r"was made with passes .*SDPAttention"):
        segment(other, folder, out, generator=OPTIONS)


def test_a_folder_with_other_things_and_one_in_use_are_refused(sam: Sam, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "in", 1)
    with pytest.raises(InvalidInput, match="holds other things than samopt's results"):
        segment(sam, folder, folder, generator=OPTIONS)
    assert [path.name for path in folder.iterdir()] == ["00.png"]
    from samopt.folders.job import locked

    with locked(tmp_path / "out"), pytest.raises(InvalidInput, match="another run is writing there"):
        segment(sam, folder, tmp_path / "out", generator=OPTIONS)


def test_a_recipe_is_decided_once(
    sam: Sam, pictures: list[samopt.Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = plain_folder(tmp_path / "in", 4), tmp_path / "out"
    recipe = samopt.Recipe([samopt.Step(HoistRelPos()), samopt.Step(SDPAttention(), keep="if-faster")])
    monkeypatch.setattr("samopt.speed.median_seconds", lambda calls, device: [1.0] * len(calls))
    arguments: dict[str, Any] = {"generator": OPTIONS, "recipe": recipe, "samples": pictures, "shard_size": 2}
    segment(sam, folder, out, **arguments)
    assert json.loads((out / "job.json").read_text())["passes"] == ["HoistRelPos()"]
    whole = shards_of(out)
    (out / "shards" / "000001.parquet").unlink()
    monkeypatch.setattr("samopt.speed.median_seconds", lambda calls, device: [1.0, 0.1])
    summary = segment(sam, folder, out, **arguments)
    assert (summary.done, summary.skipped) == (2, 2)
    assert shards_of(out) == whole


def test_mistakes_are_told_before_any_work(sam: Sam, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "in", 1)
    for arguments, message in [
        ({"generator": {"points": 3}}, "unknown options of the generator: points"),
        ({"generator": {"points_per_side": 0}}, "points_per_side is 0"),
        ({"multimask": True}, "multimask is for prompts"),
        ({"prompts": "none.json"}, "none.json: the prompts cannot be read"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"engine": "cloud"}, "engine is 'cloud'"),
        ({"address": "here"}, "needs the engine ray"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            segment(sam, folder, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no such file or folder"):
        segment(sam, tmp_path / "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_inside_of_the_images_folder_are_no_images(sam: Sam, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "in", 2)
    segment(sam, folder, folder / "out", generator=OPTIONS, label_maps=True, overlays=True)
    assert len(list_images([folder], leave_out=folder / "out")) == 2
    assert segment(sam, folder, folder / "out", generator=OPTIONS).skipped == 2
