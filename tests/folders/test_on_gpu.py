"""Folders of images on a GPU, where reading, the model and records overlap on streams of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from segment_anything import SamPredictor

from samopt import embed, load_embedding, optimize
from samopt.folders.run import segment
from samopt.tiny import draw_scene, load_tiny
from tests.folders.images import shards_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("scenes")
    for index in range(20):
        Image.fromarray(draw_scene(index, 512).image.numpy()[: 300 + 10 * index]).save(found / f"{index:02d}.png")
    asked = [{"image": f"{index:02d}.png", "box": [40, 40, 200 + at, 220]} for index in range(20) for at in range(9)]
    (found.parent / "prompts.json").write_text(json.dumps(asked))
    return found


@pytest.mark.parametrize("recipe", [None, "fast"])
def test_masks_are_those_of_a_cpu_and_a_lost_shard_is_made_again_bit_for_bit(
    folder: Path, tmp_path: Path, recipe: str | None
) -> None:
    arguments: dict[str, Any] = {"prompts": folder.parent / "prompts.json", "batch_size": 4, "shard_size": 6}
    sam = load_tiny(img_size=256)
    segment(sam, folder, tmp_path / "cpu", **arguments)
    model = sam.cuda() if recipe is None else optimize(sam.cuda(), recipe, verify="off")
    segment(model, folder, tmp_path / "gpu", **arguments)
    cpu, gpu = (pq.read_table(tmp_path / device / "shards").to_pylist() for device in ("cpu", "gpu"))
    ious = [
        float(coco_mask.iou([one["segmentation"]], [other["segmentation"]], [0])[0, 0])
        for row, alike in zip(cpu, gpu, strict=True)
        for one, other in zip(row["masks"], alike["masks"], strict=True)
        if one["area"] or other["area"]
    ]
    assert len(ious) > 100
    assert sum(ious) / len(ious) > 0.97
    whole = shards_of(tmp_path / "gpu")
    (tmp_path / "gpu" / "shards" / "000001.parquet").unlink()
    segment(model, folder, tmp_path / "gpu", **arguments)
    assert shards_of(tmp_path / "gpu") == whole


def test_embeddings_come_back(folder: Path, tmp_path: Path) -> None:
    sam = load_tiny(img_size=256).cuda()
    embed(sam, folder, tmp_path / "out", dtype="float32", batch_size=4)
    predictor = SamPredictor(sam)
    load_embedding(predictor, tmp_path / "out", "07.png")
    found = predictor.features.clone()
    with Image.open(folder / "07.png") as image:
        predictor.set_image(np.array(image.convert("RGB")))
    torch.testing.assert_close(found, predictor.features, atol=1e-3, rtol=1e-3)


def test_memory_that_runs_out_halves_batches(folder: Path, tmp_path: Path) -> None:
    sam = load_tiny(img_size=256).cuda()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    arguments: dict[str, Any] = {"prompts": folder.parent / "prompts.json", "shard_size": 20}
    segment(sam, folder, tmp_path / "small", batch_size=2, **arguments)
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.5 * peak / total))
    try:
        summary = segment(sam, folder, tmp_path / "large", batch_size=20, **arguments)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (summary.done, summary.failed) == (20, 0)
    assert summary.halved == (0,)
