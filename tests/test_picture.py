from __future__ import annotations

import copy
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from segment_anything.modeling import Sam

from samopt.picture import compare_masks, overlay, save_comparison
from samopt.samples import Sample, scene_samples


def test_equal_models_differ_nowhere(tiny256: Sam, tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    share = save_comparison(tiny256, tiny256, scene_samples(1, 256)[0], out)
    assert share == 0
    with Image.open(out) as image:
        assert image.width > 3 * image.height


def test_a_photo_without_prompts_gets_a_grid(tiny256: Sam, tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    assert save_comparison(tiny256, tiny256, Sample(photo), tmp_path / "picture.png") == 0


def test_overlay_tints_masks_and_leaves_the_picture() -> None:
    image = np.full((40, 40, 3), 200, dtype=np.uint8)
    masks = np.zeros((1, 40, 40), dtype=bool)
    masks[0, 10:30, 10:30] = True
    drawn = overlay(image, masks)
    assert (image == 200).all()
    assert len(np.unique(drawn[~masks[0]])) == 1
    assert not (drawn[20, 20] == drawn[0, 0]).all()


def test_a_large_photo_is_shrunk_and_any_name_is_a_png(tiny256: Sam, tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (2000, 60, 3), dtype=np.uint8)
    masks = np.zeros((1, 2000, 60), dtype=bool)
    masks[0, 1900:] = True
    sample = Sample(photo, masks, np.array([[30.0, 1950.0]]))
    assert save_comparison(tiny256, tiny256, sample, tmp_path / "picture") == 0
    with Image.open(tmp_path / "picture") as image:
        assert image.format == "PNG"


def test_each_panel_shows_what_its_title_says(tiny256: Sam) -> None:
    other, scene = copy.deepcopy(tiny256), scene_samples(1, 256)[0]
    with torch.no_grad():
        other.mask_decoder.mask_tokens.weight.add_(0.3)
    found, same = compare_masks(tiny256, other, scene), compare_masks(tiny256, tiny256, scene)
    titles = [title for title, _ in same.panels()]
    assert titles[1:3] == ["unmodified", "optimised (another mask chosen at 0 points)"]
    assert titles[3] == "differ: 0.000% of the pixels (drawn larger)"
    assert (found.image == scene.image).all(axis=2).mean() > 0.95, "all but its points"
    assert (found.before == same.before).all()
    assert (same.after == same.before).all()
    assert (found.after != same.after).any()
    red = (found.difference == (255, 0, 0)).all(axis=2)
    assert red.mean() > found.share > 0
    assert not (same.difference == (255, 0, 0)).all(axis=2).any()
    assert scene.points is not None
    x, y = scene.points.astype(int)[0]
    assert all((panel[y, x] == 255).all() for panel in (found.image, found.before, found.after)), "its points are drawn"
    with Image.open(io.BytesIO(found._repr_jpeg_())) as image:
        assert image.format == "JPEG"
        assert image.width > 3 * image.height
