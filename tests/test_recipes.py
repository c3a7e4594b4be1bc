"""The recipes that come with samopt, on the embedded model and on models of Meta's registry."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything import SamPredictor, sam_model_registry
from segment_anything.modeling import Sam
from torch import Tensor, nn

import samopt
from samopt import InvalidInput, Pass, Recipe, Reference, Report, Sample, optimize, report
from samopt.passes import CastDtype, Compile, Float8Dynamic, Int8Dynamic
from samopt.passes.dtype import cast_at_borders
from samopt.profiling.syncs import fake_cuda, on_fake_cuda, record_syncs
from samopt.rebind import wrap
from samopt.recipe import built_in
from samopt.samples import scene_samples
from samopt.tiny import load_tiny
from tests.answers import RECIPES
from tests.models import random_sam, randomise_positions
from tests.numerics import assert_bit_equal, relative_error


def uncompiled(recipe: str) -> list[Any]:
    """The steps of a recipe but Compile."""
    return [step for step in Recipe.of(recipe).steps if not isinstance(step.pass_, Compile)]


NEEDS_A_GPU = r"skipped: .*needs? a GPU and the model is on cpu"
EMULATED = "undone: emulated on cpu, so not faster"
NAMES = ("UpscaleMasks", "ImageToToken", "TritonAttention", "LinearGELU", "TunedLinear", "TritonLayerNorm")
FUSED = dict.fromkeys(NAMES, NEEDS_A_GPU)
# What becomes on a CPU of the steps that are not applied there, and the reason that the report gives.
LEFT_OUT_ON_A_CPU = {
    "blog": {"UpscaleMasks": NEEDS_A_GPU, "TritonAttention": NEEDS_A_GPU},
    "exact": {},
    "fast": FUSED,
    "max": {**FUSED, "SemiSparse": EMULATED, "Float8Dynamic": EMULATED, "Int8Dynamic": EMULATED},
}


def left_out(made: Report) -> dict[str, str]:
    """The passes of a report that were not applied, by their short names: what became of them, and why."""
    rows = [step for step in made.steps if step.status != "applied"]
    return {step.name.partition("(")[0]: f"{step.status}: {step.reason}" for step in rows}


@torch.no_grad()
def answers(sam: Sam, batch: int = 1) -> list[Tensor]:
    """Embeddings, logits and predicted IoU of `sam(batched_input)` for a number of random pictures."""
    size = sam.image_encoder.img_size
    generator = torch.Generator().manual_seed(0)
    records = []
    for _ in range(batch):
        points = size * torch.rand(2, 3, 2, generator=generator)
        corners = size * torch.rand(2, 2, 2, generator=generator)
        record = {
            "image": 255 * torch.rand(3, size, size - 7, generator=generator),
            "original_size": (size, size - 7),
            "point_coords": points,
            "point_labels": torch.tensor([[1, 0, 1], [0, 1, -1]]),
            "boxes": torch.cat([corners.amin(1), corners.amax(1)], dim=1),
            "mask_inputs": torch.randn(2, 1, size // 4, size // 4, generator=generator),
        }
        records.append(record)
    outputs = sam(records, multimask_output=True)
    found = [output[name] for output in outputs for name in ("low_res_logits", "iou_predictions")]
    pixels = torch.stack([sam.preprocess(record["image"]) for record in records])
    return [sam.image_encoder(pixels), *found]


def public(model: nn.Module) -> dict[str, Any]:
    """Classes and public attributes of every module: plain values as they are, of others the type."""
    found: dict[str, Any] = {}
    for fqn, module in model.named_modules():
        found[fqn] = type(module)
        for name in (name for name in dir(module) if not name.startswith("_")):
            value = getattr(module, name)
            plain = isinstance(value, (bool, int, float, str, tuple, type(None)))
            kind = "callable" if callable(value) and not isinstance(value, nn.Module) else type(value)
            found[f"{fqn}.{name}"] = value if plain else kind
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_classes_and_attributes_stay(recipe: str, tiny256: Sam, optimised: Callable[[str], Sam]) -> None:
    ours = optimised(recipe)
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in tiny256.state_dict().items()
    }
    assert public(ours) == public(tiny256)
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("recipe", RECIPES)
def test_loading_another_checkpoint_equals_optimising_it(recipe: str, tmp_path: Path) -> None:
    other = random_sam(80, window=3, seed=1)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    ours = optimize(random_sam(80, window=3, seed=0), recipe, verify="off")
    before = answers(ours)
    ours.load_state_dict(torch.load(tmp_path / "other.pth", weights_only=True))
    assert_bit_equal(answers(ours), answers(optimize(other, recipe, verify="off")))
    assert not torch.equal(answers(ours)[0], before[0])


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("recipe", built_in())
def test_without_a_gpu_it_runs_and_reports_what_was_left_out_and_why(recipe: str, pictures: list[Sample]) -> None:
    ours = optimize(random_sam(), recipe, samples=pictures, verify="off")
    assert all(answer.isfinite().all() for answer in answers(ours))
    made = report(ours)
    outcomes, expected = left_out(made), LEFT_OUT_ON_A_CPU[recipe]
    assert outcomes.keys() == expected.keys()
    text = " ".join(str(made).split())
    for name, outcome in outcomes.items():
        assert re.match(expected[name], outcome)
        assert f"{name} {outcome}" in text


@pytest.mark.usefixtures("dynamo_only")
def test_on_a_cpu_max_answers_as_fast_does() -> None:
    ours, fast = (answers(optimize(random_sam(), recipe, verify="off")) for recipe in ("max", "fast"))
    assert_bit_equal(ours, fast)


@pytest.mark.usefixtures("dynamo_only")
def test_the_lossy_recipe_keeps_to_its_own_budget(tiny256: Sam) -> None:
    """Calibrated on drawn scenes, and measured on others."""
    budget = Recipe.of("blog").accuracy
    ours = optimize(tiny256, "blog", verify="off")
    made = report(ours)
    assert left_out(made).keys() == LEFT_OUT_ON_A_CPU["blog"].keys()
    emulated = {step.name.partition("(")[0] for step in made.steps if step.emulated}
    assert emulated == {"SemiSparse", "Int8Dynamic"}
    for name in emulated:
        assert f"{name} applied, emulated: in plain torch on this device" in str(made)
    agreement = samopt.verify(ours, Reference.record(tiny256, scene_samples(2, 256)))
    masks = agreement.masks
    assert masks is not None
    assert masks.truth is not None
    assert masks.reference_truth is not None
    assert budget.mean_iou <= masks.mean_iou < Recipe.of("fast").accuracy.mean_iou, "it costs more than fast may"
    assert masks.min_iou >= budget.min_iou
    assert min(kind.mean_iou for kind in agreement.kinds.values()) >= budget.kind_mean_iou
    assert masks.reference_truth - masks.truth <= budget.truth_drop


@pytest.mark.usefixtures("dynamo_only", "kernels_anywhere")
@pytest.mark.slow
def test_with_the_passes_for_a_gpu_it_keeps_its_budget_too(tiny256: Sam) -> None:
    made = report(optimize(tiny256, "fast", samples=scene_samples(2, 256)))  # a pass that only rounds is held to it
    assert [step.status for step in made.steps] == ["applied"] * len(made.steps)


@pytest.mark.usefixtures("dynamo_only")
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_and_pickles(recipe: str) -> None:
    ours = optimize(random_sam(), recipe, verify="off")
    expected = answers(ours)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bit_equal(answers(again), expected)
        assert [step.name for step in report(again).steps] == [step.name for step in report(ours).steps]
        assert ("not compiled" in str(report(again))) == any("Compile" in step.name for step in report(ours).steps)
    assert report(ours).notes == ()


@pytest.mark.parametrize("recipe", RECIPES)
def test_moves_between_devices_and_keeps_its_dtypes(recipe: str) -> None:
    ours = optimize(random_sam(), uncompiled(recipe), verify="off")
    expected = answers(ours)
    held = [tensor.dtype for tensor in (*ours.parameters(), *ours.buffers())]
    assert_bit_equal(answers(copy.deepcopy(ours).to("cpu")), expected)
    moved = copy.deepcopy(ours).to("meta")
    assert all(tensor.is_meta for tensor in (*moved.parameters(), *moved.buffers()))
    assert [tensor.dtype for tensor in (*moved.parameters(), *moved.buffers())] == held
    for change in (lambda: ours.half(), lambda: ours.to(torch.float64)):
        with pytest.raises(InvalidInput, match="CastDtype"):
            change()
    assert_bit_equal(answers(ours), expected)


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize(
    ("recipe", "without"),
    [
        ("blog", None),
        ("exact", None),
        ("fast", None),
        pytest.param("max", Int8Dynamic, id="max-float8"),
        pytest.param("max", Float8Dynamic, id="max-int8"),
    ],
)
def test_nothing_waits_for_the_gpu(recipe: str, without: type[Pass] | None, pictures: list[Sample]) -> None:
    """With all that a GPU with float8 would keep, and all that one without it would."""
    kept = [replace(step, keep="always") for step in uncompiled(recipe) if type(step.pass_) is not without]
    ours = optimize(random_sam(80, depth=4, window=3), kept, samples=pictures, verify="off")
    assert {step.status for step in report(ours).steps} == {"applied"}
    assert syncs_of(ours.image_encoder, encode) == []
    assert syncs_of(ours.prompt_encoder, prompt) == []


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
def test_the_unmodified_model_waits_for_the_gpu() -> None:
    sam = random_sam(80, depth=4, window=3)
    assert len(syncs_of(sam.image_encoder, encode)) >= 4
    assert len(syncs_of(sam.prompt_encoder, prompt)) >= 4


def syncs_of(module: nn.Module, use: Callable[[nn.Module], Any]) -> list[str]:
    with record_syncs() as syncs:
        use(on_fake_cuda(module))
    return [str(sync) for sync in syncs]


def encode(encoder: nn.Module) -> None:
    encoder(fake_cuda(torch.zeros(2, 3, 80, 80)))


def prompt(encoder: nn.Module) -> None:
    points = fake_cuda(torch.zeros(2, 3, 2)), fake_cuda(torch.zeros(2, 3, dtype=torch.int32))
    boxes, masks = fake_cuda(torch.zeros(2, 4)), fake_cuda(torch.zeros(2, 1, 20, 20))
    for arguments in ((points, None, None), (None, boxes, None), (points, boxes, masks), (None, None, masks)):
        encoder(*arguments)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("img_size", "window", "batch"), [(64, 14, 4), (80, 2, 3), (336, 14, 2), (512, 14, 1)])
def test_picture_sizes_and_batch_sizes(recipe: str, img_size: int, window: int, batch: int) -> None:
    sam = random_sam(img_size, window=window)
    ours = optimize(sam, uncompiled(recipe), verify="off")
    half, truth = copy.deepcopy(sam), copy.deepcopy(sam)
    CastDtype()(half)
    for part, method in ((truth.image_encoder, "forward"), (truth.mask_decoder, "predict_masks")):
        wrap(part.double(), method, cast_at_borders)
    plain = answers(sam if recipe == "exact" else half, batch)
    for mine, reference, expected in zip(answers(ours, batch), plain, answers(truth, batch), strict=True):
        assert mine.shape == expected.shape
        assert mine.dtype == torch.float32
        # Six numbers for predicted IoU may round well by luck, so that twice their error is not enough.
        assert relative_error(mine, expected) <= 2 * max(relative_error(reference, expected), 2**-22)


@pytest.fixture
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@functools.cache
def tiny1024() -> tuple[Sam, list[Sample]]:
    return load_tiny(), scene_samples(2)


@pytest.mark.slow
@pytest.mark.usefixtures("_all_cores")
@pytest.mark.parametrize("recipe", RECIPES)
def test_keeps_to_its_budget_at_full_size(recipe: str) -> None:
    sam, scenes = tiny1024()
    ours = optimize(sam, recipe, samples=scenes, verify="end")
    steps = report(ours).steps
    assert left_out(report(ours)).keys() == LEFT_OUT_ON_A_CPU[recipe].keys()
    agreement = steps[-1].agreement
    assert agreement is not None
    masks = agreement.masks
    assert masks is not None, "the weights are untrained"
    assert masks.truth is not None
    assert masks.reference_truth is not None
    assert masks.mean_iou >= (0.9999 if recipe == "exact" else 0.995)
    assert masks.min_iou >= 0.9
    assert abs(masks.truth - masks.reference_truth) <= 0.002


@pytest.mark.usefixtures("_all_cores")
@pytest.mark.parametrize("recipe", ["exact", "fast"])
def test_a_checkpoint_in_metas_format(recipe: str, vit_b: tuple[Path, Tensor, Tensor]) -> None:
    path, pixels, expected = vit_b
    sam = first_blocks(sam_model_registry["vit_b"](checkpoint=path))
    ours = optimize(sam, uncompiled(recipe), inplace=True, verify="off")
    assert ours is sam
    predictor = SamPredictor(ours)
    predictor.set_torch_image(pixels, (768, 1024))
    error = relative_error(predictor.get_image_embedding(), expected)
    assert 0 < error < (1e-5 if recipe == "exact" else 2**-6)  # float32 sums; bfloat16 has 8 bits
    masks, _, _ = predictor.predict(np.array([[500.0, 300.0]]), np.array([1]))
    assert masks.shape == (3, 768, 1024)


@pytest.fixture(scope="module")
def vit_b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tensor, Tensor]]:
    """A random checkpoint as Meta saves it, a picture, and the embedding that the unmodified model makes of it."""
    torch.manual_seed(0)
    sam = sam_model_registry["vit_b"]()
    randomise_positions(sam)
    path = tmp_path_factory.mktemp("checkpoint") / "sam_vit_b.pth"
    torch.save(sam.state_dict(), path)
    pixels = torch.randint(0, 256, (1, 3, 768, 1024), dtype=torch.uint8)
    predictor = SamPredictor(first_blocks(sam))
    predictor.set_torch_image(pixels, (768, 1024))
    yield path, pixels, predictor.get_image_embedding()
    path.unlink()


def first_blocks(sam: Sam) -> Sam:
    """A model left with three of its twelve blocks, the last one global: each kind, in less time."""
    sam.image_encoder.blocks = sam.image_encoder.blocks[:3]
    return sam
