"""The mask decoder without a copy of the image for every prompt.

SAM repeats the image's embedding and its positions for each of N prompts, and adds the embedding of the prompt's mask:
without one, that is the same for all. Until the image tokens first attend to the prompt's, at the end of the first
layer, the image side so holds N times the same numbers, and their projections are computed N times: the keys and
values that tokens attend to, and the queries of the image. Positions are equal for all prompts throughout.

Here what is equal stays a batch of one. SAM's own layers broadcast it, and `SDPAttention`'s attention does so
without a copy: all prompts' tokens attend to one set of keys as one long sequence of queries. Of 64 prompts this saves
a fifth of the decoder's arithmetic. The networks that make the masks' weights, one per mask, run as one batch.

Upscaling is two transposed convolutions whose patches do not overlap, so each is a linear layer of every token, and
what lies between them and after them is of every pixel too. So the image stays tokens, as the transformer has it, of
16 pixels each, and only the masks are put in the order of pixels. What the convolutions take from memory is what they
need, in the layout that matrix products read fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from samopt.base import Numerics, Pass, Phase
from samopt.errors import InvalidInput
from samopt.passes.parts import has_hooks
from samopt.rebind import clone, mark, marked, rebind_inside
from samopt.result import Site, Skip
from samopt.structure import differs, mask_decoders

ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU)


@dataclass(frozen=True)
class FusedMaskDecoder(Pass):
    """Predicts masks with one copy of the image for all prompts, as long as the arithmetic allows.

    Results are SAM's for every kind of prompt. One thing is new: `image_embeddings` may hold one image for each prompt,
    [N, C, h, w], where SAM's code would repeat each of them N times, and fail.

    It gains the most together with `SDPAttention`, in either order: SAM's own attention computes what is shared once,
    but copies it for its products.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the mask decoders; one whose code, or whose transformer's, is not SAM's is a Skip."""
        for fqn, decoder in mask_decoders(model):
            reason = _unfit(decoder)
            yield Skip(fqn, reason) if reason else Site(fqn)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        rebind_inside(new, "predict_masks", predict_masks)
        mark(*_broadcasting(new.transformer))
        if _alike(new.output_hypernetworks_mlps):
            mark(*new.output_hypernetworks_mlps)
        if _by_token(new.output_upscaling):
            mark(*_parts(new.output_upscaling))
        return new


def _unfit(decoder: Any) -> str | None:
    from segment_anything.modeling import MaskDecoder, TwoWayTransformer
    from segment_anything.modeling.transformer import Attention, TwoWayAttentionBlock

    if reason := differs(decoder, "predict_masks", MaskDecoder.predict_masks):
        return reason
    if reason := differs(decoder.transformer, "forward", TwoWayTransformer.forward):
        return f"transformer: {reason}"
    for index, layer in enumerate(decoder.transformer.layers):
        if reason := differs(layer, "forward", TwoWayAttentionBlock.forward):
            return f"transformer.layers.{index}: {reason}"
    for attention in _attentions(decoder.transformer):
        if reason := differs(attention, "forward", Attention.forward):
            return f"an attention of its transformer: {reason}"
    return None


def _attentions(transformer: Any) -> Iterator[nn.Module]:
    """The attention modules of a two-way transformer that see the image."""
    for layer in transformer.layers:
        yield from (layer.cross_attn_token_to_image, layer.cross_attn_image_to_token)
    yield transformer.final_attn_token_to_image


def _broadcasting(transformer: Any) -> list[nn.Module]:
    """The modules that must take an image side of batch 1: those of SAM's code do."""
    return [transformer, *transformer.layers, *_attentions(transformer)]


def _alike(mlps: Sequence[Any]) -> bool:
    """Whether modules are SAM's MLPs, and can run as one batch."""
    from segment_anything.modeling.mask_decoder import MLP

    if not len(mlps) or any(differs(mlp, "forward", MLP.forward) or mlp.sigmoid_output for mlp in mlps):
        return False
    shapes = {tuple(getattr(layer, "weight", torch.empty(0)).shape for layer in mlp.layers) for mlp in mlps}
    return len(shapes) == 1


def predict_masks(
    self: Any,
    image_embeddings: Tensor,
    image_pe: Tensor,
    sparse_prompt_embeddings: Tensor,
    dense_prompt_embeddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """SAM's masks for N prompts, without a copy of the image for each.

    Args:
        self: a mask decoder.
        image_embeddings: [1, C, h, w], one image for all prompts, or [N, C, h, w], one for each; or several images and
            one prompt for all of them.
        image_pe: the positions of the image tokens, [1, C, h, w].
        sparse_prompt_embeddings: points and boxes, [N, T, C].
        dense_prompt_embeddings: [N, C, h, w], or [1, C, h, w] for all. Where its batch is expanded (stride 0), as
            SAM's is without mask prompts, all prompts share one.

    Returns:
        Logits [N, masks, 4 h, 4 w] and predicted IoU [N, masks].

    Raises:
        InvalidInput: neither one image, nor one prompt, nor as many images as prompts.
    """
    prompts = sparse_prompt_embeddings.shape[0]
    own = torch.cat([self.iou_token.weight, self.mask_tokens.weight]).expand(prompts, -1, -1)
    tokens = torch.cat((own, sparse_prompt_embeddings), dim=1)

    image, dense = shared(image_embeddings), shared(dense_prompt_embeddings)
    if image.shape[0] != 1 and prompts != 1 and image.shape[0] != prompts:
        raise InvalidInput(
            f"the mask decoder got {image.shape[0]} image embeddings for {prompts} prompts: "
            "pass one for all prompts, or one for each"
        )
    src = image + dense
    height, width = src.shape[2:]
    if not marked(*_broadcasting(self.transformer)):  # a module put there later sees what SAM's code would give it
        if src.shape[0] == 1:
            src = torch.repeat_interleave(src, prompts, dim=0)
        image_pe = torch.repeat_interleave(image_pe, prompts, dim=0)
    hs, src = self.transformer(src, image_pe, tokens)

    pixels = upscaled(self.output_upscaling, src, (height, width))
    hyper_in = hypernetworks(self.output_hypernetworks_mlps, hs[:, 1 : 1 + self.num_mask_tokens])
    return masks_of(pixels, hyper_in, (height, width)), self.iou_prediction_head(hs[:, 0])


def shared(batch: Tensor) -> Tensor:
    """A batch [B, ...] as [1, ...] where all of it is one tensor, expanded."""
    return batch[:1] if batch.stride(0) == 0 else batch


def hypernetworks(mlps: Any, tokens: Tensor) -> Tensor:
    """The weights of the masks, of one MLP each: [N, M, C] to [N, M, C / 8].

    The weights are stacked at every call, 2 MiB for SAM's: so there is nothing to go stale. MLPs or layers that were
    replaced, or have hooks, run one by one.
    """
    as_checked = marked(*mlps) and all(plain(layer) for mlp in mlps for layer in mlp.layers)
    if not as_checked or has_hooks(*mlps.modules()):
        return torch.stack([mlp(tokens[:, index]) for index, mlp in enumerate(mlps)], dim=1)
    x = tokens.transpose(0, 1)
    depth = len(mlps[0].layers)
    for index in range(depth):
        layers = [mlp.layers[index] for mlp in mlps]
        weight, bias = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        x = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
        if index < depth - 1:
            x = F.relu(x)
    return x.transpose(0, 1)


def upscaled(upscaling: Any, tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """The features of pixels, 4 x 4 of every image token.

    Modules of the upscaling that were replaced, or have hooks, run as in SAM.

    Args:
        upscaling: the decoder's `output_upscaling`.
        tokens: of the image, [N, h * w, C].
        size: (h, w).

    Returns:
        [N, h * w, 4, 4, C / 8]: of a token its four quarters, row by row, and of a quarter its four pixels.
    """
    if not marked(*_parts(upscaling)) or has_hooks(*upscaling.modules()):
        pixels = upscaling(tokens.transpose(1, 2).unflatten(2, size))
        split = pixels.unflatten(3, (size[1], 2, 2)).unflatten(2, (size[0], 2, 2))
        return split.permute(0, 2, 5, 3, 6, 4, 7, 1).flatten(1, 2).flatten(2, 3).flatten(3, 4)
    first, norm, activation, second, last = upscaling
    x = _of_each_token(first, tokens)  # [N, h * w, 4, C / 4]
    x = activation(F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps))
    out: Tensor = last(_of_each_token(second, x))
    return out


def masks_of(pixels: Tensor, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Logits [N, M, 4 h, 4 w]: the features of pixels, as `upscaled` has them, times the weights [N, M, C / 8]."""
    masks = pixels.flatten(1, 3) @ weights.transpose(1, 2)
    split = masks.unflatten(1, (*size, 2, 2, 2, 2))  # the token's row and column, the quarter's, the pixel's
    return split.permute(0, 7, 1, 3, 5, 2, 4, 6).flatten(5).flatten(2, 4)


def _of_each_token(convolution: nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """A transposed convolution of 2 x 2 with stride 2, of every token alone: [..., C] to [..., 4, D], row by row."""
    assert convolution.bias is not None
    weight = convolution.weight.permute(2, 3, 1, 0).flatten(0, 2)  # [4 * D, C]
    return F.linear(x, weight, convolution.bias.repeat(4)).unflatten(-1, (4, -1))


def _by_token(upscaling: Any) -> bool:
    """Whether the upscaling is SAM's, and so is of every token alone."""
    from segment_anything.modeling.common import LayerNorm2d

    kinds = (nn.ConvTranspose2d, LayerNorm2d, ELEMENTWISE, nn.ConvTranspose2d, ELEMENTWISE)
    if type(upscaling) is not nn.Sequential or len(upscaling) != len(kinds):
        return False
    if differs(upscaling[1], "forward", LayerNorm2d.forward):
        return False
    for part, kind in zip(upscaling, kinds, strict=True):
        if not isinstance(part, kind) or (kind is not LayerNorm2d and "forward" in vars(part)):
            return False
    return _without_overlap(upscaling[0]) and _without_overlap(upscaling[3])


def _without_overlap(convolution: Any) -> bool:
    plain = (convolution.groups, convolution.padding, convolution.output_padding, convolution.dilation)
    sizes = (convolution.kernel_size, convolution.stride)
    return sizes == ((2, 2), (2, 2)) and plain == (1, (0, 0), (0, 0), (1, 1)) and convolution.bias is not None


def _parts(upscaling: Any) -> list[nn.Module]:
    return [upscaling, *upscaling] if isinstance(upscaling, nn.Sequential) else [upscaling]


def plain(layer: Any) -> bool:
    """Whether a module computes x W^T + b of its own weight, a tensor of numbers, and bias."""
    if type(layer).forward is not nn.Linear.forward or "forward" in layer.__dict__ or layer.bias is None:
        return False
    return not is_traceable_wrapper_subclass(layer.weight)  # as torchao's quantised weights are
