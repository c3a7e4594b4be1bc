"""The embedded model: Meta's own Sam classes at a small size, and its trained weights.

A vision transformer of 8 blocks, 192 wide with 3 heads (head dim 64, as in vit_b), window 14, three global blocks,
and the usual prompt encoder and mask decoder with a narrower MLP. It has every module and kernel shape of vit_b.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

TRAINED_SIZE = 1024
PATCH = 16
GLOBAL_BLOCKS = (2, 5, 7)
WEIGHTS = "sam_tiny.safetensors"
RECORD = "sam_tiny.json"
_EMBED = 256


def check_size(img_size: int) -> None:
    """Raises InvalidInput unless ``img_size`` is a positive multiple of the patch size."""
    if not isinstance(img_size, int) or img_size <= 0 or img_size % PATCH:
        raise InvalidInput(f"img_size is {img_size!r}; it must be a positive multiple of {PATCH}, such as 1024 or 256")


def build_tiny(img_size: int = TRAINED_SIZE) -> Sam:
    """Builds the untrained model, float32, in eval mode.

    Raises:
        InvalidInput: ``img_size`` is not a positive multiple of 16.
    """
    from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

    check_size(img_size)
    grid = img_size // PATCH
    sam = Sam(
        image_encoder=ImageEncoderViT(
            img_size=img_size,
            patch_size=PATCH,
            embed_dim=192,
            depth=8,
            num_heads=3,
            mlp_ratio=4,
            out_chans=_EMBED,
            qkv_bias=True,
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=14,
            global_attn_indexes=GLOBAL_BLOCKS,
        ),
        prompt_encoder=PromptEncoder(
            embed_dim=_EMBED,
            image_embedding_size=(grid, grid),
            input_image_size=(img_size, img_size),
            mask_in_chans=16,
        ),
        mask_decoder=MaskDecoder(
            num_multimask_outputs=3,
            transformer=TwoWayTransformer(depth=2, embedding_dim=_EMBED, mlp_dim=512, num_heads=8),
            transformer_dim=_EMBED,
            iou_head_depth=3,
            iou_head_hidden_dim=256,
        ),
    )
    return sam.eval()


def resize_positions(positions: Tensor, grid: int) -> Tensor:
    """Absolute positions [1, H, W, C] for a ``grid`` x ``grid`` of patches, bicubic; unchanged when they fit."""
    if tuple(positions.shape[1:3]) == (grid, grid):
        return positions
    resized = F.interpolate(positions.permute(0, 3, 1, 2), (grid, grid), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1)


def resize_relative(table: Tensor, length: int) -> Tensor:
    """A relative-position table [L, C] at another length, as segment_anything's ``get_rel_pos`` interpolates it."""
    if table.shape[0] == length:
        return table
    return F.interpolate(table.T[None], size=length, mode="linear")[0].T


def fit_state(state: dict[str, Tensor], img_size: int) -> dict[str, Tensor]:
    """The float32 state_dict for ``img_size`` from one of any size: positions are interpolated, the rest is kept."""
    grid = img_size // PATCH
    fitted = {name: tensor.to(torch.float32) for name, tensor in state.items()}
    name = "image_encoder.pos_embed"
    fitted[name] = resize_positions(fitted[name], grid).contiguous()
    for block in GLOBAL_BLOCKS:
        for axis in ("h", "w"):
            name = f"image_encoder.blocks.{block}.attn.rel_pos_{axis}"
            fitted[name] = resize_relative(fitted[name], 2 * grid - 1).contiguous()
    return fitted


def load_weights(path: str | Path, img_size: int = TRAINED_SIZE, device: str | torch.device = "cpu") -> Sam:
    """Builds the model with the weights of a safetensors file; see ``load_tiny``.

    Raises:
        CheckpointError: the file is missing or holds other weights.
        InvalidInput: ``img_size`` is not a positive multiple of 16.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    sam = build_tiny(img_size)
    try:
        sam.load_state_dict(fit_state(load_file(path), img_size))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the weights of the embedded model are missing: {path}; reinstall samopt, or train them with "
            "`python -m samopt.tiny.train --out DIR`"
        ) from error
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold the weights of the embedded model: {error}") from error
    return sam.to(device)


def load_tiny(img_size: int = TRAINED_SIZE, device: str | torch.device = "cpu") -> Sam:
    """Loads the embedded trained model.

    Args:
        img_size: side of the square input in pixels, a positive multiple of 16. Trained at 1024, 512 and 256; other
            sizes interpolate the positions.
        device: where the model goes.

    Returns:
        A ``segment_anything`` Sam, float32, in eval mode.

    Raises:
        CheckpointError: the weights file is missing from the installation.
        InvalidInput: ``img_size`` is not a positive multiple of 16.
    """
    with as_file(files("samopt.tiny") / WEIGHTS) as path:
        return load_weights(path, img_size, device)
