"""What comes into linear layers while a model runs on sample pictures: their inputs' second moments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samopt.errors import InvalidInput, Unsupported
from samopt.observe import observe
from samopt.rebind import clone
from samopt.samples import CALIBRATION_SEED, Sample, scene_samples
from samopt.structure import check_sam, encoders
from samopt.tiny.scenes import SMALLEST_SIZE
from samopt.verify import Reference

SCENES = 4  # drawn where a pass is given no samples
BYTES = 2 << 30  # of moments held at a time


def input_moments(
    model: nn.Module, layers: Sequence[str], samples: Sequence[Sample] | None, *, crossed: bool
) -> Iterator[tuple[str, Tensor]]:
    """The mean of x x^T over the inputs x of each layer, or its diagonal, the mean of x^2.

    The model, a copy of it with hooks, runs on the samples as many times as the moments need to fit into `BYTES`. Where
    a layer lies outside of the image encoder, it is prompted too, with every kind of prompt. What windows are
    filled up with counts as input where the model computes it.

    Args:
        model: a Sam, of whatever dtype. It is not changed.
        layers: names of modules with `in_features`, called with tensors [..., in_features].
        samples: pictures to run it on; None draws some of the model's size, others than accuracy is measured on.
        crossed: give the whole matrix.

    Yields:
        Name and float32 [in_features, in_features], or [in_features], on the layer's device; zeros for a layer that no
        sample reached.

    Raises:
        Unsupported: `model` is a part of a Sam, which nothing can be run on.
    """
    try:
        check_sam(model)
    except InvalidInput as error:
        raise Unsupported(str(error), "calibrating takes a whole Sam") from error
    copy: Any = clone(model).eval()
    if samples is None:
        samples = scene_samples(SCENES, max(SMALLEST_SIZE, copy.image_encoder.img_size), CALIBRATION_SEED)
    inside = tuple(f"{fqn}." for fqn, _ in encoders(copy))
    for group in _groups(copy, layers, crossed):
        moments = {name: _zeros(copy.get_submodule(name), crossed) for name in group}
        rows = dict.fromkeys(group, 0)
        hooks = [
            copy.get_submodule(name).register_forward_pre_hook(functools.partial(_add, moments[name], rows, name))
            for name in group
        ]
        if all(name.startswith(inside) for name in group):
            observe(copy, samples, lambda predictor, index: [])
        else:
            Reference.record(copy, samples)
        for hook in hooks:
            hook.remove()
        for name in group:
            yield name, moments.pop(name).div_(max(rows[name], 1))


def _groups(model: nn.Module, layers: Sequence[str], crossed: bool) -> Iterator[list[str]]:
    """The layers in turn, as many together as `BYTES` hold the moments of."""
    group: list[str] = []
    size = 0
    for name in layers:
        features: Any = model.get_submodule(name).in_features
        needed = 4 * features ** (2 if crossed else 1)
        if group and size + needed > BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += needed
    if group:
        yield group


def _zeros(module: Any, crossed: bool) -> Tensor:
    return torch.zeros((module.in_features,) * (2 if crossed else 1), device=module.weight.device)


def _add(moment: Tensor, rows: dict[str, int], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
    moment += x.T @ x if moment.ndim == 2 else x.square().sum(0)
    rows[name] += len(x)
