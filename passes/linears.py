"""Which linear layers a pass is to rewrite: by their role in a Sam, or by their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from samopt.errors import InvalidInput
from samopt.passes.quantized_linear import quantized_already
from samopt.result import Skip
from samopt.structure import differs, encoders, join, mask_decoders

ROLES = {"qkv": "attn.qkv", "proj": "attn.proj", "lin1": "mlp.lin1", "lin2": "mlp.lin2"}  # in an encoder's block
DECODER = "decoder"


def linears(model: nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, Any] | Skip]:
    """The linear layers in `model` that are asked for, in its order, each once.

    Args:
        model: a Sam, or a part of one.
        layers: roles, or names of modules, in which `*` stands for anything (as in `fnmatch`). A role is "qkv", "proj",
            "lin1" or "lin2", in the blocks of the image encoder, or "decoder", all linear layers of the mask decoder.

    Yields:
        Name and module; one that is `no_linear` is a Skip.

    Raises:
        InvalidInput: what is neither a role nor the name of a linear layer of this model.
    """
    found = {name: module for name, module in model.named_modules() if _has_its_form(module)}
    wanted: set[str] = set()
    known = ", ".join((*ROLES, DECODER))
    for word in layers:
        if word == DECODER or word in ROLES:
            wanted.update(_of_role(model, word))
        elif named := [name for name in found if fnmatchcase(name, word)]:
            wanted.update(named)
        else:
            raise InvalidInput(
                f"layers: {word!r} is no role ({known}), nor is any linear layer of this model called that"
            )
    for name, module in found.items():
        if name in wanted:
            reason = no_linear(module)
            yield Skip(name, reason) if reason else (name, module)


def no_linear(module: Any) -> str | None:
    """Why a module does not compute what `nn.Linear` does, of weights that are not quantised; None if it does."""
    return quantized_already(module) or differs(module, "forward", nn.Linear.forward)


def refuse_none(pass_: str, layers: Sequence[str]) -> None:
    """Raises InvalidInput where a pass is given no layers at all."""
    if not layers:
        raise InvalidInput(f"{pass_}: layers=() leaves nothing to do")


def _of_role(model: nn.Module, role: str) -> Iterator[str]:
    if role == DECODER:
        for fqn, decoder in mask_decoders(model):
            yield from (join(fqn, name) for name, _ in decoder.named_modules())
    else:
        for fqn, encoder in encoders(model):
            yield from (join(fqn, f"blocks.{index}.{ROLES[role]}") for index in range(len(encoder.blocks)))


def _has_its_form(module: Any) -> bool:
    """Whether a module has the attributes of a linear layer."""
    weight = getattr(module, "weight", None)
    return hasattr(module, "in_features") and hasattr(module, "out_features") and getattr(weight, "ndim", 0) == 2
