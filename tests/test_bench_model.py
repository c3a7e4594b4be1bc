"""Which model a benchmark times."""

from __future__ import annotations

from pathlib import Path

import pytest
import segment_anything
import torch
from segment_anything.modeling import Sam

from samopt.bench_model import bench_model, random_model
from samopt.errors import InvalidInput
from samopt.tiny import load_tiny
from tests.models import random_sam


def test_random_models_have_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(segment_anything.sam_model_registry, "small", lambda: random_sam(img_size=64))
    sam: Sam = random_model("small", seed=0)
    positions = [p for name, p in sam.image_encoder.named_parameters() if "rel_pos" in name or "pos_embed" in name]
    assert positions
    assert all(bool(position.abs().max() > 0) for position in positions)


def test_the_model_of_a_checkpoint_of_a_type_or_the_embedded_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("samopt.tiny.load_tiny", lambda: load_tiny(img_size=64))
    monkeypatch.setitem(segment_anything.sam_model_registry, "vit_b", lambda: random_sam(width=768, heads=12, depth=1))
    for given in (None, "sam_tiny"):
        model = bench_model(given)
        assert (model.name, model.weights, model.trained) == ("sam_tiny", "sam_tiny", True)
    one, same, other = (bench_model("vit_b", seed=seed) for seed in (1, 1, 2))
    assert (one.name, one.weights, one.trained) == ("vit_b", "random", False)
    table = "image_encoder.blocks.0.attn.rel_pos_h"
    assert torch.equal(one.sam.state_dict()[table], same.sam.state_dict()[table])
    assert not torch.equal(one.sam.state_dict()[table], other.sam.state_dict()[table])
    path = tmp_path / "mine.pth"
    torch.save(one.sam.state_dict(), path)
    loaded = bench_model(None, path)
    assert (loaded.name, loaded.weights, loaded.trained) == ("vit_b", str(path), True)
    assert torch.equal(one.sam.state_dict()[table], loaded.sam.state_dict()[table])
    with pytest.raises(InvalidInput, match="unknown model type 'vit_q'; known: vit_h, vit_l, vit_b"):
        bench_model("vit_q")
