"""What samopt recognises as parts of a Segment Anything model: by attributes and code, never by class identity.

Relatives of SAM carry the same code under other class names; others carry the same attribute names over other
arithmetic. So a module fits when it has the attributes *and* its method compiles to the same instructions as
segment_anything's, down to the helper functions it calls.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from samopt.errors import InvalidInput
from samopt.rebind import of_a_pass
from samopt.result import Skip

PARTS = ("image_encoder", "prompt_encoder", "mask_decoder")


def check_sam(model: Any) -> None:
    """Raises InvalidInput unless `model` has the three parts of a Sam."""
    missing = [part for part in PARTS if not isinstance(getattr(model, part, None), nn.Module)]
    if not isinstance(model, nn.Module) or missing:
        inside = next((name for name in ("model", "module") if hasattr(getattr(model, name, None), PARTS[0])), None)
        remedy = f"pass its .{inside}" if inside else "pass a model from segment_anything's sam_model_registry"
        raise InvalidInput(f"{type(model).__name__} is no Sam: it has no {', no '.join(missing or PARTS)}; {remedy}")


def describe(model: nn.Module) -> str:
    """A Sam in words: its class, and the size of its image encoder."""
    encoder: Any = model.image_encoder
    words = type(model).__name__
    if isinstance(getattr(encoder, "blocks", None), nn.ModuleList) and len(encoder.blocks):
        words += f" of {len(encoder.blocks)} blocks"
        weight = getattr(getattr(encoder.patch_embed, "proj", None), "weight", None)
        words += f" x {len(weight)}" if weight is not None else ""
    return f"{words}, {encoder.img_size} px" if hasattr(encoder, "img_size") else words


def join(*names: str) -> str:
    """A dotted module name of its parts; the root's, "", adds nothing."""
    return ".".join(name for name in names if name)


def encoders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The image encoders in `model`, with their names."""
    for fqn, module in model.named_modules():
        if is_encoder(module):
            yield fqn, module


def is_encoder(module: nn.Module) -> bool:
    """Whether a module is an image encoder: has a patch embedding and blocks, and a neck."""
    return all(isinstance(getattr(module, part, None), nn.Module) for part in ("patch_embed", "blocks", "neck"))


def encoder_attentions(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]] | Skip]:
    """The attention modules of the image encoder: name, module, and token grid (H, W) it runs on.

    A look-alike is a Skip. The grid is the window where the block around it has one, the encoder's own token grid
    where it has none, and what the relative-position tables were made for where neither is there to ask.
    """
    from segment_anything.modeling.image_encoder import Attention

    grids = _grids(model)
    for fqn, module in model.named_modules():
        if not all(hasattr(module, name) for name in ("qkv", "proj", "num_heads", "scale")):
            continue
        if reason := differs(module, "forward", Attention.forward):
            yield Skip(fqn, reason)
        elif fqn in grids:
            yield fqn, module, grids[fqn]
        elif module.use_rel_pos:
            height, width = ((len(table) + 1) // 2 for table in (module.rel_pos_h, module.rel_pos_w))
            yield fqn, module, (height, width)
        else:
            yield fqn, module, (0, 0)


def _grids(model: nn.Module) -> dict[str, tuple[int, int]]:
    grids = {}
    for fqn, encoder in encoders(model):
        if (grid := token_grid(encoder)) is None:
            continue
        for index, block in enumerate(encoder.blocks):
            window = getattr(block, "window_size", 0)
            grids[join(fqn, f"blocks.{index}.attn")] = (window, window) if window else grid
    return grids


def token_grid(encoder: Any) -> tuple[int, int] | None:
    """Rows and columns of tokens that an image encoder was made for; None where it does not say."""
    if getattr(encoder, "pos_embed", None) is not None:
        rows, columns = encoder.pos_embed.shape[1:3]
        return rows, columns
    stride = getattr(getattr(encoder.patch_embed, "proj", None), "stride", (16, 16))
    size = getattr(encoder, "img_size", None)
    return None if size is None else (size // stride[0], size // stride[1])


def decoder_attentions(model: nn.Module) -> Iterator[tuple[str, Any] | Skip]:
    """The attention modules of the two-way transformer, with their names; a look-alike is a Skip."""
    from segment_anything.modeling.transformer import Attention

    for fqn, module in model.named_modules():
        if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj", "internal_dim")):
            reason = differs(module, "forward", Attention.forward)
            yield Skip(fqn, reason) if reason else (fqn, module)


def mask_decoders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The mask decoders in `model`, with their names: what predicts masks with a transformer."""
    for fqn, module in model.named_modules():
        if callable(getattr(module, "predict_masks", None)) and hasattr(module, "transformer"):
            yield fqn, module


def prompt_encoders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The prompt encoders in a model, by the attributes that a mask decoder's callers use."""
    for fqn, module in model.named_modules():
        if callable(getattr(module, "get_dense_pe", None)) and hasattr(module, "image_embedding_size"):
            yield fqn, module


def layer_norms_2d(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in `model` that normalise the channels of [B, C, H, W] as segment_anything's LayerNorm2d does."""
    from segment_anything.modeling.common import LayerNorm2d

    for module in model.modules():
        if hasattr(module, "eps") and not differs(module, "forward", LayerNorm2d.forward):
            yield module


def differs(module: nn.Module, method: str, known: Callable[..., Any]) -> str | None:
    """Why `module.method` is not the code of `known`, or None if it is.

    A method that one of samopt's own passes bound to the module stands for the code of its class, which it was checked
    against; what anybody else put there may compute anything.
    """
    if known.__qualname__.rpartition(".")[2] != method or not known.__module__.startswith(
        ("segment_anything", "torch")
    ):
        return f"segment_anything's own {method} was replaced in this process, by {known.__qualname__}"
    bound = vars(module).get(method)
    if bound and not of_a_pass(bound):
        return f"its {method} was replaced on this module"
    function = getattr(type(module), method, None)
    if not isinstance(function, types.FunctionType) or not same_code(function, known):
        return f"its {method} is not the code of segment_anything's {known.__qualname__}"
    return None


@functools.cache
def same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two functions compile to the same instructions, the Python functions they call included."""
    if one is other:
        return True
    if not _same_instructions(one.__code__, other.__code__) or one.__closure__ or other.__closure__:
        return False
    if repr((one.__defaults__, one.__kwdefaults__)) != repr((other.__defaults__, other.__kwdefaults__)):
        return False
    for name in _names(one.__code__):
        ours, theirs = one.__globals__.get(name), other.__globals__.get(name)
        if ours is one and theirs is other:  # a recursive function
            continue
        if isinstance(ours, types.FunctionType) and isinstance(theirs, types.FunctionType):
            if not same_code(ours, theirs):
                return False
        elif ours is not theirs:
            return False
    return True


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function uses, in the functions and comprehensions inside it too."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _same_instructions(one: types.CodeType, other: types.CodeType) -> bool:
    ours, theirs = list(dis.get_instructions(one)), list(dis.get_instructions(other))
    return len(ours) == len(theirs) and all(
        a.opcode == b.opcode
        and (
            _same_instructions(a.argval, b.argval)
            if isinstance(a.argval, types.CodeType) and isinstance(b.argval, types.CodeType)
            else a.argval == b.argval
        )
        for a, b in zip(ours, theirs, strict=True)
    )
