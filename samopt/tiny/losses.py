"""Losses on low-resolution logits, computed in float32 in one pass over the pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_losses(logits: Tensor, target: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """The cost of each mask and its IoU.

    The cost is 20 x focal + dice + 0.2 x cross entropy, the latter two as means over the picture, and ``sharpness`` x
    the cross entropy per pixel of the object or the answer, whichever is larger, which makes the logits steep at the
    edges of small objects too.

    Args:
        logits: [M, K, l, l].
        target: [M, l, l] in [0, 1], the share of each cell that the object covers.
        sharpness: scalar tensor.

    Returns:
        Cost [M, K] and IoU [M, K] of the thresholded masks, which carries no gradient.
    """
    x = logits.to(torch.float32).flatten(2)
    t = target.to(torch.float32).flatten(1)[:, None]
    entropy = F.softplus(x) - x * t
    p = x.sigmoid()
    error = p - t
    focal = (error * error * entropy).mean(-1)
    area = t.sum(-1)
    covered = p.sum(-1)
    dice = 1 - (2 * (p * t).sum(-1) + 1) / (covered + area + 1)
    total = entropy.sum(-1)
    extent = torch.maximum(area, covered.detach()) + 48
    cost = 20 * focal + dice + 0.2 * total / x.shape[-1] + sharpness * total / extent
    on, inside = x.detach() > 0, t > 0.5
    intersection = (on & inside).float().sum(-1)
    union = (on | inside).float().sum(-1)
    return cost, intersection / union.clamp(min=1)


def prompt_loss(
    cost: Tensor, actual: Tensor, predicted: Tensor, weight: Tensor, whole_cost: Tensor, whole_weight: Tensor
) -> Tensor:
    """The scalar loss of a batch of prompts.

    Args:
        cost: [M, 4] against the object itself; index 0 is the single mask, the best of the other three counts.
        actual: [M, 4] IoU.
        predicted: [M, 4] predicted IoU.
        weight: [M], 0 for prompts without an object.
        whole_cost: [A, 4] against the whole that the object is a part of, for ambiguous prompts.
        whole_weight: [A], 0 where that does not apply.
    """
    quality = (predicted.float() - actual).square().mean(-1)
    each = cost[:, 0] + cost[:, 1:].amin(-1) + 2 * quality
    ambiguous = (whole_cost[:, 1:].amin(-1) * whole_weight).sum() / whole_weight.numel()
    return (each * weight).sum() / weight.sum().clamp(min=1) + ambiguous
