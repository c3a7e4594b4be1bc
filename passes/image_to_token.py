"""The image tokens' step in the mask decoder's layers as one Triton kernel.

In each layer, at last, the image tokens attend to the prompt's few tokens, what comes of it is added to them, and the
sum is normed. These are thousands of tokens for every prompt, read and written by six operations, of which fused
attention is made for many more keys. Here they are read and written once (`samopt.passes.kernels.image_to_token`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes.kernels.devices import HALVES, cannot_run, not_half
from samopt.passes.kernels.image_to_token import image_to_token, problem, unfit
from samopt.passes.kernels.tuning import choose
from samopt.passes.mask_decoder import plain
from samopt.passes.parts import has_hooks
from samopt.rebind import clone, mark, marked, rebind
from samopt.result import Site, Skip
from samopt.structure import differs, join, mask_decoders

TOKENS, IMAGE_TOKENS = 7, 4096  # of a point or a box, and of an image of 1024 px: what a configuration is chosen for


@dataclass(frozen=True)
class ImageToToken(Pass):
    """Rewrites the layers of the mask decoder's transformer: their last step, in which image tokens attend to the
    prompt's and are normed, by a Triton kernel.

    It needs a GPU of compute capability 8.0 or above, and weights in half precision: apply it after `CastDtype`. The
    kernel's configuration for this GPU is looked up, or sought by `match`, in a dry run too, and at the first call of
    other shapes: that takes seconds, once per machine. With more than 64 tokens a prompt the step is PyTorch's. So it
    is, with all its modules, where one of them was replaced or quantised later, or has a hook.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where Triton cannot run: no such GPU, or no Triton."""
        if reason := cannot_run(next(model.parameters()).device):
            raise Unsupported(reason, "leave image_to_token out")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the layers of the decoder's transformer; those that the kernel does not fit are Skips."""
        for fqn, decoder in mask_decoders(model):
            for index, layer in enumerate(getattr(decoder.transformer, "layers", ())):
                name = join(fqn, f"transformer.layers.{index}")
                reason = _unfit(layer)
                yield Skip(name, reason) if reason else Site(name)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        mark(new.cross_attn_image_to_token, new.norm4)
        rebind(new, "forward", forward)
        return new


def _unfit(layer: Any) -> str | None:
    from segment_anything.modeling.transformer import Attention, TwoWayAttentionBlock

    if reason := differs(layer, "forward", TwoWayAttentionBlock.forward):
        return reason
    attention, norm = layer.cross_attn_image_to_token, layer.norm4
    if reason := differs(attention, "forward", Attention.forward):
        return f"cross_attn_image_to_token: {reason}"
    for name in ("q_proj", "out_proj"):
        if not plain(getattr(attention, name)):
            return f"cross_attn_image_to_token.{name} is no plain linear layer with a bias"
    weight = attention.q_proj.weight
    channels = weight.shape[1]
    if reason := differs(norm, "forward", nn.LayerNorm.forward):
        return f"norm4: {reason}"
    if norm.normalized_shape != (channels,) or norm.weight is None or norm.bias is None:
        return "norm4 is not over the channels, with weight and bias"
    if reason := not_half(weight.dtype):
        return reason
    if reason := unfit(channels, attention.num_heads):
        return reason
    if weight.is_cuda:
        try:
            choose(problem(1, IMAGE_TOKENS, channels, attention.num_heads, TOKENS, weight.dtype, weight.device))
        except Unsupported as failure:
            return failure.reason
    return None


def forward(self: Any, queries: Tensor, keys: Tensor, query_pe: Tensor, key_pe: Tensor) -> tuple[Tensor, Tensor]:
    """A layer of SAM's two-way transformer.

    The image side may be one for all prompts, as in SAM's own code.

    Args:
        self: the layer.
        queries: tokens of the prompts, [N, T, C].
        keys: image tokens, [N, M, C] or [1, M, C].
        query_pe: what is added to the tokens where they attend, [N, T, C].
        key_pe: the positions of the image tokens, [N, M, C] or [1, M, C].

    Returns:
        Tokens [N, T, C] and image tokens [N, M, C].
    """
    if self.skip_first_layer_pe:
        queries = self.self_attn(q=queries, k=queries, v=queries)
    else:
        q = queries + query_pe
        queries = queries + self.self_attn(q=q, k=q, v=queries)
    queries = self.norm1(queries)
    attended = self.cross_attn_token_to_image(q=queries + query_pe, k=keys + key_pe, v=keys)
    queries = self.norm2(queries + attended)
    queries = self.norm3(queries + self.mlp(queries))
    return queries, image_tokens(self, queries, queries + query_pe, keys, key_pe)


def image_tokens(self: Any, queries: Tensor, with_pe: Tensor, keys: Tensor, key_pe: Tensor) -> Tensor:
    """What the layer makes of the image tokens, [N, M, C], which attend to `queries` by their keys `with_pe`."""
    attention, norm = self.cross_attn_image_to_token, self.norm4
    if keys.dtype in HALVES and _as_checked(self):
        q_proj, out_proj = attention.q_proj, attention.out_proj
        k, v = attention.k_proj(with_pe), attention.v_proj(queries)
        if all(tensor.dtype is keys.dtype for tensor in (key_pe, k, v, q_proj.weight)):  # not under autocast
            return image_to_token(
                keys.contiguous(), key_pe.contiguous(), k, v, q_proj.weight, q_proj.bias, out_proj.weight,
                out_proj.bias, norm.weight, norm.bias, attention.num_heads, norm.eps,
            )  # fmt: skip
    out: Tensor = norm(keys + attention(q=keys + key_pe, k=with_pe, v=queries))
    return out


def _as_checked(layer: Any) -> bool:
    """Whether the modules whose weights are read still are what was checked, and nothing wants to see them called."""
    attention, norm = layer.cross_attn_image_to_token, layer.norm4
    if not marked(attention, norm) or has_hooks(*attention.modules(), norm):
        return False
    return plain(attention.q_proj) and plain(attention.out_proj)
