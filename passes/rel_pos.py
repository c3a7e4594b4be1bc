"""The relative-position tables gathered once, not at every forward.

SAM's attention adds decomposed relative positions to its logits (MViTv2, arXiv:2112.01526, eq. 4):

    logits[(h, w), (i, j)] += q[h, w] . Rh[h, i] + q[h, w] . Rw[w, j],   Rh[h, i] = rel_pos_h[h - i + H - 1]

Rh and Rw depend on the weights only. The unmodified model gathers them anew in every block of every forward, with
indices made on the CPU: on a GPU each gather waits for a copy. This pass keeps the gathered tables as buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.passes.kernels.attention_reference import skewed
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip
from samopt.structure import encoder_attentions

TABLES = {"rel_pos_h": "_samopt_table_h", "rel_pos_w": "_samopt_table_w"}  # parameter: buffer


@dataclass(frozen=True)
class HoistRelPos(Pass):
    """Gathers the relative-position tables of the encoder's attention once, into buffers on the model's device.

    The buffers are not saved; `load_state_dict` rebuilds them. Values written into `rel_pos_h` or `rel_pos_w` by
    other means need the pass to be undone and applied again. A forward on another token grid gathers as before.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the encoder's attention modules; one without relative positions is a Skip."""
        for found in encoder_attentions(model):
            if isinstance(found, Skip):
                yield found
                continue
            fqn, module, grid = found
            yield Site(fqn, {"grid": grid}) if module.use_rel_pos else Skip(fqn, "it has no relative positions")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        for (parameter, buffer), size in zip(TABLES.items(), site.facts["grid"], strict=True):
            new.register_buffer(buffer, gather(getattr(new, parameter).detach(), size), persistent=False)
        new.register_load_state_dict_post_hook(rebuild_tables)
        if "forward" not in vars(new):  # another pass's forward asks `tables`, and so uses the buffers
            rebind(new, "forward", attention)
        return new


def gather(rel_pos: Tensor, size: int) -> Tensor:
    """R[h, i] = rel_pos[h - i + size - 1], resized linearly first where `rel_pos` was made for another size.

    Args:
        rel_pos: [L, d], one row per distance.
        size: tokens along the axis.

    Returns:
        [size, size, d] on the device of `rel_pos`, gathered without an index on the CPU.
    """
    return skewed(distances(rel_pos, size), size)


def distances(rel_pos: Tensor, size: int) -> Tensor:
    """One row per distance between `size` tokens: `rel_pos` [L, d] itself, or resized linearly, [2 * size - 1, d]."""
    wanted = 2 * size - 1
    if rel_pos.shape[0] == wanted:
        return rel_pos
    rows = rel_pos.reshape(1, rel_pos.shape[0], -1).permute(0, 2, 1)
    return F.interpolate(rows, size=wanted, mode="linear").reshape(-1, wanted).permute(1, 0)


def tables(module: nn.Module, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Rh [H, H, d] and Rw [W, W, d] of an attention module: hoisted where they are, gathered now where not."""
    found = []
    for (parameter, buffer), size in zip(TABLES.items(), grid, strict=True):
        table = getattr(module, buffer, None)
        if table is None or table.shape[0] != size:
            table = gather(getattr(module, parameter), size)
        found.append(table)
    return found[0], found[1]


def rebuild_tables(module: nn.Module, incompatible_keys: Any) -> None:
    """Gathers the tables from newly loaded weights: in place, so that compiled code and CUDA graphs see them, unless
    `load_state_dict(assign=True)` has brought another dtype or device."""
    with torch.no_grad():
        for parameter, buffer in TABLES.items():
            old = getattr(module, buffer)
            new = gather(getattr(module, parameter), old.shape[0])
            if (old.dtype, old.device) == (new.dtype, new.device):
                old.copy_(new)
            else:
                setattr(module, buffer, new)


def attention(self: Any, x: Tensor) -> Tensor:
    """SAM's encoder attention, operation by operation, with the hoisted tables.

    Args:
        x: tokens [B, H, W, C].

    Returns:
        [B, H, W, C].
    """
    B, H, W, _ = x.shape
    qkv = self.qkv(x).reshape(B, H * W, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.reshape(3, B * self.num_heads, H * W, -1).unbind(0)
    attn = (q * self.scale) @ k.transpose(-2, -1)

    table_h, table_w = tables(self, (H, W))
    r_q = q.reshape(B * self.num_heads, H, W, -1)
    rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, table_h)
    rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, table_w)
    attn = attn.view(-1, H, W, H, W) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]

    attn = attn.view(-1, H * W, H * W).softmax(dim=-1)
    out = (attn @ v).view(B, self.num_heads, H, W, -1).permute(0, 2, 3, 1, 4).reshape(B, H, W, -1)
    return self.proj(out)
