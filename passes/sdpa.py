"""Attention through `torch.nn.functional.scaled_dot_product_attention`.

The decomposed relative position (see `rel_pos`) folds into the head dimension, exactly: with unit vectors e,

    logits[(h, w), (i, j)] = [q*scale | q.Rh[h] | q.Rw[w]] . [k | e_i | e_j]

is plain attention, so no [N, N] bias is ever made and any fused kernel serves. Head dimension d grows to
d + H + W: 64 to 92 for 14x14 windows, 64 to 192 for 64x64 tokens. On CPU the fused kernel is faster with the
bias as a mask than with the longer product, so there the bias is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import InvalidInput
from samopt.passes.rel_pos import tables
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip
from samopt.structure import decoder_attentions, encoder_attentions

POSITIONS = "_samopt_key_positions"  # buffer: the unit vectors of every key, [H, W, H + W]


@dataclass(frozen=True)
class SDPAttention(Pass):
    """Rewrites the attention of the image encoder and of the two-way transformer to PyTorch's fused attention.

    Attributes:
        encoder: rewrite the image encoder's attention, decomposed relative positions included.
        decoder: rewrite the two-way transformer's attention.
    """

    encoder: bool = True
    decoder: bool = True

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.encoder or self.decoder):
            raise InvalidInput("SDPAttention: encoder=False and decoder=False leave nothing to do")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the attention modules of encoder and decoder; look-alikes with other arithmetic are Skips."""
        for found in encoder_attentions(model) if self.encoder else ():
            yield found if isinstance(found, Skip) else Site(found[0], {"kind": "encoder", "grid": found[2]})
        for two_way in decoder_attentions(model) if self.decoder else ():
            yield two_way if isinstance(two_way, Skip) else Site(two_way[0], {"kind": "decoder"})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        if site.facts["kind"] == "decoder":
            rebind(new, "forward", two_way_attention)
            return new
        if new.use_rel_pos:
            weight = new.rel_pos_h
            positions = key_positions(site.facts["grid"], weight.device, weight.dtype)
            new.register_buffer(POSITIONS, positions, persistent=False)
            new.register_load_state_dict_post_hook(follow_weights)
        rebind(new, "forward", encoder_attention)
        return new


def key_positions(grid: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[e_i | e_j] for the key at row i, column j of a grid (H, W): [H, W, H + W], 1 at i and at H + j."""
    height, width = grid
    rows = torch.eye(height, device=device, dtype=dtype)[:, None].expand(-1, width, -1)
    columns = torch.eye(width, device=device, dtype=dtype).expand(height, -1, -1)
    return torch.cat([rows, columns], dim=-1)


def follow_weights(module: Any, incompatible_keys: Any) -> None:
    """Makes the unit vectors anew where `load_state_dict(assign=True)` has brought another dtype or device."""
    weight, positions = module.rel_pos_h, getattr(module, POSITIONS)
    if (positions.dtype, positions.device) != (weight.dtype, weight.device):
        setattr(module, POSITIONS, key_positions(positions.shape[:2], weight.device, weight.dtype))


def encoder_attention(self: Any, x: Tensor) -> Tensor:
    """SAM's encoder attention over tokens [B, H, W, C], fused; returns [B, H, W, C]."""
    B, H, W, _ = x.shape
    qkv = self.qkv(x).reshape(B, H * W, 3, self.num_heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, H * W, d]
    if not self.use_rel_pos:
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
    else:
        table_h, table_w = tables(self, (H, W))
        r_q = q.reshape(B, self.num_heads, H, W, -1)
        rel_h = torch.einsum("bnhwc,hkc->bnhwk", r_q, table_h)  # [B, heads, H, W, H], from the unscaled q
        rel_w = torch.einsum("bnhwc,wkc->bnhwk", r_q, table_w)  # [B, heads, H, W, W]
        if x.device.type == "cpu":
            bias = (rel_h[..., :, None] + rel_w[..., None, :]).reshape(B, self.num_heads, H * W, H * W)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        else:
            out = _folded(self, q, k, v, rel_h, rel_w)
    return self.proj(out.transpose(1, 2).reshape(B, H, W, -1))


def _folded(self: Any, q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor) -> Tensor:
    """Attention over [q*scale | rel_h | rel_w] and [k | e_i | e_j]: [B, heads, N, d]."""
    H, W = rel_h.shape[2:4]
    positions = getattr(self, POSITIONS)
    if positions.shape != (H, W, H + W):  # a grid the pass was not told of
        positions = key_positions((H, W), k.device, k.dtype)
    # Fused kernels take head dimensions that are multiples of 8; zeros add nothing to a product.
    padding = -(q.shape[-1] + H + W) % 8
    long_q = torch.cat([q * self.scale, rel_h.flatten(2, 3), rel_w.flatten(2, 3)], dim=-1)
    long_k = torch.cat([k, positions.flatten(0, 1).expand(*k.shape[:2], -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(F.pad(long_q, (0, padding)), F.pad(long_k, (0, padding)), v, scale=1.0)


def two_way_attention(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The two-way transformer's attention, fused.

    Either side may be one for the whole batch, as in SAM's own code: it is projected once, and never copied.

    Args:
        q: queries [B, N, C], or [1, N, C].
        k: keys [B, M, C], or [1, M, C].
        v: values, of the shape of the keys.

    Returns:
        [B, N, C].
    """
    q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
    batch, tokens = q.shape[:2]
    if q.device.type == "cuda" and self.num_heads * tokens <= k.shape[1] and k.shape[0] == batch == v.shape[0]:
        return self.out_proj(of_few_queries(q, k, v, self.num_heads))
    long = batch != 1 and k.shape[0] == 1 and v.shape[0] == 1
    if long:  # the keys are everyone's, so that all queries may be one sequence
        q = q.reshape(1, batch * tokens, q.shape[2])
    q, k, v = (self._separate_heads(x, self.num_heads) for x in (q, k, v))
    if q.shape[0] == 1:  # fused kernels broadcast no batch, but take one of stride 0
        q = q.expand(k.shape[0], -1, -1, -1)
    out = self.out_proj(self._recombine_heads(F.scaled_dot_product_attention(q, k, v)))
    return out.reshape(batch, tokens, out.shape[2]) if long else out


def of_few_queries(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention of few queries to many keys, as one head: keys and values are read as they lie in memory.

    Each query becomes one per head, zero in the dimensions of the other heads; of the answer to it only its own head's
    dimensions are kept. A fused kernel for heads of 16 fills most of its block of queries with nothing instead.

    Args:
        q: [B, T, C], the heads one after the other in C.
        k: [B, N, C].
        v: [B, N, C].
        heads: their number.

    Returns:
        [B, T, C].
    """
    own = _own_dimensions(heads, q)
    apart = (q[:, None] * own).flatten(1, 2)  # [B, heads * T, C]
    scale = (q.shape[2] // heads) ** -0.5
    out = F.scaled_dot_product_attention(apart[:, None], k[:, None], v[:, None], scale=scale)[:, 0]
    return (out.unflatten(1, (heads, -1)) * own).sum(1)


def _own_dimensions(heads: int, like: Tensor) -> Tensor:
    """1 where a dimension is of the head, else 0: [heads, 1, C] in the dtype and on the device of `like`."""
    head_of = torch.arange(like.shape[2], device=like.device) // (like.shape[2] // heads)
    return (head_of == torch.arange(heads, device=like.device)[:, None, None]).to(like.dtype)
