from __future__ import annotations

import copy
import functools
from typing import Any, Literal

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import AlreadyApplied, NoSites, Site, Skip, Unsupported
from samopt.passes import CastDtype, Float8Dynamic, TritonAttention
from samopt.passes.encoder_block import ATTEND, attend
from tests.models import random_sam
from tests.numerics import assert_rounding, relative_error

HALF: tuple[Literal["bfloat16", "float16"], ...] = ("float16", "bfloat16")


class Attended(nn.Module):
    """The attention of a block, without the residual that would hide its errors."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        run = getattr(self.block, ATTEND, functools.partial(attend, self.block))
        attended: Tensor = run(x)
        return attended


def cast_sam(img_size: int = 80, *, dtype: Literal["bfloat16", "float16"] = "float16", **sizes: Any) -> Sam:
    sam = random_sam(img_size, **sizes)
    CastDtype(dtype)(sam)
    return sam


def rewritten(model: Any) -> Any:
    ours = copy.deepcopy(model)
    TritonAttention()(ours)
    return ours


def reasons(model: nn.Module) -> dict[str, str]:
    """Why each block is left out, those that are none aside."""
    return {found.fqn: found.reason for found in TritonAttention().match(model) if isinstance(found, Skip)}


# Where it applies


def test_on_a_cpu_it_refuses() -> None:
    with pytest.raises(Unsupported, match="Triton kernels need a GPU and the model is on cpu; leave triton_attention"):
        TritonAttention()(cast_sam())


def test_sites_tell_grid_and_window() -> None:
    sites = [found for found in TritonAttention().match(cast_sam(window=3)) if isinstance(found, Site)]
    assert [site.fqn for site in sites] == ["image_encoder.blocks.0", "image_encoder.blocks.1"]
    assert [site.facts for site in sites] == [{"grid": (5, 5), "window": (3, 3)}, {"grid": (5, 5), "window": (5, 5)}]


@pytest.mark.usefixtures("kernels_anywhere")
def test_float32_is_told_to_cast_first() -> None:
    with pytest.raises(NoSites, match=r"rewrite: its weights are float32: apply CastDtype first \(2 modules\)"):
        TritonAttention()(random_sam())


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"rel_pos": False}, "it has no relative positions"),
        ({"width": 48, "heads": 2}, "its head dimension 24 is not among 16, 32, 48, 64"),
        ({"width": 16, "heads": 2}, "its head dimension 8 is not among 16, 32, 48, 64"),
        ({"width": 256}, "its head dimension 256 is not among 16, 32, 48, 64"),
    ],
)
def test_what_the_kernels_do_not_fit_is_a_skip(sizes: dict[str, Any], reason: str) -> None:
    found = reasons(cast_sam(**sizes))
    assert found.keys() == {"image_encoder.blocks.0", "image_encoder.blocks.1"}
    assert all(why.startswith(reason) for why in found.values())


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128])
def test_head_dimensions_that_fit(head_dim: int) -> None:
    assert reasons(cast_sam(width=2 * head_dim, heads=2)) == {}


def test_a_window_too_large_is_a_skip_and_a_grid_that_large_is_not() -> None:
    found = reasons(cast_sam(64 * 16, width=16, window=63))
    assert found == {"image_encoder.blocks.0": "its windows of 63x63 tokens are larger than 62x62"}


def test_an_encoder_that_does_not_say_its_size_is_a_skip() -> None:
    sam = cast_sam()
    sam.image_encoder.pos_embed = None
    assert reasons(sam) == {}, "img_size is enough"
    del sam.image_encoder.img_size
    assert set(reasons(sam).values()) == {"the encoder does not say its image size"}


def test_a_quantised_projection_is_a_skip_that_says_so() -> None:
    sam = cast_sam()
    Float8Dynamic(("qkv",))(sam)
    assert set(reasons(sam).values()) == {"qkv: its weights are float8 already"}


class LoRA(nn.Module):
    """As in fine-tuned SAMs: a projection and a low-rank change of its queries and values."""

    def __init__(self, qkv: nn.Linear) -> None:
        super().__init__()
        self.qkv, self.down, self.up = qkv, nn.Linear(64, 4, bias=False), nn.Linear(4, 3 * 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.qkv(x) + self.up(self.down(x))
        return changed


class Shifted(nn.Linear):
    """A linear layer by its attributes, with something of its own for a zero token."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize("wrapped", [LoRA, lambda qkv: Shifted(64, 192)])
def test_a_qkv_that_is_no_linear_layer_is_a_skip(wrapped: Any) -> None:
    sam = cast_sam()
    sam.image_encoder.blocks[0].attn.qkv = wrapped(sam.image_encoder.blocks[0].attn.qkv)
    reason = "its qkv is no plain linear layer: what it makes of a zero token cannot be told"
    assert reasons(sam) == {"image_encoder.blocks.0": reason}


class NegativeAttention(nn.Module):
    """A look-alike: the attributes of SAM's attention, other arithmetic."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.scale, self.num_heads = attention.qkv, attention.proj, -1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_look_alikes_are_skips() -> None:
    sam = cast_sam(depth=3)
    blocks = sam.image_encoder.blocks
    blocks[0].attn = NegativeAttention(blocks[0].attn)
    blocks[1].attn = nn.Identity()
    assert reasons(sam) == {
        "image_encoder.blocks.0": "its forward is not the code of segment_anything's Attention.forward",
        "image_encoder.blocks.1": "it has no attention of the known form",
    }
    blocks[2].forward = lambda x: x
    assert reasons(sam)["image_encoder.blocks.2"] == "its forward was replaced on this module"


# What it computes


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("window", [0, 3, 5, 14], ids=["global", "padded", "dividing", "larger than the grid"])
def test_attention_errs_like_the_unmodified_one(
    dtype: Literal["bfloat16", "float16"], batch: int, qkv_bias: bool, window: int
) -> None:
    sam = random_sam(80 if window != 5 else 160, width=96, heads=2, depth=1, window=window, global_blocks=())
    encoder, grid = sam.image_encoder, 5 if window != 5 else 10
    qkv = encoder.blocks[0].attn.qkv
    if qkv_bias:
        nn.init.normal_(qkv.bias)  # what the filled-up tokens are
    else:
        qkv.bias = None
    encoder.to(getattr(torch, dtype))
    ours = rewritten(sam).image_encoder.blocks[0]
    tokens = torch.randn(batch, grid, grid, 96, dtype=getattr(torch, dtype))
    assert_rounding(Attended(encoder.blocks[0]), Attended(ours), [tokens])


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("img_size", "sizes", "batch"),
    [
        (80, {"window": 3}, 3),
        (80, {"window": 5, "qkv_bias": False}, 1),
        (64, {"window": 14}, 1),
        (96, {"width": 160, "heads": 2, "window": 4}, 3),
    ],
)
def test_encoder_errs_like_the_unmodified_one(
    dtype: Literal["bfloat16", "float16"], img_size: int, sizes: dict[str, Any], batch: int
) -> None:
    sam = cast_sam(img_size, dtype=dtype, **sizes)
    torch.manual_seed(1)
    pixels = torch.randn(batch, 3, img_size, img_size)
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [pixels])


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("size", [(48, 48), (112, 64)])
def test_another_image_size_than_the_encoder_was_made_for(size: tuple[int, int]) -> None:
    sam = random_sam(80, window=3)
    sam.image_encoder.pos_embed = None
    CastDtype("float16")(sam)
    ours = rewritten(sam)
    assert_rounding(sam.image_encoder, ours.image_encoder, [torch.randn(2, 3, *size)])


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_embedded_model(dtype: Literal["bfloat16", "float16"], batch: int, tiny256: Sam) -> None:
    sam = copy.deepcopy(tiny256)
    CastDtype(dtype)(sam)
    pixels = torch.rand(batch, 3, 8, 8).repeat_interleave(32, 2).repeat_interleave(32, 3) * 4 - 2
    assert_rounding(sam.image_encoder, rewritten(sam).image_encoder, [pixels])


# What goes on top of it


@pytest.mark.usefixtures("kernels_anywhere")
@torch.no_grad()
def test_projections_are_called_and_may_be_replaced() -> None:
    sam = cast_sam(window=3, seed=0)
    other = cast_sam(window=3, seed=1)
    ours = rewritten(sam)
    for model in (sam, ours):
        for block, theirs in zip(model.image_encoder.blocks, other.image_encoder.blocks, strict=True):
            nn.init.normal_(theirs.attn.qkv.bias, generator=torch.Generator().manual_seed(0))
            block.attn.qkv, block.attn.proj = theirs.attn.qkv, theirs.attn.proj
    pixels = torch.randn(1, 3, 80, 80)
    assert_rounding(sam.image_encoder, ours.image_encoder, [pixels])
    assert relative_error(ours.image_encoder(pixels), rewritten(cast_sam(window=3)).image_encoder(pixels)) > 0.1


@pytest.mark.usefixtures("kernels_anywhere")
def test_under_autocast_the_operator_gets_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[torch.dtype]] = []

    def record(qkv: Tensor, padding: Tensor, rel_pos_h: Tensor, rel_pos_w: Tensor, *_: Any) -> Tensor:
        seen.append({tensor.dtype for tensor in (qkv, padding, rel_pos_h, rel_pos_w)})
        return qkv[..., :64].contiguous()

    block = rewritten(cast_sam(dtype="float16")).image_encoder.blocks[0]
    monkeypatch.setattr("samopt.passes.triton_attention.attention", record)
    with torch.autocast("cpu", torch.bfloat16):
        Attended(block)(torch.randn(1, 5, 5, 64, dtype=torch.float16))
    assert seen == [{torch.bfloat16}]


@pytest.mark.usefixtures("kernels_anywhere")
def test_twice_says_so() -> None:
    ours = rewritten(cast_sam())
    with pytest.raises(AlreadyApplied, match="TritonAttention was applied to this model already"):
        TritonAttention()(ours)
