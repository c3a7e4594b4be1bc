"""Scenes: the same from the same seed, exact masks, and worth segmenting."""

from __future__ import annotations

import subprocess
import sys

import cv2
import numpy as np
import pytest
import torch

from samopt.errors import InvalidInput
from samopt.tiny import Scene, draw_scene
from samopt.tiny.layout import OBJECTS, sample_layout
from samopt.tiny.raster import draw_batch, draw_single
from samopt.tiny.scenes import pick_point, scene_layout

SEEDS = range(40, 64)


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(seed, 256) for seed in SEEDS]


def test_same_seed_same_scene_whatever_the_threads() -> None:
    first = draw_scene(7, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    second = draw_scene(7, 256)
    torch.set_num_threads(threads)
    assert torch.equal(first.image, second.image)
    assert torch.equal(first.masks, second.masks)
    assert torch.equal(first.points, second.points)
    assert first.parents == second.parents
    assert not torch.equal(first.image, draw_scene(8, 256).image)


@pytest.mark.parametrize("seed", [3, 11])
def test_layout_does_not_depend_on_size(seed: int) -> None:
    small, large = draw_scene(seed, 256), draw_scene(seed, 768)
    assert small.parents == large.parents
    for low, high in zip(small.masks, large.masks, strict=True):
        shrunk = high[1::3, 1::3]
        assert float((low & shrunk).sum() / (low | shrunk).sum()) > 0.8
    assert (large.points / 3 - small.points).abs().max() <= 4


def test_shapes_and_types(scenes: list[Scene]) -> None:
    for scene in scenes:
        count = len(scene.masks)
        assert scene.image.shape == (256, 256, 3)
        assert scene.image.dtype == torch.uint8
        assert scene.masks.shape == (count, 256, 256)
        assert scene.masks.dtype == torch.bool
        assert scene.points.shape == (count, 2)
        assert scene.points.dtype == torch.int64
        assert len(scene.parents) == count


def test_wholes_contain_their_parts_and_others_are_disjoint(scenes: list[Scene]) -> None:
    for scene in scenes:
        for i, mask in enumerate(scene.masks):
            for j in range(i):
                if scene.parents[i] == j:
                    assert not bool((mask & ~scene.masks[j]).any())
                elif scene.parents[j] == i:
                    assert not bool((scene.masks[j] & ~mask).any())
                else:
                    assert not bool((mask & scene.masks[j]).any())


def test_points_lie_on_their_object_alone(scenes: list[Scene]) -> None:
    for scene in scenes:
        for index, (x, y) in enumerate(scene.points.tolist()):
            holders = {other for other in range(len(scene.masks)) if scene.masks[other, y, x]}
            assert holders == {index} | {whole for whole in [scene.parents[index]] if whole is not None}


def test_scenes_have_parts_and_enough_small_objects(scenes: list[Scene]) -> None:
    shares = torch.cat([scene.masks.float().mean((1, 2)) for scene in scenes])
    assert float((shares < 0.01).float().mean()) >= 0.2
    assert float(shares.min()) > 0.001
    parts = [sum(parent is not None for parent in scene.parents) for scene in scenes]
    assert np.mean(parts) >= 2
    assert np.mean([len(scene.masks) for scene in scenes]) >= 8


def test_flood_fill_from_the_point_scores_below_0_6(scenes: list[Scene]) -> None:
    """The best of many tolerances, with and without a fixed reference colour, on the denoised picture."""
    tolerances = (4, 8, 12, 16, 20, 24, 32, 40, 50, 64)
    means = []
    for tolerance in tolerances:
        for flags in (0, cv2.FLOODFILL_FIXED_RANGE):
            scores = []
            for scene in scenes[:12]:
                picture = cv2.medianBlur(scene.image.numpy(), 3)
                for truth, point in zip(scene.masks.numpy(), scene.points.tolist(), strict=True):
                    filled = np.zeros((258, 258), np.uint8)
                    step = (tolerance,) * 3
                    options = 4 | flags | cv2.FLOODFILL_MASK_ONLY | (1 << 8)
                    cv2.floodFill(picture, filled, tuple(point), 0, step, step, options)
                    found = filled[1:-1, 1:-1] > 0
                    scores.append((found & truth).sum() / (found | truth).sum())
            means.append(np.mean(scores))
    assert 0.2 < max(means) < 0.6


def test_a_batch_draws_what_single_scenes_are() -> None:
    for seed in (1, 2):
        layout = scene_layout(seed)
        images, ids = draw_batch(layout, 128)
        image, expected = draw_single(layout, 128)
        assert image is not None
        assert torch.equal(ids[0], expected)
        assert torch.equal(images[0], image)


def test_layouts_are_sorted_so_that_parts_follow_their_whole() -> None:
    layout = sample_layout(torch.Generator().manual_seed(0), 16)
    assert layout.kind.shape == (16, OBJECTS)
    for parents in layout.parent.tolist():
        for index, parent in enumerate(parents):
            assert parent < index
            if parent >= 0:
                assert all(parents[other] == parent for other in range(parent + 1, index))


def test_pick_point_prefers_the_inside_and_takes_what_there_is() -> None:
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[5:30, 8:33] = True
    x, y = pick_point(mask, 0.5)
    assert 12 <= x <= 28
    assert 9 <= y <= 25
    single = torch.zeros(40, 40, dtype=torch.bool)
    single[0, 39] = True
    assert pick_point(single, 0.99) == (39, 0)


def test_refuses_bad_arguments() -> None:
    with pytest.raises(InvalidInput, match="seed is -1"):
        draw_scene(-1)
    with pytest.raises(InvalidInput, match="size is 32"):
        draw_scene(0, 32)


def test_importing_the_package_loads_neither_torch_nor_segment_anything() -> None:
    code = (
        "import sys; before = set(sys.modules); import samopt; known = set(sys.modules); import samopt.tiny; "
        "new = set(sys.modules) - known; assert not {'torch', 'segment_anything', 'torchvision'} & new, new; "
        "assert 'segment_anything' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
