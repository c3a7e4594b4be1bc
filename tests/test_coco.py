"""COCO instances as samples: what is read, and the published protocol's mIoU against plain SamPredictor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from segment_anything import SamPredictor
from segment_anything.modeling import Sam

from samopt import Reference
from samopt.coco import coco_samples, foreground_point
from samopt.errors import InvalidInput
from samopt.samples import scene_samples
from samopt.verify import compare
from tests.instances import write_instances

Mask = NDArray[np.bool_]


def disc(size: tuple[int, int], x: int, y: int, radius: int) -> Mask:
    rows, columns = np.ogrid[: size[0], : size[1]]
    return (columns - x) ** 2 + (rows - y) ** 2 <= radius**2


def test_the_published_miou_is_what_sam_predictor_gives(tiny256: Sam, tmp_path: Path) -> None:
    pictures, masks = [], []
    for scene, height in zip(scene_samples(3, 256), (256, 216, 176), strict=True):
        assert scene.masks is not None
        pictures.append(scene.image[:height])
        masks.append([*scene.masks[:, :height]])
    path = write_instances(tmp_path, pictures, masks)

    predictor, ious = SamPredictor(tiny256), []
    for picture, objects in zip(pictures, masks, strict=True):
        predictor.set_image(picture)
        for mask in objects:
            if not mask.any():
                continue
            row, column = np.argwhere(mask).mean(axis=0).round().astype(int)
            if not mask[row, column]:
                distance = ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
                row, column = np.unravel_index(distance.argmax(), mask.shape)
            answers, rated, _ = predictor.predict(np.array([[column, row]]), np.array([1]), multimask_output=True)
            best = answers[rated.argmax()]
            ious.append((best & mask).sum() / (best | mask).sum())

    reference = Reference.record(tiny256, coco_samples(path, tmp_path), kinds=("point",), objects=None)
    found = compare(reference.outputs, reference)
    assert found.masks is not None
    assert len(found.masks.ious) == len(ious) > 12, "every annotation counts, and more than four of a picture"
    assert list(found.kinds) == ["point"]
    assert found.masks.truth == pytest.approx(np.mean(ious), abs=2e-4)
    assert 0.5 < np.mean(ious) < 0.99


def test_every_form_of_annotation_is_read_in_the_order_of_ids(tmp_path: Path) -> None:
    size = (40, 60)
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    square = [[10.0, 5.0, 20.0, 5.0, 20.0, 15.0, 10.0, 15.0]]
    counts = {"size": list(size), "counts": [0, 40, 40 * 59]}  # the first column
    nothing = np.zeros(size, dtype=np.bool_)
    path = write_instances(
        tmp_path, [picture, picture[::-1]], [[square, counts, nothing, disc(size, 40, 20, 9)], [nothing]]
    )
    (sample,) = coco_samples(path, tmp_path)  # the second picture has nothing but an empty mask
    assert np.array_equal(sample.image, picture)
    assert sample.masks is not None
    assert sample.points is not None
    assert len(sample.masks) == 3, "a crowd counts, an empty mask has no point"
    rows, columns = np.nonzero(sample.masks[0])
    assert (rows.min(), columns.min()) == (5, 10)
    assert np.array_equal(np.nonzero(sample.masks[1])[1], np.zeros(40))
    assert sample.points[2].tolist() == [40, 20]


def test_pictures_are_spread_over_the_file(tmp_path: Path) -> None:
    pictures = [np.full((16, 16, 3), index, dtype=np.uint8) for index in range(7)]
    masks: list[list[Any]] = [[disc((16, 16), 8, 8, 3)] for _ in pictures]
    masks[6] = []  # of the lowest id, and without annotations
    path = write_instances(tmp_path, pictures, masks)
    assert [int(sample.image[0, 0, 0]) for sample in coco_samples(path, tmp_path, limit=2)] == [5, 0]
    assert len(coco_samples(path, tmp_path)) == 6


def test_the_point_is_the_centre_of_mass_or_far_inside() -> None:
    size = (50, 70)
    assert foreground_point(disc(size, 30, 20, 10)).tolist() == [30, 20]
    uneven = np.zeros(size, dtype=np.bool_)
    uneven[10, 10:14] = True  # its centre is 11.5: halves go to even, as in Python's round
    assert foreground_point(uneven).tolist() == [12, 10]
    ring = disc(size, 30, 25, 20) & ~disc(size, 26, 25, 12)
    x, y = foreground_point(ring).astype(int)
    distance = ndimage.distance_transform_edt(ring)
    assert distance[y, x] == distance.max()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file of COCO annotations"),
        ("{", "not a file of COCO annotations"),
        ("[]", "not a file of COCO annotations"),
        ("{}", "needs images and annotations"),
        ('{"images": [{"id": 1}], "annotations": [{"id": 2, "image_id": 1, "caption": "a cat"}]}', "annotation 2"),
        ('{"images": [{"id": 1}], "annotations": [{"id": 2, "image_id": 5}]}', "no picture in it has an object"),
    ],
)
def test_files_that_are_no_instances(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "instances.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        coco_samples(path, tmp_path)


def test_pictures_that_do_not_fit(tmp_path: Path) -> None:
    picture, mask = np.zeros((16, 24, 3), dtype=np.uint8), disc((16, 24), 8, 8, 3)
    path = write_instances(tmp_path, [picture], [[mask]])
    with pytest.raises(InvalidInput, match="nowhere: there is no such folder"):
        coco_samples(path, tmp_path / "nowhere")
    Image.fromarray(picture.transpose(1, 0, 2)).save(tmp_path / "0.png")
    with pytest.raises(InvalidInput, match=r"0.png: 16 x 24 pixels, and .*instances.json says 24 x 16"):
        coco_samples(path, tmp_path)
    (tmp_path / "0.png").unlink()
    with pytest.raises(InvalidInput, match=r"0.png: there is no such image"):
        coco_samples(path, tmp_path)
