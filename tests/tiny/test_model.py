"""The embedded model: Meta's classes, sizes, and the shipped weights' scores."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from segment_anything.modeling import Sam
from segment_anything.modeling.image_encoder import get_rel_pos

from samopt.errors import CheckpointError, InvalidInput
from samopt.tiny import load_tiny
from samopt.tiny.evaluate import FIRST_SEED, evaluate
from samopt.tiny.model import RECORD, WEIGHTS, build_tiny, fit_state, load_weights, resize_relative


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with random positions, saved as the shipped file is."""
    sam = build_tiny()
    with torch.no_grad():
        for name, parameter in sam.image_encoder.named_parameters():
            if "pos" in name:
                parameter.normal_(std=0.3)
    path = tmp_path_factory.mktemp("tiny") / "weights.safetensors"
    save_file({name: tensor.half().contiguous() for name, tensor in sam.state_dict().items()}, path)
    return path


def test_is_metas_model_with_vit_b_shapes() -> None:
    sam = build_tiny()
    assert type(sam) is Sam
    encoder = sam.image_encoder
    assert encoder.img_size == 1024
    assert [block.window_size for block in encoder.blocks] == [14, 14, 0, 14, 14, 0, 14, 0]
    attention = encoder.blocks[0].attn
    assert attention.qkv.in_features // attention.num_heads == 64
    assert not sam.training


@pytest.mark.parametrize("size", [64, 256, 512, 1024, 1280])
def test_any_size_has_the_keys_and_shapes_that_meta_builds(weights: Path, size: int) -> None:
    sam = load_weights(weights, size)
    expected = {name: tensor.shape for name, tensor in build_tiny(size).state_dict().items()}
    assert {name: tensor.shape for name, tensor in sam.state_dict().items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in sam.state_dict().values())
    assert not sam.training


def test_the_file_is_kept_exactly_at_its_own_size(weights: Path) -> None:
    from safetensors.torch import load_file

    state = load_weights(weights).state_dict()
    assert all(torch.equal(tensor.float(), state[name]) for name, tensor in load_file(weights).items())
    assert "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix" in state


def test_relative_positions_are_interpolated_as_meta_does() -> None:
    table = torch.randn(127, 64)
    along = torch.arange(16)
    ours = resize_relative(table, 31)[along[:, None] - along[None, :] + 15]
    assert torch.equal(ours, get_rel_pos(16, 16, table))


def test_fitting_back_to_the_same_size_changes_nothing() -> None:
    state = build_tiny(256).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in fit_state(state, 256).items())


@pytest.mark.parametrize("size", [0, -16, 100, 1000, 256.0])
def test_refuses_sizes_that_are_no_multiple_of_16(size: int) -> None:
    with pytest.raises(InvalidInput, match="multiple of 16"):
        build_tiny(size)


def test_says_that_the_weights_are_missing_or_not_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing.*samopt\.tiny\.train"):
        load_weights(tmp_path / "none.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(CheckpointError, match="does not hold"):
        load_weights(other)
    other.write_bytes(b"no weights at all")
    with pytest.raises(CheckpointError, match="does not hold"):
        load_weights(other)


def test_shipped_weights_are_small_half_precision() -> None:
    from safetensors.torch import load_file

    path = Path(str(files("samopt.tiny") / WEIGHTS))
    assert path.stat().st_size <= 16_000_000
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}


def test_the_record_meets_the_bars() -> None:
    record = json.loads((files("samopt.tiny") / RECORD).read_text())
    scores = record["scores"]["1024"]
    assert record["finished"]
    assert scores["scenes"] == 256
    assert scores["point"] >= 0.80
    assert scores["box"] >= 0.87
    assert scores["points3"] > scores["point"]
    assert scores["mask_point"] > scores["point"]
    assert {"seed", "sizes"} <= record["settings"].keys()
    assert {"torch", "triton", "device"} <= record["versions"].keys()
    assert record["steps"] > 0


@pytest.mark.parametrize(
    ("size", "scenes", "point", "box"),
    [(256, 6, 0.6, 0.72), pytest.param(1024, 1, 0.72, 0.82, marks=pytest.mark.slow)],
)
def test_shipped_weights_score(size: int, scenes: int, point: float, box: float) -> None:
    scores = evaluate(load_tiny(size), range(FIRST_SEED, FIRST_SEED + scenes))
    assert scores["point"] >= point
    assert scores["box"] >= box
