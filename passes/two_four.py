"""2:4 sparsity: which two of four weights stay, and what they become.

A mask is made by `torch.ao.pruning.WeightNormSparsifier` from scores of the weights w_ij. With H the second moments of
the layer's inputs, they are

    |w_ij|                           magnitude
    |w_ij| sqrt(H_jj)                activation: what the weight adds to the output (Wanda, arXiv:2306.11695)
    |w_ij| / sqrt((H^-1)_jj)         compensation: what the output loses with the weight once the others make up for it
                                     as far as they can (Optimal Brain Surgeon, Hassibi and Stork 1992)

The weights that stay are then fitted so that the layer changes least on its inputs: each row w of the new weights
minimises (w - w0) H (w - w0)^T over its mask. SparseGPT (arXiv:2301.00774) does that approximately, in one sweep over
the columns; conjugate gradients over all rows at once (as in ALPS, arXiv:2406.07831) reach the minimum itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

BLOCK, ZEROS = 4, 2
DAMPING = 0.01  # of H's mean diagonal, added to its diagonal: inputs that hardly occur keep their weights
STEPS = 20  # of conjugate gradients

Criterion = Literal["magnitude", "activation", "compensation"]


def is_two_four(weight: Tensor) -> bool:
    """Whether every 1 x 4 block of a weight [N, K] has two zeros or more."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        return False
    return bool(((weight != 0).reshape(-1, BLOCK).sum(1) <= BLOCK - ZEROS).all())


def two_four_mask(scores: Tensor) -> Tensor:
    """True where a weight stays: for the two of each 1 x 4 block that score best in absolute value.

    Args:
        scores: float [N, K], K a multiple of 4.

    Returns:
        bool [N, K].
    """
    from torch.ao.pruning import WeightNormSparsifier  # type: ignore[attr-defined]

    layer = nn.Linear(scores.shape[1], scores.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(scores.abs(), requires_grad=False)  # a copy: the sparsifier writes into its layer
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, BLOCK), zeros_per_block=ZEROS)
    sparsifier.prepare(nn.Sequential(layer), [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    mask: Tensor = sparsifier.groups[0]["module"].parametrizations.weight[0].mask.bool()
    assert bool((mask.reshape(-1, BLOCK).sum(1) == BLOCK - ZEROS).all()), "the sparsifier's mask is not 2:4"
    return mask


@torch.no_grad()
def two_four(
    weight: Tensor, moments: Tensor | None = None, criterion: Criterion = "magnitude", update: bool = False
) -> Tensor:
    """The weight of a linear layer made 2:4 sparse.

    Args:
        weight: [N, K], K a multiple of 4. It is not changed.
        moments: of the layer's inputs: their mean squares [K], or all their second moments [K, K], which "compensation"
            and `update` need. None, or zeros, as of a layer that saw nothing, leave magnitude to decide.
        criterion: how weights are scored.
        update: fit the weights that stay.

    Returns:
        [N, K] of the weight's dtype, on its device.
    """
    if weight.is_meta:
        return weight.detach()
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if moments is None or not moments.any():
        return torch.where(two_four_mask(wide), wide, 0).to(weight.dtype)
    moments = moments.to(wide.dtype)
    scores = wide.abs()
    if criterion == "activation":
        scores = scores * (moments if moments.ndim == 1 else moments.diagonal()).sqrt()
    elif criterion == "compensation":
        factor, _ = torch.linalg.cholesky_ex(damped(moments))  # of NaN, it is NaN: what is scored so, is not fitted
        scores = scores * torch.cholesky_inverse(factor).diagonal().rsqrt()
    mask = two_four_mask(scores)
    new = fitted(wide, mask, moments) if update else torch.where(mask, wide, 0)
    return new.to(weight.dtype)


def fitted(weight: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """The weights [N, K] within `mask` whose products with the inputs are closest to those of `weight`.

    A row that conjugate gradients, preconditioned by H's diagonal, do not improve is `weight`'s own, masked: where H
    is not finite, say.

    Args:
        weight: float32 or float64 [N, K].
        mask: bool [N, K].
        moments: H [K, K], of the same dtype.
    """
    h = damped(moments)
    masked = torch.where(mask, weight, 0)
    new, precondition = masked, h.diagonal().reciprocal()
    residual = ((weight - new) @ h) * mask
    scaled = residual * precondition
    direction, size = scaled, (residual * scaled).sum(1, keepdim=True)
    tiny = torch.finfo(weight.dtype).tiny
    for _ in range(STEPS):
        image = (direction @ h) * mask
        step = size / (direction * image).sum(1, keepdim=True).clamp_min(tiny)
        new, residual = new + step * direction, residual - step * image
        scaled = residual * precondition
        before, size = size, (residual * scaled).sum(1, keepdim=True)
        direction = scaled + size / before.clamp_min(tiny) * direction
    improved = _change(new, weight, h) < _change(masked, weight, h)
    return torch.where(improved[:, None], new, masked)


def damped(moments: Tensor) -> Tensor:
    """Second moments [K, K] with `DAMPING` on the diagonal, so that they are positive definite."""
    h = moments.clone()
    h.diagonal().add_(DAMPING * h.diagonal().mean())
    return h


def _change(new: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """(w - w0) H (w - w0)^T per row: [N]."""
    difference = new - weight
    return ((difference @ h) * difference).sum(1)
