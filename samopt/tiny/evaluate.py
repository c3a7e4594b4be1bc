"""Scores a Sam on scenes, through segment_anything's own modules and in the model's own precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .scenes import Scene, draw_scene, pick_point

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

# Seeds from here on are for scoring; training draws its layouts from another stream.
FIRST_SEED = 1_000_000
KINDS = ("point", "point_oracle", "points3", "box", "box_point", "mask_point", "mask_two_points")


def mask_iou(predicted: Tensor, truth: Tensor) -> Tensor:
    """IoU of bool masks [N, H, W], float32 [N]; two empty masks agree."""
    intersection = (predicted & truth).flatten(1).sum(1)
    union = (predicted | truth).flatten(1).sum(1)
    return torch.where(union == 0, 1.0, intersection / union.clamp(min=1))


def mask_boxes(masks: Tensor) -> Tensor:
    """Boxes float32 [N, 4] (left, top, right, bottom; last pixel included) of non-empty masks [N, H, W]."""
    columns, rows = masks.any(1).to(torch.uint8), masks.any(2).to(torch.uint8)
    edges = [
        columns.argmax(1),
        rows.argmax(1),
        columns.shape[1] - 1 - columns.flip(1).argmax(1),
        rows.shape[1] - 1 - rows.flip(1).argmax(1),
    ]
    return torch.stack(edges, dim=1).float()


class _Prompter:
    """One encoded image and the ways to ask about it."""

    def __init__(self, sam: Sam, image: Tensor) -> None:
        self.sam = sam
        self.size = image.shape[0]
        chw = image.permute(2, 0, 1)[None].float()
        self.embedding = sam.image_encoder(sam.preprocess(chw))

    def ask(
        self,
        points: Tensor | None = None,
        labels: Tensor | None = None,
        boxes: Tensor | None = None,
        masks: Tensor | None = None,
        three: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masks bool [N, K, H, W], predicted IoU [N, K] and low-resolution logits [N, K, l, l]."""
        sam = self.sam
        given = None if points is None else (points, labels)
        sparse, dense = sam.prompt_encoder(points=given, boxes=boxes, masks=masks)
        logits, quality = sam.mask_decoder(
            image_embeddings=self.embedding,
            image_pe=sam.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=three,
        )
        full = sam.postprocess_masks(logits, (self.size, self.size), (self.size, self.size))
        return full > sam.mask_threshold, quality, logits


def _more_points(scene: Scene) -> Tensor:
    """Two further points on each object, [N, 2, 2]."""
    points = [[pick_point(mask, 1 / 4), pick_point(mask, 3 / 4)] for mask in scene.masks]
    return torch.tensor(points, dtype=torch.float32, device=scene.masks.device)


def _corrections(predicted: Tensor, truth: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """A point per object where the answer is wrong (or the first point again), [N, 1, 2], and its labels [N, 1]."""
    chosen, labels = [], []
    for answer, mask, point in zip(predicted, truth, points, strict=True):
        wrong = answer != mask
        x, y = pick_point(wrong, 0.5) if bool(wrong.any()) else (int(point[0]), int(point[1]))
        chosen.append([[x, y]])
        labels.append([int(mask[y, x])])
    device = truth.device
    return torch.tensor(chosen, dtype=torch.float32, device=device), torch.tensor(labels, device=device)


@torch.no_grad()
def score_scene(sam: Sam, scene: Scene) -> dict[str, Tensor]:
    """IoU per object, [N] on the CPU, for each of ``KINDS``.

    - ``point``: one point, the mask of three with the highest predicted IoU; ``point_oracle``: the best of the three.
    - ``points3``, ``box``, ``box_point``: three points; the box; box and point; single-mask output.
    - ``mask_point``: the low-resolution logits of ``point`` fed back with the same point; ``mask_two_points``: with one
      more point where that answer was wrong; single-mask output.
    """
    truth = scene.masks
    first = scene.points[:, None].float()
    ones = torch.ones(len(first), 1, dtype=torch.int64, device=first.device)
    boxes = mask_boxes(truth)
    prompter = _Prompter(sam, scene.image)
    masks, quality, logits = prompter.ask(first, ones, three=True)
    every = torch.stack([mask_iou(masks[:, k], truth) for k in range(3)], dim=1)
    row = torch.arange(len(first), device=first.device)
    pick = quality.argmax(1)
    answer, low = masks[row, pick], logits[row, pick][:, None]
    correction, label = _corrections(answer, truth, scene.points)
    three = torch.cat([first, _more_points(scene)], dim=1)
    answers = {
        "points3": prompter.ask(three, ones.expand(-1, 3)),
        "box": prompter.ask(boxes=boxes),
        "box_point": prompter.ask(first, ones, boxes=boxes),
        "mask_point": prompter.ask(first, ones, masks=low),
        "mask_two_points": prompter.ask(
            torch.cat([first, correction], dim=1), torch.cat([ones, label], dim=1), masks=low
        ),
    }
    scores = {"point": every[row, pick], "point_oracle": every.amax(1)}
    scores |= {kind: mask_iou(found[0][:, 0], truth) for kind, found in answers.items()}
    return {kind: score.cpu() for kind, score in scores.items()}


def evaluate(sam: Sam, seeds: Iterable[int]) -> dict[str, float]:
    """Mean IoU over all objects of the scenes of ``seeds``, drawn at the model's size on its device, per prompt kind.

    ``small`` is ``point`` on the objects covering under 1 % of the picture; ``objects`` is how many there were.
    """
    collected: dict[str, list[Tensor]] = {kind: [] for kind in (*KINDS, "small")}
    for seed in seeds:
        scene = draw_scene(seed, sam.image_encoder.img_size, sam.device)
        if not len(scene.masks):
            continue
        scores = score_scene(sam, scene)
        for kind in KINDS:
            collected[kind].append(scores[kind])
        share = scene.masks.float().mean((1, 2)).cpu()
        collected["small"].append(scores["point"][share < 0.01])
    joined = {kind: torch.cat(parts) for kind, parts in collected.items()}
    result = {kind: round(float(values.mean()), 4) for kind, values in joined.items()}
    return {**result, "objects": len(joined["point"])}
