from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

import samopt
from samopt import BatchPredictor, InvalidInput, Prompts, embed, load_embedding
from samopt.fingerprint import fingerprint
from samopt.passes import HoistRelPos, SDPAttention
from tests.folders.images import plain_folder, shards_of
from tests.models import random_sam


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = plain_folder(tmp_path / "in", 5)
    (found / "03.png").write_bytes(b"")
    return found


def test_shards_hold_features_sizes_and_the_fingerprint(sam: Sam, folder: Path, tmp_path: Path) -> None:
    summary = embed(sam, folder, tmp_path / "out", batch_size=2, shard_size=3)
    assert (summary.done, summary.failed, summary.exit_code) == (4, 1, 1)
    with safe_open(tmp_path / "out" / "shards" / "000001.safetensors", framework="pt") as file:
        notes = json.loads(file.metadata()["samopt"])
        assert notes["model"] == fingerprint(sam)
        assert notes["paths"] == [str(folder / "04.png")]
        assert notes["failed"][0]["image"] == str(folder / "03.png")
        features = file.get_tensor("features")
        assert (features.dtype, tuple(features.shape)) == (torch.float16, (1, 64, 4, 4))
        assert file.get_tensor("original_sizes").tolist() == [[41, 56]]
        assert file.get_tensor("input_sizes").tolist() == [[47, 64]]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-3)])
def test_a_predictor_answers_as_if_it_had_seen_the_image(
    sam: Sam, folder: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    embed(sam, folder, tmp_path / "out", dtype=dtype, batch_size=2, shard_size=3)  # type: ignore[arg-type]
    expected, found, several = SamPredictor(sam), SamPredictor(sam), BatchPredictor(sam)
    expected.set_image(np.array(Image.open(folder / "01.png")))
    load_embedding(found, tmp_path / "out", folder / "01.png")
    load_embedding(several, tmp_path / "out", "04.png", "in/01.png")
    box = np.array([3, 3, 30, 30])
    answers = [predictor.predict(box=box) for predictor in (expected, found)]
    batch = several.predict([None, Prompts(boxes=box[None])])[1]
    answers.append((batch.masks[0].numpy(), batch.iou_predictions[0].numpy(), batch.low_res_masks[0].numpy()))
    for masks, iou, logits in answers[1:]:
        assert (masks != answers[0][0]).mean() < 5e-3
        np.testing.assert_allclose(iou, answers[0][1], atol=tolerance)
        np.testing.assert_allclose(logits, answers[0][2], atol=20 * tolerance)


def test_embeddings_of_other_weights_are_refused_and_of_other_passes_are_not(
    sam: Sam, folder: Path, tmp_path: Path
) -> None:
    fast = samopt.optimize(sam, [HoistRelPos(), SDPAttention()], verify="off")
    embed(fast, folder, tmp_path / "out")
    load_embedding(SamPredictor(sam), tmp_path / "out", "01.png")
    other = SamPredictor(random_sam(seed=1))
    with pytest.raises(InvalidInput, match="its embeddings are another model's"):
        load_embedding(other, tmp_path / "out", "01.png")
    assert not other.is_image_set
    trained = copy.deepcopy(fast)
    trained.load_state_dict(random_sam(seed=1).state_dict())
    with pytest.raises(InvalidInput, match="its embeddings are another model's"):
        load_embedding(SamPredictor(trained), tmp_path / "out", "01.png")


def test_what_is_not_there_says_why(sam: Sam, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    embed(sam, folder, out, shard_size=2)
    (folder / "more").mkdir()
    Image.open(folder / "01.png").save(folder / "more" / "01.png")
    embed(sam, folder, out)
    (out / "shards" / "000001.safetensors").unlink()
    predictor = SamPredictor(sam)
    for image, message in [
        ("gone.png", "no image gone.png in it"),
        ("01.png", "2 images 01.png in it"),
        ("02.png", "02.png is not embedded yet"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            load_embedding(predictor, out, image)
    embed(sam, folder, out)
    with pytest.raises(InvalidInput, match=r"03\.png could not be embedded: not a readable image"):
        load_embedding(predictor, out, "03.png")
    with pytest.raises(InvalidInput, match="a SamPredictor holds one image, not 2"):
        load_embedding(predictor, out, "02.png", "04.png")
    with pytest.raises(InvalidInput, match="there are no embeddings in it"):
        load_embedding(predictor, tmp_path, "01.png")


def test_a_lost_shard_is_made_again_bit_for_bit(sam: Sam, folder: Path, tmp_path: Path) -> None:
    embed(sam, folder, tmp_path / "out", dtype="float32", batch_size=2, shard_size=3)
    whole = shards_of(tmp_path / "out")
    (tmp_path / "out" / "shards" / "000001.safetensors").unlink()
    summary = embed(sam, folder, tmp_path / "out")
    assert (summary.done, summary.failed, summary.skipped) == (1, 1, 3)
    assert shards_of(tmp_path / "out") == whole


def test_a_shard_of_no_good_image(sam: Sam, tmp_path: Path) -> None:
    (tmp_path / "bad.png").touch()
    assert embed(sam, tmp_path / "bad.png", tmp_path / "out").failed == 1


def test_another_dtype_is_refused(sam: Sam, folder: Path, tmp_path: Path) -> None:
    embed(sam, folder, tmp_path / "out", dtype="float32")
    assert embed(sam, folder, tmp_path / "out").skipped == 5
    with pytest.raises(InvalidInput, match='was made with dtype "float32", and this run has "float16"'):
        embed(sam, folder, tmp_path / "out", dtype="float16")
    with pytest.raises(InvalidInput, match="dtype is 'int8'"):
        embed(sam, folder, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
