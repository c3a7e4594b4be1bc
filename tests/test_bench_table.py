"""How a benchmark's rows are shown and written; what was written can be read back whole."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from dataclasses import asdict

from rich.console import Console

from samopt.bench_table import Row, Setting, table, to_csv, to_dict

SETTING = Setting("vit_q", 3, "cuda", 5.96, 712.3, {"torch": "2.11.0", "gpu": "Some GPU, 80 GB"}, recipes=("quick",))
FAST = Row("fast", 8, 14.25, 0.015, 70.175, 12.625, 0.5872, 2.375, 1.09e-2, 5.5)
WITHOUT = Row("fast", 1, 15.5, 0.015, 64.5, 11.6, 0.54, 1.6, 1.09e-2, 5.5, remark="without Slow(), [not] faster")
FAILED = Row("peer", 16, note='RuntimeError: no kernel [image], "80" is no width', status="failed")
STEP = dataclasses.replace(FAST, what="+ a, b", adds=("a", "b"), ratio_before=1.5, whole_milliseconds=20.25)
MEASURED = dataclasses.replace(STEP, batch_size=2, mask_iou=0.98765, min_iou=0.9, miou=0.54321, remark="c dropped")
LEFT_OUT = Row("+ d", 8, status="left out", adds=("d",), remark="d dropped: mean mask IoU [0.9]")
ROWS = [FAST, FAILED, WITHOUT, STEP, MEASURED, LEFT_OUT]


def test_json_round_trip() -> None:
    read = json.loads(json.dumps(to_dict(SETTING, ROWS)))
    rows = read.pop("rows")
    assert [Row(**{**row, "adds": tuple(row["adds"])}) for row in rows] == ROWS
    assert Setting(**{**read, "recipes": tuple(read["recipes"])}) == SETTING


def test_csv_round_trip() -> None:
    records = list(csv.DictReader(io.StringIO(to_csv(SETTING, ROWS))))
    for record, row in zip(records, ROWS, strict=True):
        assert (record["what"], int(record["batch_size"])) == (row.what, row.batch_size)
        assert (record["note"], record["remark"]) == (row.note, row.remark)
        assert (record["status"], record["adds"]) == (row.status, "+".join(row.adds))
        words = ("what", "batch_size", "note", "remark", "status", "adds")
        figures = {name: value for name, value in asdict(row).items() if name not in words}
        assert {name: float(record[name]) if record[name] else None for name in figures} == figures
        assert (record["model"], int(record["seed"]), record["device"]) == ("vit_q", 3, "cuda")
        assert (float(record["image_tflop"]), float(record["matmul_tflops"])) == (5.96, 712.3)
        assert (record["torch_version"], record["gpu_version"]) == ("2.11.0", "Some GPU, 80 GB")


def test_the_table_shows_figures_and_what_failed() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(table(SETTING, [FAST, FAILED]))
    lines = console.export_text().splitlines()
    (fast,) = (line for line in lines if "fast" in line)
    for figure in ("8", "14.25", "1.5%", "70.2", "12.62x", "58.7%", "2.38", "1.09e-02", "5.5"):
        assert f" {figure} " in fast
    (failed,) = (line for line in lines if line.startswith("│ peer"))
    assert failed.count(" - ") == 8
    text = " ".join(" ".join(lines).split())
    assert f"peer, batch 16, failed: {FAILED.note}" in text
    assert text.count("failed:") == 1
    assert "vit_q, image encoder, seed 3, on cuda" in text
    assert "5.96 TFLOP an image; matmul rate 712 TFLOP/s torch 2.11.0, gpu Some GPU, 80 GB" in text


def test_a_row_that_is_not_all_it_says_has_a_remark_and_its_figures() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(table(SETTING, [WITHOUT]))
    text = " ".join(console.export_text().split())
    assert " 15.50 " in text
    assert "fast, batch 1: without Slow(), [not] faster" in text
    assert "failed" not in text


def shown(setting: Setting, rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(table(setting, rows))
    return console.export_text()


def test_a_waterfall_shows_what_was_measured_and_what_was_left_out_once() -> None:
    setting = dataclasses.replace(SETTING, bench="waterfall", masks="not measured, random weights")
    again = dataclasses.replace(LEFT_OUT, batch_size=2)
    text = shown(setting, [STEP, MEASURED, LEFT_OUT, again])
    assert "vit_q, waterfall of quick, seed 3, on cuda" in text
    for title in ("gain", "whole ms", "mask IoU", "true mIoU"):
        assert title in text
    (measured,) = (line for line in text.splitlines() if "0.9877" in line)
    for figure in ("1.50x", "20.25", "0.5432"):
        assert f" {figure} " in measured
    assert "+ d, batch 8 and 2, left out: d dropped: mean mask IoU [0.9]" in text
    assert "+ a, b, batch 2: c dropped" in text
    assert "masks: not measured, random weights" in text
    assert "matmul rate " in text
    assert "of matmul rate" not in text, "a terminal is narrow"


def test_columns_that_say_nothing_are_not_shown() -> None:
    text = shown(SETTING, [dataclasses.replace(FAST, peak_gib=0.0), FAILED])
    assert "of matmul rate" in text
    for title in ("peak GiB", "gain", "whole ms", "mask IoU", "true mIoU"):
        assert title not in text
