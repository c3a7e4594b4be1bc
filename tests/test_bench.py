"""What a benchmark's rows say; how fast anything is, is never asserted."""

from __future__ import annotations

import dataclasses

import pytest
import segment_anything
import torch
from segment_anything.modeling import Sam

import samopt.bench
from samopt.bench import bench_encoder, random_model, table, to_dict
from samopt.passes import CastDtype, SDPAttention
from samopt.recipe import Recipe
from tests.models import random_sam


def test_rows_hold_ratio_and_error_against_the_unmodified_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samopt.bench, "random_model", lambda model_type, seed: random_sam(img_size=64))
    recipe = Recipe.of([SDPAttention(), CastDtype()])
    rows = list(bench_encoder(["small"], recipe, [1, 3], torch.device("cpu")))
    assert [(row.what, row.batch_size) for row in rows] == [
        ("unmodified", 1),
        ("eager bfloat16", 1),
        ("recipe", 1),
        ("recipe", 3),
    ]
    unmodified, eager, *fast = rows
    assert unmodified.error == 0
    assert 1e-4 < eager.error < 1e-1
    for row in fast:
        assert 1e-4 < row.error < 2 * eager.error
        assert row.ratio * row.milliseconds == pytest.approx(unmodified.milliseconds)
    assert to_dict(rows)[0] == dataclasses.asdict(unmodified)
    assert table(rows, "title").row_count == len(rows)


def test_random_models_have_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(segment_anything.sam_model_registry, "small", lambda: random_sam(img_size=64))
    sam: Sam = random_model("small", seed=0)
    positions = [p for name, p in sam.image_encoder.named_parameters() if "rel_pos" in name or "pos_embed" in name]
    assert positions
    assert all(bool(position.abs().max() > 0) for position in positions)
