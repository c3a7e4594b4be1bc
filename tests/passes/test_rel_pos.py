from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_anything.modeling import ImageEncoderViT
from segment_anything.modeling.image_encoder import Attention, get_rel_pos
from torch import nn

from samopt import NoSites, Pass
from samopt.passes import CastDtype, HoistRelPos, SDPAttention
from samopt.passes.rel_pos import gather
from samopt.profiling.syncs import fake_cuda, on_fake_cuda, record_syncs
from tests.models import random_sam, randomise_positions
from tests.numerics import assert_bit_equal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_attention(
    grid: tuple[int, int], *, width: int = 64, heads: int = 1, qkv_bias: bool = True, rel_pos: bool = True
) -> Attention:
    attention = Attention(width, num_heads=heads, qkv_bias=qkv_bias, use_rel_pos=rel_pos, input_size=grid)
    randomise_positions(attention)
    return attention.eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("img_size", "width", "heads", "window", "qkv_bias", "batch"),
    [
        (64, 64, 1, 14, True, 4),  # one window, wider than the picture
        (80, 96, 3, 2, False, 3),  # 5 x 5 tokens in windows of 2, padded
        (336, 80, 1, 14, True, 2),  # 21 x 21 tokens in windows of 14, padded
        (80, 64, 1, 0, True, 1),  # no window anywhere
    ],
)
def test_encoder_is_bit_equal(
    dtype: torch.dtype, img_size: int, width: int, heads: int, window: int, qkv_bias: bool, batch: int
) -> None:
    sam = random_sam(img_size, width=width, heads=heads, window=window, qkv_bias=qkv_bias)
    encoder = sam.image_encoder.to(dtype)
    ours = copy.deepcopy(encoder)
    result = HoistRelPos()(ours)
    grid = img_size // 16
    assert [site.facts["grid"] for site in result.sites] == [(window or grid,) * 2, (grid, grid)]
    pixels = torch.randn(batch, 3, img_size, img_size, dtype=dtype)
    assert_bit_equal(ours(pixels), encoder(pixels))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (14, 5)])
@pytest.mark.parametrize("batch", [1, 4])
def test_attention_alone_is_bit_equal(dtype: torch.dtype, grid: tuple[int, int], batch: int) -> None:
    attention = random_attention(grid).to(dtype)
    ours = copy.deepcopy(attention)
    (site,) = HoistRelPos()(ours).sites
    assert site.facts["grid"] == grid
    tokens = torch.randn(batch, *grid, 64, dtype=dtype)
    assert_bit_equal(ours(tokens), attention(tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "size"), [(9, 5), (27, 14), (27, 5), (9, 14), (127, 16), (7, 21), (10, 4), (1, 1)])
def test_gather_is_metas(dtype: torch.dtype, length: int, size: int) -> None:
    table = torch.randn(length, 8).to(dtype)
    assert_bit_equal(gather(table, size), get_rel_pos(size, size, table))


def test_tables_of_another_length_are_resized_as_meta_does() -> None:
    sam = random_sam(80)
    attention = sam.image_encoder.blocks[1].attn
    attention.rel_pos_h = nn.Parameter(torch.randn(127, 64))  # as in a checkpoint for 1024 px
    attention.rel_pos_w = nn.Parameter(torch.randn(7, 64))
    ours = copy.deepcopy(sam.image_encoder)
    HoistRelPos()(ours)
    pixels = torch.randn(1, 3, 80, 80)
    assert_bit_equal(ours(pixels), sam.image_encoder(pixels))


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)])
def test_another_grid_than_hoisted_gathers_as_before(grid: tuple[int, int]) -> None:
    attention = random_attention((4, 5))
    ours = copy.deepcopy(attention)
    HoistRelPos()(ours)
    tokens = torch.randn(2, *grid, 64)
    assert_bit_equal(ours(tokens), attention(tokens))


def test_encoder_without_absolute_positions_takes_pictures_that_are_not_square() -> None:
    encoder = ImageEncoderViT(
        img_size=64, embed_dim=64, depth=2, num_heads=1, out_chans=32, use_abs_pos=False, use_rel_pos=True,
        window_size=3, global_attn_indexes=(1,),
    )  # fmt: skip
    randomise_positions(encoder)
    ours = copy.deepcopy(encoder)
    HoistRelPos()(ours)
    for shape in ((64, 64), (48, 80)):
        pixels = torch.randn(1, 3, *shape)
        assert_bit_equal(ours(pixels), encoder(pixels))


def copied(module: Any) -> Any:
    return copy.deepcopy(module)


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def cast(module: Any) -> Any:
    CastDtype(decoder=False)(module)
    return module


def fused(module: Any) -> Any:
    SDPAttention()(module)
    return module


@pytest.mark.parametrize("then", [lambda module: module, copied, pickled, cast, fused])
def test_loading_weights_rebuilds_the_tables(then: Callable[[Any], Any]) -> None:
    old, new = random_sam(seed=0), random_sam(seed=1)
    pixels = torch.randn(1, 3, 64, 64)
    HoistRelPos()(old)
    old = then(old)
    before = old.image_encoder(pixels)
    old.load_state_dict(new.state_dict())
    HoistRelPos()(new)
    new = then(new)
    assert_bit_equal(old.image_encoder(pixels), new.image_encoder(pixels))
    assert not torch.equal(old.image_encoder(pixels), before)


def test_loading_into_a_copy_leaves_the_original() -> None:
    sam, other = random_sam(seed=0), random_sam(seed=1)
    HoistRelPos()(sam)
    pixels = torch.randn(1, 3, 64, 64)
    before = sam.image_encoder(pixels)
    copy.deepcopy(sam).load_state_dict(other.state_dict())
    assert_bit_equal(sam.image_encoder(pixels), before)


@pytest.mark.parametrize("order", [(HoistRelPos(), SDPAttention()), (SDPAttention(), HoistRelPos())])
def test_fused_attention_reads_the_hoisted_tables(
    order: tuple[HoistRelPos | SDPAttention, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sam = random_sam()
    for pass_ in order:
        pass_(sam)
    monkeypatch.setattr("samopt.passes.rel_pos.gather", None)  # calling it would raise
    sam.image_encoder(torch.randn(1, 3, 64, 64))


def test_tables_are_not_saved() -> None:
    sam = random_sam()
    before = {key: value.shape for key, value in sam.state_dict().items()}
    HoistRelPos()(sam)
    assert {key: value.shape for key, value in sam.state_dict().items()} == before
    assert "_samopt_table_h" in dict(sam.image_encoder.blocks[0].attn.named_buffers())


def test_no_relative_positions_is_a_skip() -> None:
    with pytest.raises(NoSites, match="has no relative positions"):
        HoistRelPos()(random_sam(rel_pos=False))


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
@pytest.mark.parametrize("then", [(), (SDPAttention(),), (CastDtype(),), (SDPAttention(), CastDtype())])
def test_no_attention_waits_for_an_index(then: tuple[Pass, ...]) -> None:
    sam = random_sam(80, depth=3, window=2)
    with record_syncs() as before:
        on_fake_cuda(sam.image_encoder)(fake_cuda(torch.zeros(2, 3, 80, 80)))
    assert len(before) >= 3
    assert {sync.reason for sync in before} == {"indexes with a tensor of the host"}
    for pass_ in (HoistRelPos(), *then):
        pass_(sam)
    with record_syncs() as after:
        on_fake_cuda(sam.image_encoder)(fake_cuda(torch.zeros(2, 3, 80, 80)))
    assert after == []


@pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")
def test_another_grid_waits_for_nothing_either() -> None:
    attention = random_attention((4, 4))
    HoistRelPos()(attention)
    with record_syncs() as syncs:
        on_fake_cuda(attention)(fake_cuda(torch.zeros(1, 5, 3, 64)))
    assert syncs == []
