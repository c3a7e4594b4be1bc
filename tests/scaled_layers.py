"""Linear layers of int8 and float8 matrices for the kernels' tests, and their right answers: of NumPy's int64, and
float64."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # x, x_scale, weight, weight_scale, bias


def random_layer(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
    operands: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the operator takes, with a bias of `dtype`: results of about the size of 1, and a scale for each row and
    column."""
    generator = torch.Generator(device).manual_seed(seed)

    def quantized(rows: int) -> Tensor:
        return torch.randint(-128, 128, (rows, K), generator=generator, dtype=torch.int8, device=device).to(operands)

    def scale(*shape: int) -> Tensor:
        return 0.1 + torch.rand(*shape, generator=generator, device=device)

    bias = torch.randn(N, generator=generator, device=device).to(dtype)
    return quantized(M), scale(M, 1) / 128, quantized(N), scale(N) * K**-0.5 / 32, bias


def without_bias(layer: Layer) -> Layer:
    return (*layer[:4], None)


def truth(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, gelu: bool = False
) -> Tensor:
    """[M, N] in float64, GELU in the tanh form. The product of int8 is in int64, any other in float64, which is exact
    too."""
    if x.is_cuda or x.dtype is not torch.int8:
        product = F.linear(x.double(), weight.double())
    else:
        product = torch.from_numpy(x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T).double()
    y = product * x_scale.double() * weight_scale.double()
    if bias is not None:
        y += bias.double()
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) if gelu else y
