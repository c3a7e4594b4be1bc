"""The embedded model's arithmetic arranged for training: batched, and with attention that GPUs are fast at.

``encode`` and ``decode`` call the submodules of a ``segment_anything`` Sam and compute what its own ``forward``
computes (``tests/tiny/test_train.py`` compares them), but

- positions are interpolated to the size of the images, so that one model trains at several sizes;
- the decoder takes prompts of many images at once, padded to one number of tokens. A token that is absent is hidden
  from attention, so that each prompt sees the tokens that SAM's PromptEncoder would have made;
- relative positions are folded into the head dimension, ``[q * scale | rel_h | rel_w]`` against
  ``[k | onehot(key row) | onehot(key column)]``, which makes attention plain.

Shapes: ``B`` images, ``M`` = B * prompts per image, ``T`` prompt tokens, a ``[h, w]`` grid of patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .model import PATCH, resize_positions, resize_relative

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

# Labels of prompt tokens; PAD is SAM's "not a point", ABSENT is a token that SAM would not have at all.
ABSENT, PAD, NEGATIVE, POSITIVE, CORNER_LOW, CORNER_HIGH = -2, -1, 0, 1, 2, 3
# Large enough to vanish in a softmax, small enough for every dtype.
HIDDEN = -1e4


@dataclass(frozen=True)
class Plan:
    """How to compute attention with relative positions.

    Attributes:
        fold: fold the positions into the head dimension; else add them as a bias tensor.
        pad: give the values the queries' head dimension, which flash attention wants.
        backend: the SDPA backend to insist on, or None for torch's choice.
    """

    fold: bool = True
    pad: bool = False
    backend: SDPBackend | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor, plan: Plan) -> Tensor:
    """Attention of ``[B, heads, h * w, C]`` with position terms ``rel_h`` [B, heads, h * w, h] and ``rel_w``."""
    batch, heads, _, dim = q.shape
    height, width = rel_h.shape[-1], rel_w.shape[-1]
    scale = dim**-0.5
    with sdpa_kernel(plan.backend) if plan.backend is not None else nullcontext():
        if not plan.fold:
            bias = (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        rows = torch.eye(height, device=q.device, dtype=q.dtype).repeat_interleave(width, 0)
        columns = torch.eye(width, device=q.device, dtype=q.dtype).repeat(height, 1)
        where = torch.cat([rows, columns], dim=-1)
        # Head dims that are a multiple of 8 spare the kernels a copy.
        spare = -(dim + height + width) % 8
        q = F.pad(torch.cat([q * scale, rel_h, rel_w], dim=-1), (0, spare))
        k = torch.cat([k, F.pad(where, (0, spare)).expand(batch, heads, -1, -1)], dim=-1)
        if plan.pad:
            v = F.pad(v, (0, q.shape[-1] - dim))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., :dim]


def _positions(table: Tensor, length: int) -> Tensor:
    """[length, length, C]: the table's row for each pair of query and key."""
    table = resize_relative(table, 2 * length - 1)
    along = torch.arange(length, device=table.device)
    return table[along[:, None] - along[None, :] + length - 1]


def attention(module: nn.Module, x: Tensor, plan: Plan) -> Tensor:
    """``Attention.forward`` of the image encoder, [B, h, w, C] to the same."""
    m: Any = module
    batch, height, width, _ = x.shape
    qkv = m.qkv(x).reshape(batch, height * width, 3, m.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    by_row = q.reshape(batch, m.num_heads, height, width, -1)
    rel_h = torch.einsum("bnhwc,hkc->bnhwk", by_row, _positions(m.rel_pos_h, height).to(q.dtype)).flatten(2, 3)
    rel_w = torch.einsum("bnhwc,wkc->bnhwk", by_row, _positions(m.rel_pos_w, width).to(q.dtype)).flatten(2, 3)
    out = attend(q, k, v, rel_h, rel_w, plan)
    return m.proj(out.transpose(1, 2).reshape(batch, height, width, -1))


def block(module: nn.Module, x: Tensor, plan: Plan) -> Tensor:
    """``Block.forward`` of the image encoder, [B, h, w, C] to the same."""
    from segment_anything.modeling.image_encoder import window_partition, window_unpartition

    m: Any = module
    height, width = x.shape[1:3]
    inner = m.norm1(x)
    if m.window_size > 0:
        inner, padded = window_partition(inner, m.window_size)
        inner = window_unpartition(attention(m.attn, inner, plan), m.window_size, padded, (height, width))
    else:
        inner = attention(m.attn, inner, plan)
    x = x + inner
    return x + m.mlp(m.norm2(x))


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    """LayerNorm2d on channels that come last."""
    m: Any = module
    return F.layer_norm(x, x.shape[-1:], m.weight, m.bias, m.eps)


def neck(module: nn.Module, x: Tensor) -> Tensor:
    """The encoder's neck, [B, h, w, C] to [B, h, w, 256]."""
    m: Any = module
    x = _norm(m[1], F.linear(x, m[0].weight.flatten(1)))
    return _norm(m[3], m[2](x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def encode(
    sam: Sam,
    images: Tensor,
    window_plan: Plan,
    global_plan: Plan,
    run_block: Callable[..., Tensor] = block,
    run_neck: Callable[..., Tensor] = neck,
) -> Tensor:
    """Image embeddings [B, h, w, 256] of normalised images [B, 3, H, W] of any size that the patches divide."""
    encoder = sam.image_encoder
    batch, channels, height, width = images.shape
    h, w = height // PATCH, width // PATCH
    # The patch embedding's kernel equals its stride: a matrix product.
    patches = images.view(batch, channels, h, PATCH, w, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(batch, h, w, -1)
    proj: Any = encoder.patch_embed.proj
    x = F.linear(patches, proj.weight.flatten(1), proj.bias)
    positions = encoder.pos_embed
    assert positions is not None
    x = x + resize_positions(positions, h)
    for module in encoder.blocks:
        x = run_block(module, x, window_plan if module.window_size > 0 else global_plan)
    return run_neck(encoder.neck, x)


def embed_tokens(sam: Sam, coords: Tensor, labels: Tensor, size: int) -> Tensor:
    """Prompt tokens [M, T, 256] in float32 of pixel coordinates [M, T, 2] and labels [M, T]."""
    encoder = sam.prompt_encoder
    with torch.autocast(coords.device.type, enabled=False):
        located = encoder.pe_layer.forward_with_coords(coords.float() + 0.5, (size, size))
        located = located.masked_fill((labels == PAD)[..., None], 0.0)
        kinds = torch.cat([encoder.not_a_point_embed.weight, *(e.weight for e in encoder.point_embeddings)])
        return located + F.embedding((labels + 1).clamp(min=0), kinds)


def dense_positions(sam: Sam, size: int) -> Tensor:
    """Positional encoding [1, h * w, 256] of the image embedding's grid."""
    grid = size // PATCH
    with torch.autocast(sam.device.type, enabled=False):
        return sam.prompt_encoder.pe_layer((grid, grid)).flatten(1).T[None]


def _mixed(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """The decoder's ``Attention.forward``; ``bias`` [M, 1, 1, keys] hides absent tokens."""
    m: Any = module
    q, k, v = (m._separate_heads(proj(x), m.num_heads) for proj, x in ((m.q_proj, q), (m.k_proj, k), (m.v_proj, v)))
    weights = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        weights = weights + bias
    return m.out_proj(m._recombine_heads(weights.softmax(dim=-1).to(v.dtype) @ v))


def _two_way(
    transformer: nn.Module, keys: Tensor, key_pe: Tensor, tokens: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """``TwoWayTransformer.forward`` on flattened keys [M, h * w, C]; returns tokens and keys."""
    m: Any = transformer
    queries = tokens
    for layer in m.layers:
        if layer.skip_first_layer_pe:
            queries = _mixed(layer.self_attn, queries, queries, queries, bias)
        else:
            q = queries + tokens
            queries = queries + _mixed(layer.self_attn, q, q, queries, bias)
        queries = layer.norm1(queries)
        queries = queries + _mixed(layer.cross_attn_token_to_image, queries + tokens, keys + key_pe, keys)
        queries = layer.norm2(queries)
        queries = layer.norm3(queries + layer.mlp(queries))
        keys = keys + _mixed(layer.cross_attn_image_to_token, keys + key_pe, queries + tokens, queries, bias)
        keys = layer.norm4(keys)
    queries = queries + _mixed(m.final_attn_token_to_image, queries + tokens, keys + key_pe, keys)
    return m.norm_final_attn(queries), keys


def _embed_masks(module: nn.Module, masks: Tensor) -> Tensor:
    """``mask_downscaling`` of logits [M, 4h, 4w], as [M, h, w, 256]: its kernels equal their strides."""
    m: Any = module
    count, height, width = masks.shape
    # Row 4 i + 2 a + c and column 4 j + 2 b + d, as [M, i, j, a, b, (c d)].
    cells = masks.view(count, height // 4, 2, 2, width // 4, 2, 2).permute(0, 1, 4, 2, 5, 3, 6).flatten(5)
    fine = m[2](_norm(m[1], F.linear(cells, m[0].weight.flatten(1), m[0].bias)))
    coarse = F.linear(fine.flatten(3), m[3].weight.permute(0, 2, 3, 1).flatten(1), m[3].bias)
    return F.linear(m[5](_norm(m[4], coarse)), m[6].weight.flatten(1), m[6].bias)


def _upscale(module: nn.Module, keys: Tensor) -> Tensor:
    """``output_upscaling`` of [M, h * w, 256] as [M, h * w * 16, 32], in the order (token, a, b, c, d) of sub-cells
    at row 4 i + 2 a + c and column 4 j + 2 b + d.
    """
    m: Any = module
    twice = F.linear(keys, m[0].weight.permute(2, 3, 1, 0).flatten(0, 2), m[0].bias.repeat(4))
    twice = m[2](_norm(m[1], twice.unflatten(-1, (4, -1))))
    fourfold = F.linear(twice, m[3].weight.permute(2, 3, 1, 0).flatten(0, 2), m[3].bias.repeat(4))
    return m[4](fourfold.unflatten(-1, (4, -1))).flatten(1, 3)


def decode(
    sam: Sam, embeddings: Tensor, positions: Tensor, tokens: Tensor, absent: Tensor, masks: Tensor, has_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """All four masks of every prompt.

    Args:
        sam: the model.
        embeddings: [B, h, w, 256].
        positions: ``dense_positions``, [1, h * w, 256].
        tokens: ``embed_tokens``, [M, T, 256].
        absent: bool [M, T], tokens that no one sees.
        masks: mask prompts as logits [M, 4h, 4w].
        has_mask: bool [M]; where False the mask prompt is ignored.

    Returns:
        Logits [M, 4, 4h, 4w] and predicted IoU [M, 4]; index 0 is the single-mask output.
    """
    prompt_encoder, decoder = sam.prompt_encoder, sam.mask_decoder
    batch, h, w, channels = embeddings.shape
    prompts = tokens.shape[0]
    dense = _embed_masks(prompt_encoder.mask_downscaling, masks)
    nothing = prompt_encoder.no_mask_embed.weight.to(dense.dtype)
    dense = torch.where(has_mask[:, None, None, None], dense, nothing)
    keys = (embeddings[:, None] + dense.unflatten(0, (batch, -1))).reshape(prompts, h * w, channels)

    output_tokens = torch.cat([decoder.iou_token.weight, decoder.mask_tokens.weight])
    own = output_tokens.shape[0]
    queries = torch.cat([output_tokens.expand(prompts, -1, -1), tokens], dim=1)
    bias = F.pad(torch.where(absent, HIDDEN, 0.0), (own, 0))[:, None, None, :]
    queries, keys = _two_way(decoder.transformer, keys, positions, queries, bias)

    mlps = decoder.output_hypernetworks_mlps
    weights = torch.stack([mlp(queries[:, 1 + index]) for index, mlp in enumerate(mlps)], dim=1)
    upscaled = _upscale(decoder.output_upscaling, keys)
    logits = weights.to(upscaled.dtype) @ upscaled.transpose(1, 2)
    # From (i, j, a, b, c, d) to rows (i, a, c) and columns (j, b, d).
    logits = logits.view(prompts, len(mlps), h, w, 2, 2, 2, 2).permute(0, 1, 2, 4, 6, 3, 5, 7)
    return logits.reshape(prompts, len(mlps), 4 * h, 4 * w), decoder.iou_prediction_head(queries[:, 0])
