"""A loaded model is the saved one: its bits, its report, and what can be done with it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from segment_anything import SamPredictor
from segment_anything.modeling import Sam
from torch import Tensor

import samopt
from samopt import AccuracyError, InvalidInput, SavedModelError, optimize, save, saved_folder
from samopt.module_form import difference
from samopt.passes import (
    CastDtype,
    Compile,
    DevicePreprocess,
    Float8Dynamic,
    HoistRelPos,
    LinearPatchEmbed,
    SDPAttention,
    SemiSparse,
    TritonAttention,
)
from samopt.recipe import built_in
from samopt.samples import scene_samples
from samopt.saved_folder import read_manifest
from tests.models import random_sam

QUANTISED = [HoistRelPos(), SDPAttention(), CastDtype(), SemiSparse(criterion="magnitude", update=False)]


def answers(model: Any) -> list[Tensor]:
    """Embedding, logits and predicted IoU of a model for a point and a box in a scene."""
    predictor = SamPredictor(model)
    predictor.set_image(scene_samples(1, 256)[0].image)
    points = torch.tensor([[[100.0, 80.0]]], device=model.device), torch.ones(1, 1, device=model.device)
    _, iou, logits = predictor.predict_torch(*points)
    _, box_iou, box_logits = predictor.predict_torch(
        None, None, torch.tensor([[20.0, 30.0, 200.0, 180.0]], device=model.device), multimask_output=False
    )
    return [predictor.features, iou, logits, box_iou, box_logits]


def uncompiled(model: Any) -> Any:
    """A copy, which PyTorch leaves uncompiled."""
    return copy.deepcopy(model)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("recipe", built_in())
def test_every_recipe(tmp_path: Path, optimised: Callable[[str], Sam], recipe: str) -> None:
    model = uncompiled(optimised(recipe))
    save(model, tmp_path / "model")
    loaded = samopt.load(tmp_path / "model")
    assert difference(loaded, model) is None
    assert same(answers(uncompiled(loaded)), answers(model))
    assert samopt.report(loaded).steps == samopt.report(model).steps
    assert loaded._compiled_call_impl is None
    assert loaded.image_encoder._compiled_call_impl is not None, "compiled again"
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.usefixtures("kernels_anywhere")
def test_scales_that_were_read_off_weights_before_they_were_quantised(tmp_path: Path) -> None:
    sam = random_sam(width=128, heads=2, depth=3)
    model = optimize(sam, [*QUANTISED, Float8Dynamic()], verify="off")
    fused = optimize(sam, [*QUANTISED[:3], TritonAttention(), Float8Dynamic()], verify="off")
    for found in (model, fused):
        save(found, tmp_path / "model")
        loaded = samopt.load(tmp_path / "model", verify=True)
        scales = [name for name, _ in found.named_buffers() if name.endswith("result_scale")]
        assert len(scales) == (3 if found is model else 6)
        assert all(torch.equal(loaded.get_buffer(name), found.get_buffer(name)) for name in scales)
        assert "bit for bit" in samopt.report(loaded).notes[-1]


def test_passes_that_cannot_run_here_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sam = random_sam(width=128, heads=2, depth=3)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys.modules["samopt.passes.triton_attention"], "cannot_run", lambda device: None)
        model = optimize(sam, [*QUANTISED[:3], TritonAttention(), Float8Dynamic()], verify="off")
        save(model, tmp_path / "model")
    loaded = samopt.load(tmp_path / "model", verify=True)
    row = samopt.report(loaded).steps[3]
    assert (row.status, row.reason) == (
        "skipped",
        "it ran on cpu, but here: Triton kernels need a GPU and the model is on cpu",
    )
    without = optimize(sam, [*QUANTISED[:3], Float8Dynamic()], verify="off")
    assert difference(loaded, without) is None
    assert samopt.report(loaded).notes[-1].startswith("verified against its answers when it was saved: embedding error")


def test_weights_that_cannot_be_computed_with_here(tmp_path: Path, sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    save(optimize(sam, [CastDtype(), Float8Dynamic()], verify="off"), tmp_path / "model")

    def refuse(self: Float8Dynamic, model: Any) -> None:
        raise samopt.Unsupported("float8 needs compute capability 8.9, and A100 has less", "use int8")

    monkeypatch.setattr(Float8Dynamic, "requires", refuse)
    with pytest.raises(SavedModelError, match=r"on cpu, and what Float8Dynamic\(.*A100 has less; optimise the orig"):
        samopt.load(tmp_path / "model")


def test_the_report_says_what_is_another_machine(tmp_path: Path, sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    assert samopt.report(samopt.load(tmp_path / "model")).notes == ()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    (note,) = samopt.report(samopt.load(tmp_path / "model")).notes
    assert note.startswith("saved elsewhere, and its figures are of there: torch 2.")
    assert note.endswith(" there and 9.9.0 here")


def test_where_there_is_no_compiler(tmp_path: Path, sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    save(uncompiled(optimize(sam, "exact", verify="off")), tmp_path / "optional")
    save(uncompiled(optimize(sam, [Compile()], verify="off")), tmp_path / "required")
    monkeypatch.setattr(sys.modules["samopt.passes.compile"], "_cpp_compiler", lambda: None)
    row = samopt.report(samopt.load(tmp_path / "optional")).steps[-1]
    assert (row.status, row.reason.partition(";")[0]) == ("skipped", "TorchInductor found no C++ compiler")
    with pytest.raises(samopt.Unsupported, match="TorchInductor found no C"):
        samopt.load(tmp_path / "required")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(tmp_path: Path, sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"device": "cuda", "gpu": "NVIDIA H200", "capability": "9.0"}
    monkeypatch.setattr(sys.modules["samopt.save"], "machine", lambda device: gpu)
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    with pytest.raises(InvalidInput, match=r"the model was saved from NVIDIA H200; device cuda cannot be used here"):
        samopt.load(tmp_path / "model")
    with pytest.raises(InvalidInput, match="device tpu9 cannot be used here"):
        samopt.load(tmp_path / "model", "tpu9")
    with pytest.raises(InvalidInput, match="has no weights to load"):
        samopt.load(tmp_path / "model", "meta")
    (note,) = samopt.report(samopt.load(tmp_path / "model", "cpu")).notes
    assert "gpu NVIDIA H200 there and none here" in note


def test_a_changed_file(tmp_path: Path, sam: Sam) -> None:
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("weights-*")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(SavedModelError, match=f"{weights}: changed or damaged since it was saved"):
        samopt.load(tmp_path / "model")
    weights.write_bytes(content[:-4])
    with pytest.raises(SavedModelError, match="truncated"):
        samopt.load(tmp_path / "model")
    content[8:9] = b"?"  # of the header, which then is no safetensors header
    weights.write_bytes(content)
    with pytest.raises(SavedModelError, match="its checksum is another"):
        samopt.load(tmp_path / "model")
    weights.unlink()
    with pytest.raises(SavedModelError, match=r"cannot be read .No such file"):
        samopt.load(tmp_path / "model")


def test_weights_in_another_format(tmp_path: Path, sam: Sam) -> None:
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("weights-*")
    weights.write_bytes(b"pickle")
    manifest = read_manifest(tmp_path / "model")
    manifest["files"]["weights.safetensors"] |= {"bytes": 6, "sha256": hashlib.sha256(b"pickle").hexdigest()}
    manifest["checksum"] = saved_folder._checksum(manifest)
    (tmp_path / "model" / saved_folder.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SavedModelError, match="what it holds is not in the safetensors format"):
        samopt.load(tmp_path / "model")


def test_a_file_that_changes_later(tmp_path: Path, sam: Sam) -> None:
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    loaded = samopt.load(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    (weights,) = (tmp_path / "model").glob("weights-*")
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.write(bytes(size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    if Path("/proc/self/maps").exists():
        assert str(weights) not in Path("/proc/self/maps").read_text()


def test_a_manifest_of_other_content(tmp_path: Path, sam: Sam) -> None:
    save(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    del manifest["geometry"]["encoder"]
    manifest["checksum"] = saved_folder._checksum(manifest)
    (tmp_path / "model" / saved_folder.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SavedModelError, match="its manifest holds no Geometry"):
        samopt.load(tmp_path / "model")


def test_answers_that_are_others(tmp_path: Path, tiny256: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    save(optimize(tiny256, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    pristine = sys.modules["samopt.load"].fill

    def noisy(model: Any, tensors: Any, **options: Any) -> None:
        pristine(model, tensors, **options)
        model.image_encoder.neck[3].weight.mul_(-1)

    monkeypatch.setattr(sys.modules["samopt.load"], "fill", noisy)
    samopt.load(tmp_path / "model")
    with pytest.raises(AccuracyError, match="the loaded model answers otherwise than when it was saved: mean mask IoU"):
        samopt.load(tmp_path / "model", verify=True)


def test_a_read_only_folder(tmp_path: Path, sam: Sam) -> None:
    folder = tmp_path / "model"
    model = optimize(sam, [LinearPatchEmbed()], verify="off")
    save(model, folder)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    for path in (*folder.iterdir(), folder):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    try:
        assert same(answers(samopt.load(folder, verify=True)), answers(model))
    finally:
        folder.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_what_can_be_done_with_a_loaded_model(tmp_path: Path, tiny256: Sam) -> None:
    model = optimize(tiny256, [DevicePreprocess(), *QUANTISED, Float8Dynamic()], verify="off")
    save(model, tmp_path / "model")
    loaded = samopt.load(tmp_path / "model")
    wanted = answers(model)
    assert same(answers(copy.deepcopy(loaded)), wanted)
    assert same(answers(loaded.to("cpu")), wanted)
    for cast in (loaded.half, lambda: loaded.to(torch.float16), loaded.double):
        with pytest.raises(InvalidInput, match="an optimised model keeps its dtypes"):
            cast()
    with pytest.raises(samopt.AlreadyApplied, match=r"this model came out of samopt\.optimize"):
        optimize(loaded)
    save(copy.deepcopy(loaded), tmp_path / "again")
    assert same(answers(samopt.load(tmp_path / "again")), wanted)
    with ThreadPoolExecutor(2) as threads:
        assert all(same(found, wanted) for found in threads.map(answers, [loaded] * 4))


FRESH = """
import hashlib, sys, warnings
warnings.simplefilter("error")
import torch
torch.set_num_threads(1)
import samopt
model = samopt.load(sys.argv[1], verify=True)
pixels = torch.linspace(0, 1, 3 * 256 * 256).reshape(1, 3, 256, 256)
with torch.no_grad():
    print(hashlib.sha256(model.image_encoder(pixels).numpy().tobytes()).hexdigest())
print(samopt.report(model).notes[-1])
assert "pickle" not in vars(sys.modules["samopt.load"])
"""


@pytest.mark.slow
def test_two_fresh_processes_at_once(tmp_path: Path, tiny256: Sam) -> None:
    model = optimize(tiny256, [*QUANTISED, Float8Dynamic()], verify="off")
    save(model, tmp_path / "model")
    pixels = torch.linspace(0, 1, 3 * 256 * 256).reshape(1, 3, 256, 256)
    with torch.no_grad():
        wanted = hashlib.sha256(model.image_encoder(pixels).numpy().tobytes()).hexdigest()
    command = [sys.executable, "-c", FRESH, str(tmp_path / "model")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=os.environ, **pipes) for _ in range(2)]
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        digest, note = out.splitlines()
        assert digest == wanted
        assert note == "verified: its answers are those it gave when it was saved, bit for bit"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recipe", [*built_in(), "float8", "sparse24"])
def test_every_recipe_on_a_gpu(tmp_path: Path, recipe: str) -> None:
    from samopt.tiny import load_tiny

    own: dict[str, Any] = {
        "float8": [*QUANTISED[:3], TritonAttention(), Float8Dynamic()],
        "sparse24": [*QUANTISED[:3], SemiSparse()],
    }
    model: Any = optimize(load_tiny(256, "cuda"), own.get(recipe, recipe), verify="off")
    save(model, tmp_path / "model")
    loaded = samopt.load(tmp_path / "model", compile_cache=True, verify=True)
    notes = samopt.report(loaded).notes
    assert notes[-1] == "verified: its answers are those it gave when it was saved, bit for bit"
    if recipe not in own:
        assert notes[0] == "compiled code in the folder used"
    assert same(answers(loaded), answers(model))
    on_cpu: Any = samopt.load(tmp_path / "model", "cpu")
    statuses = {step.name.partition("(")[0]: step.status for step in samopt.report(on_cpu).steps}
    assert statuses.get("TritonAttention", "skipped") == "skipped"
    error = (answers(on_cpu)[0] - answers(model)[0].cpu()).norm() / answers(model)[0].norm().cpu()
    assert error < 0.05
