"""Batches of a few sizes only, for each of which the image encoder is compiled, or captured, once.

A caller's batch is cut into pieces of the largest size, and the rest is filled up with zero images to the smallest
size that holds it. SAM's encoder never mixes images, so the features of the caller's own do not depend on the filling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from samopt.passes.cuda_graphs import CudaGraphs
from samopt.passes.dtype import dtype_inside
from samopt.passes.parts import Parts, PartsOf


class Batches:
    """How one encoder takes its batches, and what it remembers between them. Threads may share it.

    Attributes:
        sizes: the batch sizes it runs at, rising.
        graphs: its CUDA graphs; None where it runs without.
        parts: lists what is in it.
    """

    def __init__(self, sizes: tuple[int, ...], graphs: CudaGraphs | None = None) -> None:
        self.sizes, self.graphs, self.parts = sizes, graphs, PartsOf()


def encode(batches: Batches, encoder: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Calls an image encoder on a batch of any size.

    A hook is called as in the unmodified model: with one anywhere in the encoder, the batch stays whole and no
    CUDA graph is replayed, as that would pass the hook by. An empty batch is none that SAM's encoder takes: its own
    error is raised.

    Args:
        batches: how to run it.
        encoder: the encoder.
        call: what runs the encoder, hooks included, on a batch of one of the sizes.
        x: pixels [B, 3, H, W].

    Returns:
        Features [B, C, h, w].
    """
    parts = batches.parts(encoder)
    if x.dim() != 4 or len(x) == 0 or parts.hooked():
        return call(x)
    pieces = zip(x.split(batches.sizes[-1]), run_as(len(x), batches.sizes), strict=True)
    features = [_encode_piece(batches, encoder, parts, call, piece, size) for piece, size in pieces]
    return features[0] if len(features) == 1 else torch.cat(features)


def _encode_piece(
    batches: Batches, encoder: nn.Module, parts: Parts, call: Callable[[Tensor], Tensor], piece: Tensor, size: int
) -> Tensor:
    count = len(piece)
    pixels = fill_up(piece, size)
    if batches.graphs is not None and batches.graphs.may_stand_for([pixels], parts):
        inside = dtype_inside(encoder) if pixels.is_floating_point() else None
        dtypes = [inside or pixels.dtype]
        (features,) = batches.graphs.replay(lambda pixels: (call(pixels),), [pixels], parts, dtypes=dtypes, count=count)
        return features
    features = call(pixels)
    return features if len(pixels) == count else features[:count].clone()  # a view would keep the filling's memory


def run_as(count: int, sizes: Sequence[int]) -> list[int]:
    """The batch sizes, of those in `sizes`, rising, at which `count` images run one after the other."""
    whole, rest = divmod(count, sizes[-1])
    return [sizes[-1]] * whole + [next(size for size in sizes if size >= rest)] * (rest > 0)


def fill_up(piece: Tensor, size: int) -> Tensor:
    """`piece` [B, ...] with zeros after it, [size, ...], contiguous.

    For torch.compile it matters whether an input is an inference tensor and whether it requires a gradient, and a
    filled batch is to be of the same kind as a full one: the result is an inference tensor just where `piece` is, and
    requires no gradient where the caller wants none.
    """
    wanted = torch.is_grad_enabled()  # leaving inference mode turns gradients on, also within the caller's no_grad
    with torch.inference_mode(piece.is_inference()), torch.set_grad_enabled(wanted):
        if piece.requires_grad and not wanted:  # as what `split` gives may, even in no_grad
            piece = piece.detach()
        if size > len(piece):
            piece = torch.cat([piece, piece.new_zeros(size - len(piece), *piece.shape[1:])])
        return piece.contiguous()
