"""The sizes that a Sam of segment_anything's own classes is built from, read off a model, optimised or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samopt.errors import SavedModelError

if TYPE_CHECKING:
    from segment_anything.modeling import Sam


@dataclass(frozen=True)
class EncoderGeometry:
    """The arguments of `ImageEncoderViT`, by their names there, and the `eps` of its blocks' norms."""

    img_size: int
    patch_size: int
    in_chans: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    out_chans: int
    qkv_bias: bool
    norm_eps: float
    use_abs_pos: bool
    use_rel_pos: bool
    window_size: int
    global_attn_indexes: tuple[int, ...]


@dataclass(frozen=True)
class PromptGeometry:
    """The arguments of `PromptEncoder`, by their names there."""

    embed_dim: int
    image_embedding_size: tuple[int, int]
    input_image_size: tuple[int, int]
    mask_in_chans: int


@dataclass(frozen=True)
class TransformerGeometry:
    """The arguments of `TwoWayTransformer`, by their names there."""

    depth: int
    embedding_dim: int
    num_heads: int
    mlp_dim: int
    attention_downsample_rate: int


@dataclass(frozen=True)
class DecoderGeometry:
    """The arguments of `MaskDecoder` other than its transformer, by their names there."""

    transformer_dim: int
    num_multimask_outputs: int
    iou_head_depth: int
    iou_head_hidden_dim: int


@dataclass(frozen=True)
class Geometry:
    """All that it takes to build a Sam, weights aside."""

    encoder: EncoderGeometry
    prompts: PromptGeometry
    transformer: TransformerGeometry
    decoder: DecoderGeometry
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    mask_threshold: float
    image_format: str

    @classmethod
    def of(cls, sam: Any) -> Geometry:
        """Reads the geometry of a Sam.

        Raises:
            SavedModelError: it is not of segment_anything's own classes.
        """
        from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

        _check_class(sam, Sam, "the model")
        _check_class(sam.image_encoder, ImageEncoderViT, "its image encoder")
        _check_class(sam.prompt_encoder, PromptEncoder, "its prompt encoder")
        _check_class(sam.mask_decoder, MaskDecoder, "its mask decoder")
        _check_class(sam.mask_decoder.transformer, TwoWayTransformer, "its decoder's transformer")
        try:
            return cls(
                _encoder(sam.image_encoder),
                _prompts(sam.prompt_encoder),
                _transformer(sam.mask_decoder.transformer),
                _decoder(sam.mask_decoder),
                tuple(sam.pixel_mean.flatten().tolist()),
                tuple(sam.pixel_std.flatten().tolist()),
                float(sam.mask_threshold),
                sam.image_format,
            )
        except (AttributeError, IndexError, TypeError) as error:
            raise SavedModelError(f"this model is not built as segment_anything builds a Sam: {error}") from error

    def build(self) -> Sam:
        """An unmodified Sam of this geometry on the meta device, in evaluation mode and without gradients."""
        from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

        encoder = vars(self.encoder) | {"norm_layer": partial(nn.LayerNorm, eps=self.encoder.norm_eps)}
        del encoder["norm_eps"]
        with torch.device("meta"):
            sam = Sam(
                ImageEncoderViT(**encoder),
                PromptEncoder(**vars(self.prompts)),
                MaskDecoder(transformer=TwoWayTransformer(**vars(self.transformer)), **vars(self.decoder)),
                list(self.pixel_mean),
                list(self.pixel_std),
            )
        for name in ("mask_threshold", "image_format"):
            if (value := getattr(self, name)) != getattr(Sam, name):
                setattr(sam, name, value)
        return sam.eval().requires_grad_(False)


def _check_class(module: Any, wanted: type, what: str) -> None:
    if type(module) is not wanted:
        raise SavedModelError(
            f"{what} is a {type(module).__name__}, not segment_anything's {wanted.__name__}: only models of its own "
            "classes can be saved"
        )


def _encoder(encoder: Any) -> EncoderGeometry:
    blocks, first, patch = encoder.blocks, encoder.blocks[0], encoder.patch_embed.proj
    windows = [block.window_size for block in blocks]
    return EncoderGeometry(
        img_size=encoder.img_size,
        patch_size=patch.kernel_size[0],
        in_chans=patch.in_channels,
        embed_dim=patch.out_channels,
        depth=len(blocks),
        num_heads=first.attn.num_heads,
        mlp_ratio=first.mlp.lin1.out_features / patch.out_channels,
        out_chans=encoder.neck[0].out_channels,
        qkv_bias=first.attn.qkv.bias is not None,
        norm_eps=first.norm1.eps,
        use_abs_pos=encoder.pos_embed is not None,
        use_rel_pos=first.attn.use_rel_pos,
        window_size=max(windows),
        global_attn_indexes=tuple(index for index, window in enumerate(windows) if window == 0),
    )


def _prompts(encoder: Any) -> PromptGeometry:
    embedding, pixels = encoder.image_embedding_size, encoder.input_image_size
    channels = encoder.mask_downscaling[3].out_channels
    return PromptGeometry(encoder.embed_dim, tuple(embedding), tuple(pixels), channels)


def _transformer(transformer: Any) -> TransformerGeometry:
    rate = transformer.embedding_dim // transformer.final_attn_token_to_image.internal_dim
    sizes = transformer.depth, transformer.embedding_dim, transformer.num_heads, transformer.mlp_dim
    return TransformerGeometry(*sizes, rate)


def _decoder(decoder: Any) -> DecoderGeometry:
    head = decoder.iou_prediction_head
    hidden = head.layers[0].out_features if head.num_layers > 1 else decoder.transformer_dim
    return DecoderGeometry(decoder.transformer_dim, decoder.num_multimask_outputs, head.num_layers, hidden)
