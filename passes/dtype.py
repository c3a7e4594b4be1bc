"""Encoder and decoder in half precision, cast at their borders.

`sam.bfloat16()` fails inside SAM (pixels, prompt coordinates and embeddings meet weights of another dtype), and would
be wrong if it ran: bfloat16 has a step of 4 pixels at 512 to 1024, so prompt coordinates must stay float32. Here the
image encoder and the mask decoder run in half precision; what goes in and comes out of them stays float32, so every
caller of the unmodified model still works. Statistics of SAM's own LayerNorm2d are taken in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import InvalidInput
from samopt.rebind import bound, clone, rebind, wrap
from samopt.result import Site, Skip
from samopt.structure import encoders, layer_norms_2d, mask_decoders


@dataclass(frozen=True)
class CastDtype(Pass):
    """Casts image encoder and mask decoder to `dtype`, with float32 at their borders.

    Attributes:
        dtype: "bfloat16" (the range of float32) or "float16" (8 times finer, but overflows beyond 65504).
        encoder: cast the image encoder.
        decoder: cast the mask decoder; `predict_masks` too, which the ONNX export calls directly.
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    encoder: bool = True
    decoder: bool = True

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.encoder or self.decoder):
            raise InvalidInput("CastDtype: encoder=False and decoder=False leave nothing to do")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields image encoder and mask decoder; one that holds no float32 weight is a Skip."""
        for method, enabled, found in (
            ("forward", self.encoder, encoders(model)),
            ("predict_masks", self.decoder, mask_decoders(model)),
        ):
            for fqn, module in found if enabled else ():
                dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
                if dtypes != {torch.float32}:
                    held = ", ".join(sorted(map(str, dtypes))) or "no floating-point weights"
                    yield Skip(fqn, f"its weights are {held}, not float32")
                else:
                    yield Site(fqn, {"method": method})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module).to(getattr(torch, self.dtype))
        for norm in layer_norms_2d(new):
            rebind(norm, "forward", layer_norm_2d_in_float32)
        wrap(new, site.facts["method"], cast_at_borders)
        return new


def cast_at_borders(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs `inner` on its arguments in the dtype of the module's weights; what it returns becomes float32.

    Args:
        inner: the method as it was.
        module: whose weights say the dtype, at the time of the call, so that it may still be cast.
        args: tensors, sequences of tensors, or anything else, which passes unchanged.
        kwargs: likewise.
    """
    dtype = next(module.parameters()).dtype
    args = tuple(_cast(value, dtype) for value in args)
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return _cast(inner(*args, **kwargs), torch.float32)


def dtype_inside(module: nn.Module) -> torch.dtype | None:
    """What a module's forward casts floating-point arguments to before anything else; None where it does not."""
    return next(module.parameters()).dtype if bound(module, "forward") is cast_at_borders else None


def layer_norm_2d_in_float32(norm: Any, x: Tensor) -> Tensor:
    """SAM's LayerNorm2d over the channels of [B, C, H, W], computed in float32 whatever the dtype of `x`.

    PyTorch's own LayerNorm does the same. As SAM writes it, half precision rounds the variance, and squares that
    float16 cannot hold become infinite, so that the output is 0.
    """
    wide = x.float()
    centred = wide - wide.mean(1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + norm.eps)
    return (norm.weight.float()[:, None, None] * scaled + norm.bias.float()[:, None, None]).to(x.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return _to(value, dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`; what is expanded (stride 0) is cast once and expanded again, not copied in full."""
    once = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            once = once.narrow(dim, 0, 1)
    return once.to(dtype).expand(tensor.shape)
