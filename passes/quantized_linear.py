"""A linear layer with quantised weights, which quantises its input as it comes: a plain module with plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from samopt.base import APPLIED
from samopt.passes.kernels.float8_linear import float8_linear
from samopt.passes.kernels.int8_linear import int8_linear
from samopt.passes.kernels.quantized_rows import Rows, quantize_rows, quantized
from samopt.passes.kernels.scaled_launch import MULTIPLE
from samopt.passes.two_four import is_two_four, two_four

PRODUCTS = {torch.int8: int8_linear, torch.float8_e4m3fn: float8_linear}
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class QuantizedLinear(nn.Module):
    """x W^T + b with a scale for each output channel of W and one for each token of x.

    A checkpoint with weights of another dtype, quantised or not, loads too: they are quantised on the way in, and made
    2:4 sparse first where the layer's weights were (see `samopt.passes.SemiSparse`).

    Hooks on the layer's calls stay; those before it see quantised rows where what precedes it gives them.

    Args:
        linear: the layer to quantise; it is left as it is, and its bias shared.
        dtype: int8 or float8_e4m3fn.

    Attributes:
        weight: [N, K] in the quantised dtype.
        weight_scale: [N], float32.
        bias: [N] in the layer's own dtype, or None.
        dtype: of the results: that of the layer's weights.
        two_four: whether SemiSparse made two of every four weights zero.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, linear: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.two_four = "SemiSparse" in vars(linear).get(APPLIED, ())
        values, scales = quantized(linear.weight.detach().float(), dtype)
        self.register_buffer("weight", values)
        self.register_buffer("weight_scale", scales[:, 0].contiguous())
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        for name in HOOKS:
            setattr(self, name, copy.copy(getattr(linear, name)))

    def forward(self, x: Tensor | Rows, gelu: bool = False) -> Tensor:
        """The layer, or its GELU, of tokens [..., K], quantised already or not; [..., N]."""
        rows = x if isinstance(x, Rows) else Rows(*quantize_rows(x, self.weight.dtype))
        product = PRODUCTS[self.weight.dtype]
        return product(*rows, self.weight, self.weight_scale, self.bias, gelu, self.dtype)

    def extra_repr(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        sparse = ", 2:4 sparse" if self.two_four else ""
        return f"{sizes}, {dtype} weights by channel, {dtype} inputs by token{sparse}"

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves as any module; a cast changes the dtype of the results, not what is quantised."""
        held = {"weight": self.weight, "weight_scale": self.weight_scale}
        super()._apply(function, recurse)
        for name, old in held.items():
            if (new := getattr(self, name)).dtype is not old.dtype:
                setattr(self, name, old.to(new.device))
        self.dtype = function(torch.empty(0, dtype=self.dtype, device=held["weight"].device)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, scale = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}weight_scale")
        if (
            isinstance(weight, Tensor)
            and weight.shape == self.weight.shape
            and weight.dtype is not self.weight.dtype
            and (weight.dtype not in PRODUCTS or isinstance(scale, Tensor))
        ):
            weight = weight.detach()
            if weight.dtype in PRODUCTS and isinstance(scale, Tensor):  # from a model quantised otherwise
                weight = weight.float() * scale[:, None]
            if self.two_four and not weight.is_meta and not is_two_four(weight):
                weight = two_four(weight)
            values, scales = quantized(weight.to(self.dtype).float(), self.weight.dtype)
            # The caller of load_state_dict keeps his dictionary: this is a copy that PyTorch made.
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}weight_scale"] = values, scales[:, 0].contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)


def takes_rows(module: Any) -> bool:
    """Whether a module takes quantised rows."""
    return isinstance(module, QuantizedLinear)


def weight_of(linear: Any) -> Tensor:
    """A linear layer's weight in float32, quantised or not."""
    weight: Tensor = linear.weight.detach().float()
    return weight * linear.weight_scale[:, None] if takes_rows(linear) else weight


def quantized_already(linear: Any) -> str | None:
    """What a linear layer's weights were quantised to, in words, by samopt or by torchao; None if they were not."""
    if takes_rows(linear):
        dtype = str(linear.weight.dtype).removeprefix("torch.").partition("_")[0]
        return f"its weights are {dtype} already"
    if is_traceable_wrapper_subclass(weight := getattr(linear, "weight", None)):
        kind = type(weight)
        return f"its weights are {kind.__module__.partition('.')[0]}'s {kind.__name__} already"
    return None


def unfit(linear: Any) -> str | None:
    """Why a linear layer cannot be quantised, or None if it can."""
    sizes = linear.in_features, linear.out_features
    if any(size % MULTIPLE for size in sizes):
        return f"its sizes, {sizes[0]} to {sizes[1]}, are no multiples of {MULTIPLE}, as quantised products need them"
    if linear.weight.is_cuda and linear.weight.dtype is torch.float32:
        return "its weights are float32: apply CastDtype first"
    return None
