"""Models are exported, loaded as a Sam, and answer what they answered; and Meta's ONNX export still takes them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from segment_anything.utils.onnx import SamOnnxModel
from torch import Tensor

import samopt
from samopt import InvalidInput, SamoptError, SavedModelError, export, load_exported, optimize, save
from samopt.passes import CastDtype, FusedMaskDecoder, Int8Dynamic, LinearPatchEmbed, SDPAttention
from samopt.passes.kernels import tuning
from samopt.passes.kernels.tuning import Config
from samopt.saved_folder import read_manifest
from tests.models import random_sam
from tests.test_load import answers

CAST = CastDtype(decoder=False)  # of whose predicted IoU, near 0 with such weights, bfloat16 would leave nothing
PASSES = [LinearPatchEmbed(), SDPAttention(), FusedMaskDecoder(), CAST, Int8Dynamic(layers=("lin1",))]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sam, Path]:
    """An optimised model with operators of samopt's own, and the folder it was exported to, for batches of 2."""
    model = optimize(random_sam(depth=1, global_blocks=()), PASSES, verify="off")
    folder = tmp_path_factory.mktemp("exported") / "model"
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # as they compile sooner
        export(model, folder, [2])
    return model, folder


def test_kernels_come_along(sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that operators launch, which no package holds, and their configurations."""
    files = {"key/a.cubin": torch.arange(3, dtype=torch.uint8)}
    export_module, load_module = sys.modules["samopt.export"], sys.modules["samopt.load"]
    monkeypatch.setattr(export_module, "_kernels", lambda *_: files)
    monkeypatch.setattr(export_module, "_package", lambda *arguments: arguments[-1].write_bytes(b"code"))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: None)
    monkeypatch.setattr(tuning, "_found", {"a key": Config.of(BLOCK=3)})
    export(optimize(sam, [LinearPatchEmbed()], verify="off"), tmp_path / "model")
    monkeypatch.setattr(tuning, "_offered", {})
    (note,) = samopt.report(load_exported(tmp_path / "model")).notes
    assert note == "compiled kernels in the folder ignored: 'key/a.cubin' is no file of a kernel"
    assert tuning._offered == {"a key": tuning.encode(Config.of(BLOCK=3))}
    restored: list[Any] = []
    monkeypatch.setattr(load_module, "restore", lambda *arguments: restored.append(arguments))
    assert samopt.report(load_exported(tmp_path / "model")).notes == ()
    ((found, device),) = restored
    assert found.keys() == files.keys()
    assert torch.equal(found["key/a.cubin"], files["key/a.cubin"])
    assert device == torch.device("cpu")


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two answers are the same but for rounding, relative to the second."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


def close_in_half(found: Tensor, wanted: Tensor) -> bool:
    """Whether they are but for rounding to bfloat16, which fused kernels do less often."""
    return close(found, wanted, 0.03)


def test_it_answers_as_the_model(exported: tuple[Sam, Path]) -> None:
    model, folder = exported
    loaded = load_exported(folder, verify=True)
    assert isinstance(loaded, Sam)
    assert all(map(close_in_half, answers(loaded), answers(model)))
    (note,) = samopt.report(loaded).notes
    assert note.startswith("verified against its answers when it was saved: embedding error")
    assert [step.status for step in samopt.report(loaded).steps] == ["applied"] * len(PASSES)
    assert sorted(read_manifest(folder)["files"]) == [
        "answers.safetensors",
        "decoder.pt2",
        "encoder_2.pt2",
        "shared_decoder.pt2",
        "weights.safetensors",
    ]


@torch.no_grad()
def test_any_number_of_images(exported: tuple[Sam, Path]) -> None:
    model, folder = exported
    loaded = load_exported(folder)
    pixels = torch.rand(5, 3, 64, 64)
    for count in (1, 2, 5):
        assert close_in_half(loaded.image_encoder(pixels[:count]), model.image_encoder(pixels[:count]))
    strided = pixels.permute(0, 1, 3, 2)
    assert close_in_half(loaded.image_encoder(strided), model.image_encoder(strided))
    for wrong in (pixels[0], pixels[:, :, :32], pixels[:0]):
        with pytest.raises(InvalidInput, match=r"the exported image encoder takes \[B, 3, 64, 64\], not"):
            loaded.image_encoder(wrong)


@torch.no_grad()
@pytest.mark.parametrize("prompts", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", ["point", "points", "box", "mask", "mask and point"])
def test_any_number_of_prompts(exported: tuple[Sam, Path], prompts: int, kind: str) -> None:
    model, folder = exported
    loaded = load_exported(folder)
    points = 5 if kind == "points" else 1
    coords = torch.rand(prompts, points, 2) * 64, torch.ones(prompts, points, dtype=torch.int)
    arguments: dict[str, Any] = {
        "points": coords if "point" in kind else None,
        "boxes": torch.tensor([[4.0, 5.0, 40.0, 50.0]]).repeat(prompts, 1) if kind == "box" else None,
        "masks": torch.randn(prompts, 1, 16, 16) if "mask" in kind else None,
    }
    image = torch.randn(1, 64, 4, 4)
    for multimask in (True, False):
        found, wanted = (
            sam.mask_decoder(image, sam.prompt_encoder.get_dense_pe(), *sam.prompt_encoder(**arguments), multimask)
            for sam in (loaded, model)
        )
        assert all(map(close, found, wanted))


@torch.no_grad()
def test_an_image_for_each_prompt(exported: tuple[Sam, Path]) -> None:
    model, folder = exported
    loaded, images = load_exported(folder), torch.randn(3, 64, 4, 4)
    sparse, dense = model.prompt_encoder(None, torch.tensor([[4.0, 5.0, 40.0, 50.0]]).repeat(3, 1), None)
    arguments = images, model.prompt_encoder.get_dense_pe(), sparse, dense, True
    assert all(map(close, loaded.mask_decoder(*arguments), model.mask_decoder(*arguments)))


def test_what_can_be_done_with_it(exported: tuple[Sam, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = exported
    loaded = load_exported(folder)
    wanted = answers(loaded)
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(answers, [loaded, copy.deepcopy(loaded), loaded.to("cpu")]):
            assert all(map(torch.equal, found, wanted))
    with pytest.raises(InvalidInput, match="an optimised model keeps its dtypes"):
        loaded.half()
    with pytest.raises(InvalidInput, match="an exported model stays on cpu, for which it was compiled"):
        loaded.to("meta")
    with pytest.raises(SavedModelError, match=r"its image encoder is a ExportedEncoder, not segment_anything's"):
        save(loaded, folder.parent / "again")


def test_folders_of_the_other_kind(exported: tuple[Sam, Path], tmp_path: Path) -> None:
    model, folder = exported
    with pytest.raises(SavedModelError, match=r"samopt\.load_exported loads this folder, not samopt\.load"):
        samopt.load(folder)
    save(model, tmp_path / "model")
    with pytest.raises(SavedModelError, match=r"samopt\.load loads this folder, not samopt\.load_exported"):
        load_exported(tmp_path / "model")


def test_another_machine_and_changed_code(exported: tuple[Sam, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = exported
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "__version__", "9.9.0")
        with pytest.raises(SavedModelError, match=r"other versions: torch .* there and 9\.9\.0 here; export it here"):
            load_exported(folder)
    (package,) = folder.glob("decoder-*.pt2")
    content = package.read_bytes()
    try:
        package.write_bytes(content[:-1] + b"x")
        with pytest.raises(SavedModelError, match="its checksum is another"):
            load_exported(folder)
    finally:
        package.write_bytes(content)


def test_what_cannot_be_exported(tmp_path: Path, sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimize(sam, [LinearPatchEmbed()], verify="off")
    with pytest.raises(InvalidInput, match=r"batch_sizes must be positive and rise, as \(1, 2, 4\) do, not \(2, 1\)"):
        export(model, tmp_path / "model", [2, 1])
    with monkeypatch.context() as without:
        without.setattr(sys.modules["samopt.passes.compile"], "_cpp_compiler", lambda: None)
        with pytest.raises(samopt.Unsupported, match="TorchInductor found no C"):
            export(model, tmp_path / "model")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator\nin detail")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(SamoptError, match="the image encoder at batch 1 cannot be exported: RuntimeError: no such ope"):
        export(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["exact", "fast"])
def test_onnx_through_metas_own_class(tmp_path: Path, optimised: Callable[[str], Sam], recipe: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    sam: Any = copy.deepcopy(optimised(recipe))
    whole = SamOnnxModel(copy.deepcopy(sam), return_single_mask=False)
    sam.mask_decoder.float()  # ONNX has no transposed convolution in bfloat16
    traced = SamOnnxModel(sam, return_single_mask=False)

    def inputs(points: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(points)
        return {
            "image_embeddings": torch.randn(1, 256, 16, 16, generator=generator),
            "point_coords": torch.rand(1, points, 2, generator=generator) * 256,
            "point_labels": torch.randint(0, 4, (1, points), generator=generator).float(),
            "mask_input": torch.randn(1, 1, 64, 64, generator=generator),
            "has_mask_input": torch.ones(1),
            "orig_im_size": torch.tensor([150.0, 225.0]),
        }

    example, path = inputs(5), str(tmp_path / "decoder.onnx")
    dynamic = {"point_coords": {1: "num_points"}, "point_labels": {1: "num_points"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, and that it is to be replaced: Meta's script uses it
        names = ["masks", "iou_predictions", "low_res_masks"]
        torch.onnx.export(
            traced,
            tuple(example.values()),
            path,
            input_names=list(example),
            output_names=names,
            dynamic_axes=dynamic,
            opset_version=17,
            dynamo=False,
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for given in (example, inputs(9)):
        found = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        with torch.no_grad():
            wanted, rounded = traced(*given.values()), whole(*given.values())
        for mine, theirs, half in zip(map(torch.from_numpy, found), wanted, rounded, strict=True):
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm()
            assert (mine - half).norm() <= (1e-4 if recipe == "exact" else 0.05) * half.norm()
