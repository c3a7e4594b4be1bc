"""Training batches: objects and prompts sampled on the device, without waiting for it.

Every image gets ``PROMPTS`` prompts: one point; several points, some negative; a box; and a mixture. All prompts have
``TOKENS`` tokens, of which those that do not apply are absent. Shapes: ``B`` images, ``N`` objects, ``P`` prompts per
image, masks at a quarter of the picture's size, [l, l].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .forward import ABSENT, CORNER_HIGH, CORNER_LOW, NEGATIVE, PAD, POSITIVE
from .layout import Layout
from .scenes import LEAST_OWN, LEAST_VISIBLE

PROMPTS = 4
# Token slots: five positive points, two negative ones, two box corners, padding, a corrective point. With SAM's five
# output tokens that makes 16, a multiple that matrix products like.
_POSITIVES, _NEGATIVES = 5, 2
_BOX, _PADDING, _CORRECTION = 7, 9, 10
TOKENS = 11
CELL = 4
Chance = Callable[..., Tensor]


@dataclass(frozen=True)
class Targets:
    """What the objects of a batch cover: ``own`` [B, N, l, l] (shares of cells, own pixels only), ``members``
    [B, N, N] (1 where the column's object is the row's or a part of it), ``extent`` (columns and rows that each object
    touches, two of [B, N, S]), ``parent`` [B, N], ``own_share`` and ``share`` of the picture [B, N].
    """

    own: Tensor
    members: Tensor
    extent: tuple[Tensor, Tensor]
    parent: Tensor
    own_share: Tensor
    share: Tensor


@dataclass(frozen=True)
class Prompts:
    """Prompts with their truth, ``M`` = B * P: ``coords`` [M, T, 2], ``labels`` [M, T], ``target`` [M, l, l],
    ``whole`` [B, l, l] and ``whole_weight`` [B] (the whole around the object of the first prompt of each image),
    ``weight`` [M] (0: no object).
    """

    coords: Tensor
    labels: Tensor
    target: Tensor
    whole: Tensor
    whole_weight: Tensor
    weight: Tensor


def find_targets(ids: Tensor, layout: Layout, dtype: torch.dtype) -> Targets:
    """Targets of drawn ids int8 [B, S, S]; ``dtype`` must hold sixteenths exactly."""
    batch, count = layout.parent.shape
    numbers = torch.arange(count, device=ids.device, dtype=torch.int8)
    covered = (ids[:, None] == numbers[None, :, None, None]).to(dtype)
    own = F.avg_pool2d(covered, CELL)
    parent = layout.parent.long()
    members = torch.eye(count, device=ids.device, dtype=dtype).expand(batch, -1, -1).clone()
    is_part = (parent >= 0).to(dtype)
    members.scatter_add_(1, parent.clamp(min=0)[:, None, :], is_part[:, None, :])
    own_share = own.float().mean((2, 3))
    share = (members.float() @ own_share[..., None])[..., 0]
    return Targets(own, members, (covered.amax(2), covered.amax(3)), parent, own_share, share)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, N, ...] at index [B, P]."""
    shape = index.shape + (1,) * (rows.dim() - 2)
    return rows.gather(1, index.view(shape).expand(-1, -1, *rows.shape[2:]))


def _cells(score: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pixels [B, P, count, 2] as (x, y), each somewhere in one of the ``count`` best cells of a score [B, P, l, l]."""
    side = score.shape[-1]
    best = score.flatten(2).topk(count, dim=-1).indices
    cell = torch.stack([best % side, best // side], dim=-1)
    return CELL * cell + torch.randint(CELL, cell.shape, device=cell.device, generator=generator)


def sample_prompts(targets: Targets, generator: torch.Generator) -> Prompts:
    """Prompts for objects chosen at random, those covering under 1 % of the picture somewhat more often."""
    device = targets.own.device
    batch, count, side, _ = targets.own.shape
    size = side * CELL

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    real = (targets.own_share >= LEAST_OWN) & (targets.share >= LEAST_VISIBLE)
    # Adding Gumbel noise to log weights and taking the largest samples without replacement.
    gumbel = -(-chance(batch, count).clamp(min=1e-6, max=1 - 1e-6).log()).log()
    preference = gumbel + 0.5 * (targets.share < 0.01) - 1e3 * (~real)
    chosen = preference.topk(PROMPTS, dim=1).indices
    weight = _gather(real, chosen).float()

    own = _gather(targets.own, chosen)
    members = _gather(targets.members, chosen)
    target = (members @ targets.own.flatten(2)).view(batch, PROMPTS, side, side)
    noise = chance(batch, PROMPTS, side, side)
    first = _cells(noise + own + 2 * (own >= 1), 1, generator)
    more = _cells(noise + target + 2 * (target >= 1), _POSITIVES - 1, generator)
    box = _boxes(targets, chosen)
    negative = _cells(_negative_score(noise, target, box), _NEGATIVES, generator)

    extent = (box[..., 2:] - box[..., :2]).repeat(1, 1, 2)
    shift = (chance(batch, PROMPTS, 4) - 0.5) * 0.2 * extent.clamp(max=size * 0.15) * (chance(batch, PROMPTS, 1) < 0.7)
    corners = (box + shift).clamp(0, size - 1).unflatten(-1, (2, 2))
    empty = torch.zeros(batch, PROMPTS, TOKENS - _PADDING, 2, device=device)
    coords = torch.cat([first.float(), more.float(), negative.float(), corners, empty], dim=2)

    parent = _gather(targets.parent, chosen[:, :1])
    whole = _gather(targets.members, parent.clamp(min=0)) @ targets.own.flatten(2)
    ambiguous = (parent[:, 0] >= 0) & (_gather(real, parent.clamp(min=0))[:, 0]) & (weight[:, 0] > 0)
    return Prompts(
        coords=coords.flatten(0, 1),
        labels=_labels(chance, batch, device).flatten(0, 1),
        target=target.flatten(0, 1),
        whole=whole.view(batch, side, side),
        whole_weight=0.25 * ambiguous.float(),
        weight=weight.flatten(),
    )


def _boxes(targets: Targets, chosen: Tensor) -> Tensor:
    """Exact boxes [B, P, 4] as (left, top, right, bottom), the last pixel included."""
    members = _gather(targets.members, chosen)
    edges = []
    for along in targets.extent:
        touched = (members @ along > 0).to(torch.uint8)
        low = touched.argmax(-1)
        high = touched.shape[-1] - 1 - touched.flip(-1).argmax(-1)
        edges.append((low, high))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], dim=-1).float()


def _negative_score(noise: Tensor, target: Tensor, box: Tensor) -> Tensor:
    """High outside of the object, higher in its surroundings."""
    along = torch.arange(target.shape[-1], device=target.device) * CELL
    margin = 0.25 * (box[..., 2:] - box[..., :2]) + 2 * CELL
    low, high = (box[..., :2] - margin)[..., None], (box[..., 2:] + margin)[..., None]
    near = (along >= low) & (along <= high)
    around = near[:, :, 1, :, None] & near[:, :, 0, None, :]
    return noise + around - 4 * (target > 0)


def _labels(chance: Chance, batch: int, device: torch.device) -> Tensor:
    """Labels [B, P, TOKENS]: which tokens each prompt has."""
    positives = (chance(batch, PROMPTS) * _POSITIVES).long() + 1
    negatives = (chance(batch, PROMPTS) * (_NEGATIVES + 1)).long()
    mixture = chance(batch)
    boxed = torch.zeros(batch, PROMPTS, dtype=torch.bool, device=device)
    positives[:, 0], negatives[:, 0] = 1, 0
    positives[:, 2], negatives[:, 2], boxed[:, 2] = 0, 0, True
    # The last prompt: one point, or a box with one point, or a box with several.
    positives[:, 3] = torch.where(mixture < 0.75, 1, positives[:, 3])
    negatives[:, 3] = torch.where(mixture < 0.75, 0, negatives[:, 3])
    boxed[:, 3] = mixture >= 0.4

    slot = torch.arange(TOKENS, device=device)
    labels = torch.full((batch, PROMPTS, TOKENS), ABSENT, device=device)
    labels = labels.masked_fill(slot < positives[..., None], POSITIVE)
    is_negative = (slot >= _POSITIVES) & (slot < _POSITIVES + negatives[..., None])
    labels = labels.masked_fill(is_negative, NEGATIVE)
    corner = boxed[..., None]
    labels = labels.masked_fill(corner & (slot == _BOX), CORNER_LOW)
    labels = labels.masked_fill(corner & (slot == _BOX + 1), CORNER_HIGH)
    # SAM appends one padding token to points that come without a box.
    return labels.masked_fill(~corner & (slot == _PADDING), PAD)


def refine_prompts(
    prompts: Prompts, logits: Tensor, predicted: Tensor, generator: torch.Generator
) -> tuple[Prompts, Tensor]:
    """Second-round prompts: the first answer as a mask prompt, and often a point where it was wrong.

    Args:
        prompts: the first round's.
        logits: its answers [M, 4, l, l], without gradient.
        predicted: its predicted IoU [M, 4].
        generator: of the device.

    Returns:
        The prompts, and the mask prompts [M, l, l].
    """
    count, _, side, _ = logits.shape
    device = logits.device

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    best = 1 + predicted[:, 1:].argmax(-1)
    pick = torch.where(chance(count) < 0.3, 0, best)
    answer = logits[torch.arange(count, device=device), pick]
    inside = prompts.target > 0.5
    wrong = (answer > 0) != inside
    cell = _cells((chance(1, count, side, side) + wrong), 1, generator)[0, :, 0]
    hit = inside.flatten(1).gather(1, (cell[:, 1] // CELL * side + cell[:, 0] // CELL)[:, None])[:, 0]

    mode = chance(count)
    labels = prompts.labels.clone()
    correction = torch.where(hit, POSITIVE, NEGATIVE)
    labels[:, _CORRECTION] = torch.where(mode < 0.45, correction, ABSENT)
    # Sometimes the mask is the only prompt: then SAM has no prompt tokens at all.
    labels = labels.masked_fill((mode > 0.85)[:, None], ABSENT)
    coords = prompts.coords.clone()
    coords[:, _CORRECTION] = cell.to(coords.dtype)
    refined = replace(prompts, coords=coords, labels=labels)
    return refined, answer
