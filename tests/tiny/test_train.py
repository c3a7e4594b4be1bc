"""Training: its arithmetic is Meta's, prompts are what SAM would see, and pieces go on where they stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samopt.tiny.forward import ABSENT, CORNER_LOW, NEGATIVE, PAD, POSITIVE, Plan
from samopt.tiny.layout import sample_layout
from samopt.tiny.losses import mask_losses
from samopt.tiny.model import RECORD, WEIGHTS, load_weights
from samopt.tiny.plans import error_of
from samopt.tiny.prompts import CELL, PROMPTS, TOKENS, Targets, find_targets, refine_prompts, sample_prompts
from samopt.tiny.raster import draw_batch
from samopt.tiny.schedule import batch_for, learning_rate, size_shares, step_kind
from samopt.tiny.step import forward_error
from samopt.tiny.train import main

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--sizes", "128,64", "--batch", "1", "--scenes", "1", "--total-minutes", "60"]


@pytest.fixture(autouse=True)
def _keep_matmul_precision() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def targets() -> Targets:
    layout = sample_layout(torch.Generator().manual_seed(5), 6)
    return find_targets(draw_batch(layout, 256)[1], layout, torch.float32)


def test_forward_is_metas() -> None:
    assert forward_error(CPU, 128) < 1e-5


@pytest.mark.parametrize("plan", [Plan(), Plan(pad=True), Plan(fold=False)])
def test_every_way_to_compute_attention_is_right(plan: Plan) -> None:
    assert error_of(plan, 14, CPU, torch.float32) < 1e-5


def test_targets_are_shares_of_cells_and_wholes_include_parts(targets: Targets) -> None:
    assert torch.equal((targets.own * CELL**2).round(), targets.own * CELL**2)
    assert float(targets.own.sum(1).max()) <= 1
    batch, count = targets.parent.shape
    for image in range(batch):
        for index in range(count):
            parts = [part for part in range(count) if targets.parent[image, part] == index]
            expected = targets.own_share[image, [index, *parts]].sum()
            assert torch.isclose(targets.share[image, index], expected)


def test_prompts_lie_where_their_labels_say(targets: Targets) -> None:
    prompts = sample_prompts(targets, torch.Generator().manual_seed(0))
    cells = (prompts.coords / CELL).long().clamp(max=63)
    assert prompts.labels.shape == (6 * PROMPTS, TOKENS)
    for index in range(len(prompts.labels)):
        target = prompts.target[index]
        labels = prompts.labels[index]
        at = target[cells[index, :, 1], cells[index, :, 0]]
        assert bool((at[labels == POSITIVE] > 0).all())
        assert bool((at[labels == NEGATIVE] == 0).all())
        boxed = bool((labels == CORNER_LOW).any())
        assert boxed != bool((labels == PAD).any())
    kinds = prompts.labels.view(6, PROMPTS, TOKENS)
    assert bool(((kinds[:, 0] == POSITIVE).sum(-1) == 1).all())
    assert bool(((kinds[:, 2] != ABSENT).sum(-1) == 2).all())


def test_refined_prompts_correct_errors(targets: Targets) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = sample_prompts(targets, generator)
    logits = torch.full((len(prompts.labels), 4, 64, 64), -1.0)
    refined, masks = refine_prompts(prompts, logits, torch.zeros(len(logits), 4), generator)
    assert masks.shape == (len(logits), 64, 64)
    corrected = refined.labels[:, -1] != ABSENT
    assert bool(corrected.any())
    # Everything was missed, so each correction is positive and on the object.
    assert bool((refined.labels[corrected, -1] == POSITIVE).all())
    alone = (refined.labels == ABSENT).all(1)
    assert 0 < int(alone.sum()) < len(alone)


def test_losses_know_a_perfect_mask() -> None:
    target = torch.zeros(2, 32, 32)
    target[:, 8:20, 4:28] = 1
    right = (target[:, None] - 0.5) * 40
    cost, iou = mask_losses(torch.cat([right, -right], dim=1), target, torch.tensor(0.1))
    assert torch.allclose(iou, torch.tensor([[1.0, 0.0]] * 2))
    assert float(cost[:, 0].max()) < 1e-3 < 1 < float(cost[:, 1].min())


def test_schedule() -> None:
    sizes = (1024, 512, 256)
    assert 1024 not in size_shares(sizes, 0.1)
    assert size_shares(sizes, 0.9)[1024] == 0.65
    assert size_shares((256,), 0.0) == {256: 1.0}
    assert step_kind(0, 17, sizes, 0.5) == step_kind(0, 17, sizes, 0.5)
    assert [batch_for(size, sizes, 32) for size in sizes] == [32, 64, 96]
    assert learning_rate(1.0, 0, 0.0) < 0.01
    assert learning_rate(1.0, 10_000, 0.0) == 1.0
    assert learning_rate(1.0, 10_000, 1.0) == pytest.approx(0.01)


def test_pieces_resume_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main([*out, *TINY, "--max-steps", "2"]) == 0
    assert load_weights(tmp_path / WEIGHTS, 64).image_encoder.img_size == 64
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert first["step"] == 2
    assert main([*out, *TINY, "--max-steps", "2", "--resume"]) == 0
    second = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert second["step"] == 4
    assert second["elapsed"] > first["elapsed"]
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["steps"] == 4
    assert not record["finished"]
    assert set(record["scores"]) == {"128", "64"}
    # Without the checkpoint the weights themselves are taken up.
    (tmp_path / "checkpoint.pt").unlink()
    assert main([*out, *TINY, "--max-steps", "1", "--resume"]) == 0
    assert json.loads((tmp_path / RECORD).read_text())["steps"] == 5
    assert "resumed at step 4" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


def test_profile_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*TINY, "--sizes", "64"]
    assert main(["--out", str(tmp_path), *small, "--profile-steps", "1"]) == 0
    assert "64 px, refine True" in capsys.readouterr().out
    assert main(["--evaluate", str(tmp_path / WEIGHTS), *small]) == 0
    assert '"point"' in capsys.readouterr().out


def test_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), *TINY, "--resume"]) == 1
    assert "without --resume" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"broken")
    assert main(["--out", str(tmp_path), *TINY, "--resume"]) == 1
    assert "cannot be resumed" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), *TINY, "--sizes", "100"]) == 1
    assert "multiple of 16" in capsys.readouterr().err
