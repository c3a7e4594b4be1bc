from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from segment_anything.modeling import image_encoder, transformer
from torch import Tensor, nn

from samopt import Site
from samopt.passes import CastDtype, HoistRelPos, SDPAttention, sdpa
from samopt.passes.rel_pos import tables
from samopt.passes.sdpa import of_few_queries
from samopt.profiling.syncs import fake_cuda, on_fake_cuda, record_syncs
from tests.models import random_sam, randomise_positions
from tests.numerics import assert_bit_equal, assert_rounding, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Folded(nn.Module):
    """A rewritten attention run as on a GPU, where the positions fold into the head dimension."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention: Any = attention

    def forward(self, x: Tensor) -> Tensor:
        module, (batch, height, width, _) = self.attention, x.shape
        qkv = module.qkv(x).reshape(batch, height * width, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        table_h, table_w = tables(module, (height, width))
        rows = q.unflatten(2, (height, width))
        rel_h, rel_w = torch.einsum("bnhwc,hkc->bnhwk", rows, table_h), torch.einsum("bnhwc,wkc->bnhwk", rows, table_w)
        out = sdpa._folded(module, q, k, v, rel_h, rel_w)
        projected: Tensor = module.proj(out.transpose(1, 2).reshape(x.shape))
        return projected


def random_attention(
    grid: tuple[int, int], *, head_dim: int = 64, heads: int = 2, qkv_bias: bool = True, rel_pos: bool = True
) -> nn.Module:
    torch.manual_seed(0)
    width = head_dim * heads
    attention = image_encoder.Attention(width, heads, qkv_bias, use_rel_pos=rel_pos, input_size=grid)
    randomise_positions(attention)
    return attention.eval()


def rewritten(module: nn.Module) -> nn.Module:
    ours = copy.deepcopy(module)
    SDPAttention()(ours)
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["bias", "folded"])
@pytest.mark.parametrize(
    ("grid", "head_dim", "heads", "qkv_bias", "batch"),
    [
        ((14, 14), 64, 2, True, 4),  # a window
        ((5, 5), 32, 3, False, 1),
        ((21, 21), 80, 1, True, 2),  # the global blocks at 336 px
        ((3, 8), 64, 1, False, 3),
        ((1, 7), 80, 2, True, 1),
    ],
)
def test_attention_errs_like_the_unmodified_one(
    dtype: torch.dtype, path: str, grid: tuple[int, int], head_dim: int, heads: int, qkv_bias: bool, batch: int
) -> None:
    attention = random_attention(grid, head_dim=head_dim, heads=heads, qkv_bias=qkv_bias).to(dtype)
    ours = rewritten(attention)
    tokens = torch.randn(batch, *grid, head_dim * heads, dtype=dtype)
    assert_rounding(attention, Folded(ours) if path == "folded" else ours, [tokens])


@pytest.mark.parametrize("path", ["bias", "folded"])
def test_is_the_attention_in_float64(path: str) -> None:
    attention = random_attention((6, 3)).double()
    ours = rewritten(attention)
    tokens = torch.randn(2, 6, 3, 128, dtype=torch.float64)
    error = relative_error((Folded(ours) if path == "folded" else ours)(tokens), attention(tokens))
    assert error < 1e-14


@pytest.mark.parametrize("path", ["bias", "folded"])
@pytest.mark.parametrize("grid", [(4, 4), (5, 3), (5, 4)])
def test_another_grid_than_matched(path: str, grid: tuple[int, int]) -> None:
    attention = random_attention((4, 5))
    ours = rewritten(attention)
    HoistRelPos()(ours)
    assert_rounding(attention, Folded(ours) if path == "folded" else ours, [torch.randn(2, *grid, 128)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_without_positions(dtype: torch.dtype) -> None:
    attention = random_attention((4, 4), rel_pos=False).to(dtype)
    assert_rounding(attention, rewritten(attention), [torch.randn(2, 4, 4, 128, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("downsample", [1, 2])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(7, 7, 1), (7, 25, 4), (256, 5, 2)])
def test_two_way_attention_errs_like_the_unmodified_one(
    dtype: torch.dtype, downsample: int, queries: int, keys: int, batch: int
) -> None:
    torch.manual_seed(0)
    attention = transformer.Attention(64, num_heads=4, downsample_rate=downsample).eval().to(dtype)
    inputs = [torch.randn(batch, tokens, 64, dtype=dtype) for tokens in (queries, keys, keys)]
    assert_rounding(attention, rewritten(attention), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("img_size", "width", "heads", "window", "qkv_bias", "batch"),
    [
        (64, 64, 2, 14, True, 4),
        (80, 96, 3, 2, False, 3),
        (336, 80, 1, 14, True, 1),
        (80, 64, 1, 0, True, 2),
    ],
)
def test_encoder_errs_like_the_unmodified_one(
    dtype: torch.dtype, img_size: int, width: int, heads: int, window: int, qkv_bias: bool, batch: int
) -> None:
    sam = random_sam(img_size, width=width, heads=heads, window=window, qkv_bias=qkv_bias)
    encoder = sam.image_encoder.to(dtype)
    ours = rewritten(encoder)
    torch.manual_seed(1)
    assert_rounding(encoder, ours, [torch.randn(batch, 3, img_size, img_size, dtype=dtype)])


def test_decoder_errs_like_the_unmodified_one() -> None:
    decoder = random_sam().mask_decoder
    torch.manual_seed(0)
    inputs = [torch.randn(1, 64, 4, 4), torch.randn(1, 64, 4, 4), torch.randn(3, 2, 64), torch.randn(3, 64, 4, 4)]
    assert_rounding(Multimask(decoder), Multimask(rewritten(decoder)), inputs)


class Multimask(nn.Module):
    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self.decoder(*inputs, multimask_output=True))


@pytest.mark.parametrize("pass_", [SDPAttention(decoder=False), SDPAttention(encoder=False)])
def test_options_choose_encoder_or_decoder(pass_: SDPAttention) -> None:
    sam = random_sam()
    other = replace(pass_, encoder=not pass_.encoder, decoder=not pass_.decoder)
    everything, mine, others = (
        [found.fqn for found in which.match(sam) if isinstance(found, Site)] for which in (SDPAttention(), pass_, other)
    )
    assert len(mine) == (2 if pass_.encoder else 7)
    assert sorted(mine + others) == sorted(everything)
    assert all(fqn.startswith("image_encoder" if pass_.encoder else "mask_decoder") for fqn in mine)


def test_order_with_hoisted_tables_does_not_matter() -> None:
    one, other = random_sam(), random_sam()
    for sam, passes in ((one, (HoistRelPos(), SDPAttention())), (other, (SDPAttention(), HoistRelPos()))):
        for pass_ in passes:
            pass_(sam)
    pixels = torch.randn(2, 3, 64, 64)
    assert_bit_equal(one.image_encoder(pixels), other.image_encoder(pixels))


def test_keys_stay_and_positions_are_not_saved() -> None:
    sam = random_sam()
    before = {key: value.shape for key, value in sam.state_dict().items()}
    SDPAttention()(sam)
    assert {key: value.shape for key, value in sam.state_dict().items()} == before


@pytest.mark.parametrize("order", [(SDPAttention(), CastDtype()), (CastDtype(), SDPAttention())])
def test_positions_follow_the_dtype(order: tuple[SDPAttention | CastDtype, ...]) -> None:
    sam = random_sam(80)
    for pass_ in order:
        pass_(sam)
    attention = sam.image_encoder.blocks[0].attn
    assert getattr(attention, sdpa.POSITIONS).dtype == torch.bfloat16
    tokens = torch.randn(1, 14, 14, 64, dtype=torch.bfloat16)
    assert Folded(attention)(tokens).dtype == torch.bfloat16


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
def test_on_a_gpu_positions_fold_and_are_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sam = random_sam(80, window=3)
    for pass_ in (HoistRelPos(), SDPAttention(), CastDtype()):
        pass_(sam)
    lengths: list[tuple[int, int]] = []
    fused = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert "attn_mask" not in options
        assert q.is_cuda
        lengths.append((q.shape[-1], v.shape[-1]))
        return fused(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(sdpa, "key_positions", None)  # calling it would raise
    with record_syncs() as syncs:
        embedding = on_fake_cuda(sam.image_encoder)(fake_cuda(torch.zeros(2, 3, 80, 80)))
    assert embedding.shape == (2, 64, 5, 5)
    assert embedding.dtype == torch.float32
    assert syncs == []
    # 64 + 3 + 3 for a window and 64 + 5 + 5 for the whole grid, each up to a multiple of 8.
    assert lengths == [(72, 64), (80, 64)]


def test_attention_of_few_queries_is_that_of_heads() -> None:
    generator = torch.Generator().manual_seed(1)
    few, many, values = (torch.randn(3, n, 32, generator=generator, dtype=torch.float64) for n in (7, 60, 60))
    q, k, v = (x.unflatten(2, (4, 8)).transpose(1, 2) for x in (few, many, values))
    expected = (torch.softmax(q @ k.mT / 8**0.5, dim=-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(of_few_queries(few, many, values, 4), expected, atol=1e-14, rtol=0)
