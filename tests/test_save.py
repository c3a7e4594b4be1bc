"""What is saved of a model: enough, nothing twice, and only of a model that can be built again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from segment_anything import sam_model_registry
from segment_anything.modeling import Sam
from torch import nn

import samopt
from samopt import RecipeError, SamoptError, SavedModelError, optimize, save
from samopt.base import Phase
from samopt.passes import CastDtype, Float8Dynamic, Int8Dynamic, LinearPatchEmbed, SemiSparse
from samopt.recipe import Recipe
from samopt.saved_folder import read_manifest
from tests.models import random_sam
from tests.toys import Options


def stored(folder: Path) -> dict[str, int]:
    """The bytes of each tensor of the weights, by name."""
    with safe_open(folder / read_manifest(folder)["files"]["weights.safetensors"]["name"], "pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 - it is no dict


def test_what_the_manifest_tells(tmp_path: Path, sam: Sam) -> None:
    model = optimize(sam, [LinearPatchEmbed(), CastDtype()], verify="off")
    save(model, tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    assert manifest["made_with"].items() >= {"torch": str(torch.__version__), "device": "cpu"}.items()
    assert [entry["name"] for entry in manifest["recipe"]["pass"]] == ["linear_patch_embed", "dtype"]
    assert manifest["geometry"]["encoder"]["embed_dim"] == 64
    assert [row["status"] for row in manifest["report"]["steps"]] == ["applied", "applied"]
    assert sorted(manifest["files"]) == ["answers.safetensors", "weights.safetensors"]


def test_weights_are_stored_once_as_the_passes_made_them(tmp_path: Path, sam: Sam) -> None:
    model = optimize(sam, [CastDtype(), Int8Dynamic()], verify="off")
    save(model, tmp_path / "model")
    state = model.state_dict()
    assert stored(tmp_path / "model") == {name: tensor.nbytes for name, tensor in state.items()}


def test_sparse_weights_are_packed(tmp_path: Path, sam: Sam) -> None:
    for kept, passes in (("model", [CastDtype(), SemiSparse(criterion="magnitude", update=False)]), ("int8", None)):
        passes = passes or [CastDtype(), SemiSparse(criterion="magnitude", update=False), Int8Dynamic()]
        model = optimize(sam, passes, verify="off")
        save(model, tmp_path / kept)
        found, name = stored(tmp_path / kept), "image_encoder.blocks.0.mlp.lin1.weight"
        weight = model.state_dict()[name]
        assert name not in found
        assert found[f"{name}:values"] == weight.nbytes // 2
        assert found[f"{name}:positions"] == weight.numel() // 8


@pytest.mark.parametrize(
    ("quantize", "gigabytes"), [([], 1.3), ([Int8Dynamic()], 0.75), ([Float8Dynamic()], 0.75)], ids=repr
)
def test_the_size_of_vit_h(quantize: list[samopt.Pass], gigabytes: float) -> None:
    with torch.device("meta"):
        sam: Any = sam_model_registry["vit_h"]()
    on_cpu = [step.pass_ for step in Recipe.of("fast").steps if step.required and step.pass_.phase is Phase.FLOAT]
    for pass_ in [*on_cpu, *quantize]:
        pass_(sam)
    tensors = sum(tensor.nbytes for tensor in sam.state_dict().values())
    assert 0.5 * gigabytes < tensors / 1e9 < gigabytes - 0.01, "with room for answers, names and compiled code"


def norm_eps(model: Any) -> None:
    model.image_encoder.blocks[1].norm1.eps = 1e-3


def another_pass(model: Any) -> None:
    CastDtype("float16")(model)


def another_layer(model: Any) -> None:
    model.image_encoder.blocks[0].mlp.act = nn.ReLU()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (norm_eps, "image_encoder.blocks.1.norm1: eps is 0.001 and was"),
        (another_pass, "image_encoder: forward is other code and was absent"),
        (another_layer, "image_encoder.blocks.0.mlp.act: approximate is absent"),
    ],
)
def test_a_model_that_was_changed(tmp_path: Path, sam: Sam, change: Callable[[Any], None], found: str) -> None:
    model = optimize(sam, [LinearPatchEmbed()], verify="off")
    change(model)
    with pytest.raises(SavedModelError, match=r"the model was changed since samopt\.optimize made it") as raised:
        save(model, tmp_path / "model")
    assert found in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_are_no_change(tmp_path: Path, sam: Sam) -> None:
    model = optimize(sam, [LinearPatchEmbed()], verify="off")
    other = random_sam(seed=3)
    model.load_state_dict(other.state_dict())
    save(model, tmp_path / "model")
    assert torch.equal(samopt.load(tmp_path / "model").image_encoder.pos_embed, other.image_encoder.pos_embed)


def test_an_unmodified_model(tmp_path: Path, sam: Sam) -> None:
    with pytest.raises(SamoptError, match=r"this model has no report: it was not made by samopt\.optimize"):
        save(sam, tmp_path / "model")


def test_weights_that_torchao_quantised(tmp_path: Path, sam: Sam) -> None:
    pytest.importorskip("torchao")
    model = optimize(sam, [CastDtype(), Int8Dynamic(kernel="torchao")], verify="off")
    with pytest.raises(SavedModelError, match=r'Int8Tensor.*use Int8Dynamic\(kernel="triton"\)'):
        save(model, tmp_path / "model")


def test_a_pass_of_ones_own(tmp_path: Path, sam: Sam) -> None:
    model = optimize(sam, [LinearPatchEmbed(), Options(names=("a", "b"))], verify="off")
    with pytest.raises(RecipeError, match="Options is a pass of your own, which no file can name"):
        save(model, tmp_path / "model")
    own = {"my_options": Options}
    save(model, tmp_path / "model", passes=own)
    with pytest.raises(RecipeError, match="names an unknown pass 'my_options'"):
        samopt.load(tmp_path / "model")
    loaded = samopt.load(tmp_path / "model", passes=own)
    assert samopt.report(loaded).steps == samopt.report(model).steps


def test_a_report_with_nan_is_json(tmp_path: Path, tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.toys import Lossy

    scenes = samopt.samples.scene_samples(1, 256)
    recipe = Recipe([samopt.Step(LinearPatchEmbed()), samopt.Step(Lossy(1e38), on_fail="drop")])
    model = optimize(tiny256, recipe, samples=scenes)
    assert samopt.report(model).steps[1].status == "dropped"
    save(model, tmp_path / "model", passes={"lossy": Lossy})
    json.loads((tmp_path / "model" / "samopt.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    loaded = samopt.load(tmp_path / "model", passes={"lossy": Lossy})
    assert str(samopt.report(loaded)) == str(samopt.report(model))


def test_saving_changes_nothing(tmp_path: Path, optimised: Callable[[str], Sam]) -> None:
    model = copy.deepcopy(optimised("blog"))
    before = {name: tensor.clone() for name, tensor in {**model.state_dict(), **dict(model.named_buffers())}.items()}
    save(model, tmp_path / "model")
    after = {**model.state_dict(), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
