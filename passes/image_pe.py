"""The positions of the image's tokens computed once, not for every prompt.

SAM's prompt encoder computes them whenever a mask is decoded, from a random matrix that is part of the weights: a dozen
small kernels, which a GPU waits for more than it works on them. This pass keeps the result as a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.rebind import clone, rebind
from samopt.result import Site, Skip
from samopt.structure import differs, prompt_encoders

BUFFER = "_samopt_image_pe"  # [1, C, h, w]


@dataclass(frozen=True)
class HoistImagePE(Pass):
    """Computes the image tokens' positional encoding once, into a buffer on the model's device.

    The buffer is not saved; `load_state_dict` rebuilds it. A matrix written into by other means needs the pass to be
    undone and applied again.
    """

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the prompt encoders; one whose positions are not SAM's is a Skip."""
        for fqn, encoder in prompt_encoders(model):
            reason = _unfit(encoder)
            yield Skip(fqn, reason) if reason else Site(fqn)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        new.register_buffer(BUFFER, computed(new), persistent=False)
        new.register_load_state_dict_post_hook(rebuild)
        rebind(new, "get_dense_pe", image_pe)
        return new


def _unfit(encoder: Any) -> str | None:
    from segment_anything.modeling import PromptEncoder
    from segment_anything.modeling.prompt_encoder import PositionEmbeddingRandom

    if reason := differs(encoder, "get_dense_pe", PromptEncoder.get_dense_pe):
        return reason
    if reason := differs(encoder.pe_layer, "forward", PositionEmbeddingRandom.forward):
        return f"pe_layer: {reason}"
    return None


@torch.no_grad()
def computed(encoder: Any) -> Tensor:
    """The positions as SAM computes them, [1, C, h, w]."""
    positions: Tensor = encoder.pe_layer(encoder.image_embedding_size).unsqueeze(0)
    return positions


def image_pe(self: Any) -> Tensor:
    """`PromptEncoder.get_dense_pe`: [1, C, h, w], which is not to be written to."""
    kept: Tensor = getattr(self, BUFFER)
    return kept


def rebuild(module: nn.Module, incompatible_keys: Any) -> None:
    """Computes the positions from a newly loaded matrix."""
    setattr(module, BUFFER, computed(module))
