"""Small Sams of Meta's own classes with random weights, for tests that need shapes and arithmetic, not good masks."""

from __future__ import annotations

from functools import partial

import torch
from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer
from torch import nn


def random_sam(
    img_size: int = 64,
    *,
    width: int = 64,
    heads: int = 1,
    depth: int = 2,
    window: int = 14,
    global_blocks: tuple[int, ...] = (1,),
    qkv_bias: bool = True,
    rel_pos: bool = True,
    decoder_width: int = 64,
    seed: int = 0,
) -> Sam:
    """A Sam in evaluation mode, the same from the same seed, its position tables randomised too.

    Meta initialises the tables to zero: a test on such a model would not see a position term that is wrong.
    """
    grid = img_size // 16
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sam = Sam(
            image_encoder=ImageEncoderViT(
                img_size=img_size,
                embed_dim=width,
                depth=depth,
                num_heads=heads,
                out_chans=decoder_width,
                qkv_bias=qkv_bias,
                norm_layer=partial(nn.LayerNorm, eps=1e-6),
                use_rel_pos=rel_pos,
                window_size=window,
                global_attn_indexes=global_blocks,
            ),
            prompt_encoder=PromptEncoder(
                embed_dim=decoder_width,
                image_embedding_size=(grid, grid),
                input_image_size=(img_size, img_size),
                mask_in_chans=16,
            ),
            mask_decoder=MaskDecoder(
                num_multimask_outputs=3,
                transformer=TwoWayTransformer(depth=2, embedding_dim=decoder_width, num_heads=8, mlp_dim=128),
                transformer_dim=decoder_width,
                iou_head_depth=3,
                iou_head_hidden_dim=64,
            ),
        )
        randomise_positions(sam.image_encoder)
    return sam.eval()


@torch.no_grad()
def randomise_positions(module: nn.Module) -> None:
    """Draws every relative and absolute position table of `module` anew, large enough to matter in the logits."""
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in ("rel_pos_h", "rel_pos_w", "pos_embed"):
            nn.init.normal_(parameter, std=0.3)
