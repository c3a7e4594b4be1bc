"""Random problems for the step in which image tokens attend to a prompt's, and their answers in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from samopt.passes.kernels.image_to_token import Inputs

EPS = 1e-5


def random_problem(
    prompts: int = 3,
    image_tokens: int = 37,
    channels: int = 64,
    inner: int = 32,
    tokens: int = 7,
    *,
    images: int = 1,
    positions: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
) -> Inputs:
    """The tensors that `image_to_token` takes, in its order; logits are of the size that makes a softmax uneven."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

    sides = normal(images, image_tokens, channels), normal(positions, image_tokens, channels)
    keys = normal(prompts, tokens, inner), normal(prompts, tokens, inner)
    projections = normal(inner, channels, std=channels**-0.5), normal(inner), normal(channels, inner), normal(channels)
    return Inputs(*sides, *keys, *projections, normal(channels), normal(channels))


def truth(given: Inputs, heads: int = 8) -> Tensor:
    """The answer in float64, as SAM's modules compute it: every product written out."""
    keys, key_pe, k, v, q_weight, q_bias, out_weight, out_bias, norm_weight, norm_bias = (x.double() for x in given)
    q = (keys + key_pe) @ q_weight.T + q_bias
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [N, heads, tokens, D]
    weights = torch.softmax(q @ k.mT / k.shape[3] ** 0.5, dim=3)
    total = keys + (weights @ v).transpose(1, 2).flatten(2) @ out_weight.T + out_bias
    centred = total - total.mean(2, keepdim=True)
    return centred / (centred.square().mean(2, keepdim=True) + EPS).sqrt() * norm_weight + norm_bias
