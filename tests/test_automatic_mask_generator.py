"""Automatic mask generation against Meta's, on drawn scenes."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from segment_anything import SamAutomaticMaskGenerator
from segment_anything.modeling import Sam
from segment_anything.utils import amg
from torch import Tensor

from samopt import AutomaticMaskGenerator, InvalidInput, memory, optimize
from samopt.automatic_mask_generator import _Found
from samopt.mask_search import Found, Search
from samopt.masks import mask_of
from samopt.passes import CastDtype, SDPAttention
from samopt.room import Room
from samopt.samples import scene_samples
from tests.numerics import read_only

Image = NDArray[np.uint8]
Records = list[dict[str, Any]]

# The embedded model rates few masks of small scenes as high as Meta's defaults ask.
LOOSE: dict[str, Any] = {
    "points_per_side": 8,
    "pred_iou_thresh": 0.5,
    "stability_score_thresh": 0.7,
    "box_nms_thresh": 0.97,
}
FEW: dict[str, Any] = {**LOOSE, "points_per_side": 5}


@pytest.fixture(scope="module")
def scenes() -> list[Image]:
    return [sample.image for sample in scene_samples(2, 256)]


@pytest.fixture(scope="module")
def metas(tiny256: Sam, scenes: list[Image]) -> Callable[..., Records]:
    """What Meta's generator finds in the first scene, once per set of arguments."""

    @functools.cache
    def generate(**arguments: Any) -> Records:
        return SamAutomaticMaskGenerator(tiny256, **arguments).generate(scenes[0])

    def metas(**arguments: Any) -> Records:
        return generate(**{name: Grids(value) if name == "point_grids" else value for name, value in arguments.items()})

    return metas


class Grids(list[Any]):
    """Point grids that can be a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def pixels(record: dict[str, Any]) -> NDArray[np.bool_]:
    found = record["segmentation"]
    return found if isinstance(found, np.ndarray) else mask_of(found)


def in_order(records: Records) -> Records:
    return sorted(records, key=lambda record: (record["area"], record["bbox"], record["point_coords"]))


def assert_same(ours: Records, theirs: Records) -> None:
    """The same masks, but for pixels that rounding may flip, with the same numbers, in the same types."""
    assert len(ours) == len(theirs)
    for mine, other in zip(in_order(ours), in_order(theirs), strict=True):
        assert list(mine) == list(other)
        for name in ("area", "predicted_iou", "stability_score", "bbox", "point_coords", "crop_box"):
            assert type(mine[name]) is type(other[name]), name
        one, two = pixels(mine), pixels(other)
        assert one.dtype == two.dtype == np.bool_
        assert one.shape == two.shape
        assert (one & two).sum() >= 0.999 * (one | two).sum()
        assert mine["area"] == one.sum()
        assert (mine["bbox"], mine["crop_box"]) == (other["bbox"], other["crop_box"])
        assert mine["point_coords"] == other["point_coords"]
        assert mine["predicted_iou"] == pytest.approx(other["predicted_iou"], abs=1e-4)
        assert mine["stability_score"] == pytest.approx(other["stability_score"], abs=1e-4, nan_ok=True)


def test_the_records_are_metas(tiny256: Sam, scenes: list[Image], metas: Callable[..., Records]) -> None:
    ours = [AutomaticMaskGenerator(tiny256, **LOOSE).generate(scene) for scene in scenes]
    theirs = [metas(**LOOSE), SamAutomaticMaskGenerator(tiny256, **LOOSE).generate(scenes[1])]
    for mine, other in zip(ours, theirs, strict=True):
        assert len(other) >= 20
        assert_same(mine, other)


@pytest.mark.parametrize(
    "arguments",
    [
        {"points_per_side": 3},
        {"points_per_side": None, "point_grids": [np.array([[0.2, 0.3], [0.5, 0.5], [0.71, 0.9]])]},
        {"pred_iou_thresh": 0.75},
        {"pred_iou_thresh": 0.0},
        {"stability_score_thresh": 0.9},
        {"stability_score_thresh": 0.0},
        {"stability_score_offset": 3.0},
        {"box_nms_thresh": 0.5},
        {"min_mask_region_area": 120},
        {"min_mask_region_area": 120, "box_nms_thresh": 0.8, "crop_nms_thresh": 0.6},
    ],
    ids=str,
)
def test_every_argument_means_what_it_does_in_metas(
    tiny256: Sam, scenes: list[Image], metas: Callable[..., Records], arguments: dict[str, Any]
) -> None:
    theirs = metas(**{**FEW, **arguments})
    assert_same(AutomaticMaskGenerator(tiny256, **{**FEW, **arguments}).generate(scenes[0]), theirs)
    numbers = [[(record["area"], record["stability_score"]) for record in found] for found in (theirs, metas(**FEW))]
    assert numbers[0] != numbers[1], "the argument changes something on this scene"


def test_of_duplicates_that_removed_regions_make_the_untouched_mask_is_kept(tiny256: Sam) -> None:
    """Three squares: one with an island, the same without, and a third that overlaps them by half."""
    masks = torch.zeros(3, 60, 50, dtype=torch.bool)
    masks[:2, 10:30, 10:30] = masks[2, 16:36, 10:30] = True
    masks[0, 50:52, 40:42] = True
    rles = amg.mask_to_rle_pytorch(masks)
    boxes = amg.batched_mask_to_box(masks)
    data = amg.MaskData(rles=copy.deepcopy(rles), boxes=boxes.numpy(), ids=np.arange(3))
    SamAutomaticMaskGenerator.postprocess_small_regions(data, 5, 0.9)
    found = [
        _Found(rle, box, iou=0.0, stability=0.0, point=[float(index)] * 2, crop=(0, 0, 50, 60))
        for index, (rle, box) in enumerate(zip(rles, boxes.tolist(), strict=True))
    ]
    generator = AutomaticMaskGenerator(tiny256, min_mask_region_area=5, box_nms_thresh=0.3, crop_nms_thresh=0.9)
    kept = generator._without_small_regions(found)
    assert [mask.point[0] for mask in kept] == data["ids"].tolist() == [1, 2]
    assert [mask.rle for mask in kept] == data["rles"]
    assert [mask.box for mask in kept] == data["boxes"].tolist()


CROPS: dict[str, Any] = {**FEW, "points_per_side": 4, "crop_n_layers": 1, "crop_nms_thresh": 0.95}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"crop_nms_thresh": 0.4, "crop_overlap_ratio": 0.6},
        {"crop_n_points_downscale_factor": 2, "output_mode": "uncompressed_rle", "min_mask_region_area": 60},
    ],
    ids=str,
)
def test_crops_are_searched_as_metas_does(
    tiny256: Sam, scenes: list[Image], metas: Callable[..., Records], arguments: dict[str, Any]
) -> None:
    theirs = metas(**{**CROPS, **arguments})
    assert_same(AutomaticMaskGenerator(tiny256, **{**CROPS, **arguments}).generate(scenes[0]), theirs)
    assert len({tuple(record["crop_box"]) for record in theirs}) > 2
    numbers = [[(record["area"], record["stability_score"]) for record in found] for found in (theirs, metas(**CROPS))]
    assert (numbers[0] == numbers[1]) == (not arguments)


@pytest.mark.parametrize("mode", ["uncompressed_rle", "coco_rle"])
def test_run_lengths_are_metas(tiny256: Sam, scenes: list[Image], metas: Callable[..., Records], mode: str) -> None:
    ours = AutomaticMaskGenerator(tiny256, **FEW, output_mode=mode).generate(scenes[0])
    assert ours
    assert [record["segmentation"] for record in ours] == [
        record["segmentation"] for record in metas(**FEW, output_mode=mode)
    ]


ALL: dict[str, Any] = {
    "points_per_side": 2,
    "pred_iou_thresh": 0.0,
    "stability_score_thresh": 0.0,
    "box_nms_thresh": 1.0,
}


@pytest.mark.parametrize("size", [(1, 1), (37, 200), (200, 37), (300, 410)])
def test_images_of_any_size(tiny256: Sam, scenes: list[Image], size: tuple[int, int]) -> None:
    image = np.tile(scenes[0], (2, 2, 1))[: size[0], : size[1]]
    theirs = SamAutomaticMaskGenerator(tiny256, **ALL).generate(image)
    assert len(theirs) == 12
    assert_same(AutomaticMaskGenerator(tiny256, **ALL).generate(image), theirs)


def test_a_layer_of_crops_may_have_more_crops_than_pixels(tiny256: Sam, scenes: list[Image]) -> None:
    """Meta's fails here, at a crop without a pixel."""
    (record, *_) = AutomaticMaskGenerator(tiny256, **ALL, crop_n_layers=1).generate(scenes[0][:1, :1])
    assert record["crop_box"] == [0, 0, 1, 1]


def test_nothing_is_found_where_nothing_passes(tiny256: Sam, scenes: list[Image]) -> None:
    for threshold in ("pred_iou_thresh", "stability_score_thresh"):
        arguments = {**CROPS, "points_per_side": 2, threshold: 1.1, "min_mask_region_area": 9}
        assert AutomaticMaskGenerator(tiny256, **arguments).generate(scenes[0]) == []


def count_batches(model: Sam, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Fills, as the model is used, how many images, prompts and masks it gets at a time."""
    seen: dict[str, list[int]] = {"images": [], "prompts": [], "masks": []}

    def counted(name: str, inner: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name].append(count(*args, **kwargs))
            return inner(*args, **kwargs)

        return call

    encoder, decoder = model.image_encoder.forward, model.mask_decoder.forward
    monkeypatch.setattr(model.image_encoder, "forward", counted("images", encoder, len))
    prompts = counted("prompts", decoder, lambda sparse_prompt_embeddings, **_: len(sparse_prompt_embeddings))
    monkeypatch.setattr(model.mask_decoder, "forward", prompts)

    def count_masks(masks: Tensor, *_: Any) -> int:
        return masks.shape[0] * masks.shape[1]

    monkeypatch.setattr(model, "postprocess_masks", counted("masks", model.postprocess_masks, count_masks))
    return seen


def test_images_are_encoded_together_with_the_same_result(
    tiny256: Sam, scenes: list[Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [scenes[0], scenes[1][:90, :200]]
    generator = AutomaticMaskGenerator(tiny256, **{**CROPS, "points_per_side": 3})
    alone = [generator.generate(image) for image in images]
    seen = count_batches(tiny256, monkeypatch)
    together = generator.generate_batch(images)
    assert seen["images"] == [8, 2], "the whole and four crops of each"
    assert [len(found) > 3 for found in together] == [True, True]
    for mine, other in zip(together, alone, strict=True):
        assert_same(mine, other)
    assert generator.generate_batch([]) == []


@pytest.mark.parametrize("points_per_batch", [None, 6])
def test_pieces_make_no_difference(
    tiny256: Sam,
    scenes: list[Image],
    metas: Callable[..., Records],
    monkeypatch: pytest.MonkeyPatch,
    points_per_batch: int | None,
) -> None:
    seen = count_batches(tiny256, monkeypatch)
    monkeypatch.setattr(memory, "CPU_BYTES", 20 << 20)  # ten prompts of a model of 256 px, or fifteen masks
    AutomaticMaskGenerator(tiny256, **{**FEW, "points_per_batch": points_per_batch}).generate(scenes[0])
    assert seen["prompts"] == ([9, 9, 7] if points_per_batch is None else [6, 6, 6, 6, 1])
    assert max(seen["masks"]) <= 16
    ours = AutomaticMaskGenerator(tiny256, **FEW, points_per_batch=points_per_batch).generate(scenes[0])
    assert_same(ours, metas(**FEW))


def test_all_prompts_are_decoded_at_once_where_memory_allows(
    tiny256: Sam, scenes: list[Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_batches(tiny256, monkeypatch)
    AutomaticMaskGenerator(tiny256, **LOOSE).generate(scenes[0])
    assert seen["prompts"] == [64]
    assert sum(seen["masks"]) < 64 * 3 + 64, "masks the model rates too low are never upscaled"


def test_an_optimised_model_finds_what_metas_generator_finds_with_it(tiny256: Sam, scenes: list[Image]) -> None:
    fast = optimize(tiny256, [SDPAttention(), CastDtype("bfloat16")], verify="off")
    theirs = SamAutomaticMaskGenerator(fast, **FEW).generate(scenes[0])
    assert len(theirs) > 10
    assert_same(AutomaticMaskGenerator(fast, **FEW).generate(scenes[0]), theirs)


def test_a_model_that_takes_bgr_gets_it(tiny256: Sam, scenes: list[Image]) -> None:
    model = copy.copy(tiny256)
    model.image_format = "BGR"
    arguments = {**FEW, "points_per_side": 3}
    ours = AutomaticMaskGenerator(model, **arguments).generate(scenes[0])
    assert ours
    assert_same(ours, SamAutomaticMaskGenerator(model, **arguments).generate(scenes[0]))


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_an_image_that_must_not_be_written_to(tiny256: Sam, scenes: list[Image], image_format: str) -> None:
    model = copy.copy(tiny256)
    model.image_format = image_format
    generator = AutomaticMaskGenerator(model, **{**FEW, "points_per_side": 3, "crop_n_layers": 1})
    expected = generator.generate(scenes[0])
    assert expected
    assert_same(generator.generate(read_only(scenes[0])), expected)


def test_threads_may_share_a_generator(tiny256: Sam, scenes: list[Image]) -> None:
    generator = AutomaticMaskGenerator(tiny256, **{**FEW, "points_per_batch": 5})
    before = dict(vars(generator))
    alone = [generator.generate(scene) for scene in scenes]
    with ThreadPoolExecutor(2) as pool:
        for mine, other in zip(pool.map(generator.generate, scenes), alone, strict=True):
            assert_same(mine, other)
    assert vars(generator) == before


@pytest.mark.parametrize("room", [Room(), Room(rated=3, stable=2, rounds=1, kept=1, changes=1)])
def test_the_room_for_masks_makes_no_difference(
    tiny256: Sam, scenes: list[Image], metas: Callable[..., Records], room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Room | None] = []
    run = Search.run

    def counted(self: Search, room: Room | None) -> Found:
        runs.append(room)
        return run(self, room)

    monkeypatch.setattr(Search, "run", counted)
    generator = AutomaticMaskGenerator(tiny256, **FEW, crop_n_layers=1)
    generator._room = room  # as on a GPU
    for _ in range(2):
        assert_same(generator.generate(scenes[0]), metas(**FEW, crop_n_layers=1))
    views = 5
    first = len(runs) - views  # the second call knows what the first one took
    assert first == views if room == Room() else views < first <= 5 * views


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points_per_side": None}, "pass points_per_side or point_grids, one of the two: the other must be None"),
        ({"point_grids": [np.zeros((1, 2))]}, "pass points_per_side or point_grids, one of the two"),
        ({"points_per_side": 0}, r"points_per_side is 0; it must be a whole number of at least 1"),
        ({"points_per_batch": 0}, r"points_per_batch is 0; it must be a whole number of at least 1"),
        ({"points_per_batch": 1.5}, r"points_per_batch is 1\.5; it must be a whole number"),
        ({"crop_n_layers": -1}, r"crop_n_layers is -1; it must be a whole number of at least 0"),
        ({"crop_overlap_ratio": 1.5}, r"crop_overlap_ratio is 1\.5; it must be from 0 to 1"),
        (
            {"points_per_side": 3, "crop_n_layers": 2, "crop_n_points_downscale_factor": 2},
            r"points_per_side=3 and crop_n_points_downscale_factor=2 leave layer 2 without points; raise the first",
        ),
        ({"crop_n_points_downscale_factor": 0}, r"crop_n_points_downscale_factor is 0; it must be a whole number"),
        (
            {"points_per_side": None, "point_grids": [np.zeros((1, 2))], "crop_n_layers": 1},
            r"point_grids has 1 grids, but crop_n_layers=1 needs 2, one for the whole image and one per layer",
        ),
        (
            {"points_per_side": None, "point_grids": [np.zeros((4, 3))]},
            r"point_grids\[0\] must be points \(x, y\), an array \[N, 2\], not \[4, 3\]",
        ),
        ({"output_mode": "rle"}, "output_mode is 'rle'; it must be one of binary_mask, uncompressed_rle, coco_rle"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tiny256: Sam, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AutomaticMaskGenerator(tiny256, **arguments)


def test_a_model_or_an_image_that_cannot_be_used_is_refused(tiny256: Sam) -> None:
    with pytest.raises(InvalidInput, match="Linear is no Sam"):
        AutomaticMaskGenerator(torch.nn.Linear(1, 1))
    generator = AutomaticMaskGenerator(tiny256)
    good = np.zeros((8, 8, 3), dtype=np.uint8)
    with pytest.raises(InvalidInput, match=r"image: an image must be a uint8 array \[H, W, 3\]"):
        generator.generate(good.astype(np.float32))
    with pytest.raises(InvalidInput, match=r"image 1: an image must be .*; repeat grey"):
        generator.generate_batch([good, good[..., 0]])
    with pytest.raises(InvalidInput, match="1 x 999 pixels are too narrow"):
        generator.generate(np.zeros((999, 1, 3), dtype=np.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("arguments", [LOOSE, CROPS, {**LOOSE, "min_mask_region_area": 120}], ids=str)
def test_on_a_gpu_the_records_are_metas(tiny256: Sam, scenes: list[Image], arguments: dict[str, Any]) -> None:
    model = copy.deepcopy(tiny256).to("cuda")
    theirs = SamAutomaticMaskGenerator(model, **arguments).generate(scenes[0])
    ours = AutomaticMaskGenerator(model, **arguments)
    for _ in range(2):
        assert_same(ours.generate(scenes[0]), theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recipe", ["exact", "fast"])
def test_a_gpu_is_waited_for_once(tiny256: Sam, scenes: list[Image], recipe: str) -> None:
    generator = AutomaticMaskGenerator(
        optimize(copy.deepcopy(tiny256).to("cuda"), recipe, verify="off"), **FEW, output_mode="coco_rle"
    )
    for _ in range(3):  # compiled, its graph captured, and the room found
        generator.generate(scenes[0])
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            generator.generate(scenes[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [str(wait.message) for wait in waits if "called a synchronizing" in str(wait.message)]
    assert len(found) == 2, found  # the picture comes to the GPU, and the masks from it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_stays_the_same(tiny256: Sam) -> None:
    generator = AutomaticMaskGenerator(optimize(copy.deepcopy(tiny256).to("cuda"), "fast", verify="off"), **LOOSE)
    pictures = [sample.image[: 256 - 8 * index] for index, sample in enumerate(scene_samples(5, 256))]
    held = []
    for turn in range(200):
        generator.generate(pictures[turn % 5])
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held[50:])) == 1
