"""Non-maximum suppression that nobody waits for."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def without_duplicates(
    boxes: Tensor, scores: Tensor, valid: Tensor, threshold: float, rounds: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Non-maximum suppression as `torchvision.ops.nms` does it, without waiting for the device.

    A box is dropped if one of a higher score, which is kept, overlaps it. Each round decides all boxes by those that
    the round before kept: what it decided rightly of the first n in the ranking makes the next one right of the first
    n + 1, and the result is reached when a round changes nothing.

    Args:
        boxes: (x0, y0, x1, y1), [N, 4].
        scores: [N].
        valid: which of them there are, bool [N].
        threshold: the IoU above which boxes are duplicates.
        rounds: how many to compute; None for as many as are needed.

    Returns:
        Which of the boxes to keep, bool [N], and which boxes these are, int64 [N], both in the order of falling scores;
        and the number of rounds that were needed, int64, or twice `rounds` where that was not enough.
    """
    from torchvision.ops import box_iou

    order = torch.where(valid, scores.float(), -torch.inf).sort(stable=True, descending=True).indices
    boxes, valid = boxes[order].float(), valid[order]
    overlap = (box_iou(boxes, boxes) > threshold).triu(1)  # of a row's box with those of lower rank
    keep, changed = valid, torch.ones_like(valid)
    needed = torch.ones((), dtype=torch.int64, device=boxes.device)
    for _ in itertools.count() if rounds is None else range(rounds):
        before = keep
        keep = valid & ~(overlap & before[:, None]).any(0)
        changed = keep != before
        needed += changed.any()
        if rounds is None and not changed.any():
            break
    return keep, order, needed if rounds is None else torch.where(changed.any(), 2 * rounds, needed)
