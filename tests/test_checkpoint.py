"""Checkpoints in Meta's format, good and bad. The registry's real sizes are slow to build, so vit_b stands for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from segment_anything import sam_model_registry

from samopt.checkpoint import WIDTH_KEY, load_checkpoint
from samopt.errors import CheckpointError, InvalidInput


@pytest.fixture(scope="module")
def vit_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random vit_b checkpoint, saved as Meta saves them."""
    path = tmp_path_factory.mktemp("checkpoints") / "sam_vit_b.pth"
    torch.manual_seed(0)
    torch.save(sam_model_registry["vit_b"]().state_dict(), path)
    return path


def test_loads_the_weights_meta_saved(vit_b: Path) -> None:
    sam = load_checkpoint(vit_b, "vit_b")
    saved = torch.load(vit_b, weights_only=True)
    loaded = sam.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert not sam.training


def test_names_the_model_type_it_found(vit_b: Path) -> None:
    with pytest.raises(CheckpointError, match="is vit_b, not vit_h"):
        load_checkpoint(vit_b, "vit_h")


def test_finds_out_the_model_type(vit_b: Path) -> None:
    assert len(load_checkpoint(vit_b).image_encoder.blocks) == 12


def test_unknown_model_type(vit_b: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown model type 'vit_x'"):
        load_checkpoint(vit_b, "vit_x")


def truncated(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[:100_000])


def no_pickle(path: Path, good: Path) -> None:
    path.write_text("<html>404</html>")


def empty(path: Path, good: Path) -> None:
    path.touch()


def other_model(path: Path, good: Path) -> None:
    torch.save(torch.nn.Linear(3, 3).state_dict(), path)


def no_state_dict(path: Path, good: Path) -> None:
    torch.save([1, 2, 3], path)


def arbitrary_code(path: Path, good: Path) -> None:
    torch.save(torch.nn.Linear(3, 3), path)


def missing_weights(path: Path, good: Path) -> None:
    state = torch.load(good, weights_only=True)
    torch.save({WIDTH_KEY: state[WIDTH_KEY]}, path)


def odd_keys(path: Path, good: Path) -> None:
    torch.save({1: torch.zeros(3)}, path)


def flat_weight(path: Path, good: Path) -> None:
    torch.save({WIDTH_KEY: torch.tensor(1.0)}, path)


def unknown_width(path: Path, good: Path) -> None:
    torch.save({WIDTH_KEY: torch.zeros(192, 3, 16, 16)}, path)


def damaged(path: Path, good: Path) -> None:
    torch.save({WIDTH_KEY: torch.zeros(768, 3, 16, 16)}, path)
    content = bytearray(path.read_bytes())
    at = content.index(b"patch_embed")
    content[at - 40 : at] = bytes(40)
    path.write_bytes(content)


BAD = (truncated, no_pickle, empty, other_model, no_state_dict, arbitrary_code, missing_weights)


@pytest.mark.parametrize("make", [*BAD, odd_keys, flat_weight, unknown_width, damaged])
def test_bad_files_are_one_clear_error(make: Callable[[Path, Path], None], vit_b: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.pth"
    make(path, vit_b)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, "vit_b")
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none.pth", "vit_b")
