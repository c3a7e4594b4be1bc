"""Other implementations of SAM's image encoder, to be timed beside a recipe on the same weights and pixels.

None of them is a dependency: a peer is imported when it is asked for. Each is built as its own documentation says for
the fastest setting that keeps all weights, bfloat16 and compiled. PyTorch may compile less than it was asked to, with
a warning only, at a graph break or at the limit on recompilations: here both are errors, as the row would not show
what it says.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samopt.errors import InvalidInput, first_line
from samopt.timing import Encoder

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

# Makes an encoder on a device from a Sam on the CPU, which it leaves as it is. Open while the encoder is in use.
Build = Callable[["Sam", torch.device], AbstractContextManager[Encoder]]

FORK_SWITCH = "SEGMENT_ANYTHING_FAST_USE_FLASH_4"  # the fork's own: "0" runs it without its Triton kernel
TRANSFORMERS_ARGUMENTS = {  # of Meta's image encoder, and of transformers' SamVisionConfig; the others are the same
    "img_size": "image_size",
    "in_chans": "num_channels",
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "out_chans": "output_channels",
}
TRANSFORMERS_NAMES = (  # in Meta's keys, and in those of transformers
    ("patch_embed.proj.", "patch_embed.projection."),
    ("blocks.", "layers."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    ("neck.0.", "neck.conv1."),
    ("neck.1.", "neck.layer_norm1."),
    ("neck.2.", "neck.conv2."),
    ("neck.3.", "neck.layer_norm2."),
)


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with.

    Attributes:
        name: what `--peer` and Python's import call it.
        module: which of its modules holds the encoder.
        build: makes its encoder.
    """

    name: str
    module: str
    build: Build

    @property
    def label(self) -> str:
        """What its rows are called: its name, and whether the fork's own switch keeps it from its kernel."""
        off = self.name == "segment_anything_fast" and os.environ.get(FORK_SWITCH, "1") == "0"
        return f"{self.name} without its kernel" if off else self.name


def version(package: str) -> str:
    """The version of an installed package, by its import name; "unknown" where it is only found on the path."""
    names = [package, *metadata.packages_distributions().get(package, [])]
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


def find_peer(name: str) -> Peer:
    """The peer of a name, imported.

    Raises:
        InvalidInput: an unknown name, or a package that cannot be imported: what is missing is named.
    """
    if name not in PEERS:
        raise InvalidInput(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    try:
        importlib.import_module(PEERS[name].module)
    except Exception as error:  # a package may raise anything while it is imported
        raise InvalidInput(
            f"peer {name} cannot be imported ({first_line(error)}); install what is missing, or leave out --peer {name}"
        ) from error
    return PEERS[name]


def fork_encoder(encoder: Any) -> nn.Module:
    """The fork's image encoder with the weights of `encoder`, float32 and not compiled yet."""
    from segment_anything_fast.modeling import ImageEncoderViT

    norm = functools.partial(nn.LayerNorm, eps=encoder.blocks[0].norm1.eps)
    return _load(ImageEncoderViT(norm_layer=norm, **_arguments(encoder)), encoder.state_dict())


def transformers_encoder(encoder: Any) -> nn.Module:
    """The image encoder of transformers' SamModel with the weights of `encoder`, float32 and not compiled yet."""
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    arguments = {TRANSFORMERS_ARGUMENTS.get(name, name): value for name, value in _arguments(encoder).items()}
    config = SamVisionConfig(**arguments, layer_norm_eps=encoder.blocks[0].norm1.eps, attn_implementation="sdpa")
    return _load(SamVisionEncoder(config), transformers_keys(encoder.state_dict()))


def transformers_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of Meta's image encoder under the names of transformers."""
    renamed = {}
    for key, value in state.items():
        for name, other in TRANSFORMERS_NAMES:
            key = key.replace(name, other)
        renamed[key] = value
    return renamed


def _arguments(encoder: Any) -> dict[str, Any]:
    """What an image encoder of Meta's was built with, under the names of its class's arguments."""
    block, projection = encoder.blocks[0], encoder.patch_embed.proj
    windows = [block.window_size for block in encoder.blocks]
    return {
        "img_size": encoder.img_size,
        "patch_size": projection.kernel_size[0],
        "in_chans": projection.in_channels,
        "embed_dim": projection.out_channels,
        "depth": len(windows),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.lin1.out_features / projection.out_channels,
        "out_chans": encoder.neck[0].out_channels,
        "qkv_bias": block.attn.qkv.bias is not None,
        "use_abs_pos": encoder.pos_embed is not None,
        "use_rel_pos": block.attn.use_rel_pos,
        "window_size": max(windows),
        "global_attn_indexes": [index for index, window in enumerate(windows) if window == 0],
    }


def _load(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    module.load_state_dict(state)
    return module.eval().requires_grad_(False)


def compiled(module: nn.Module, device: torch.device, **options: Any) -> Callable[[Tensor], Any]:
    """The module on `device` in bfloat16 and compiled, called with float32 pixels.

    With `fullgraph` the first call raises at a graph break, and any call at the limit on recompilations.
    """
    run = torch.compile(module.to(device, torch.bfloat16), fullgraph=True, dynamic=False, **options)
    return lambda pixels: run(pixels.to(torch.bfloat16))


@contextlib.contextmanager
def _fork(sam: Sam, device: torch.device) -> Iterator[Encoder]:
    # Its kernel times its variants at the first call, prints them, and keeps them in a file in the working directory.
    with (
        tempfile.TemporaryDirectory(prefix="samopt-") as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield compiled(fork_encoder(sam.image_encoder), device, mode="max-autotune")


@contextlib.contextmanager
def _transformers(sam: Sam, device: torch.device) -> Iterator[Encoder]:
    run = compiled(transformers_encoder(sam.image_encoder), device)
    yield lambda pixels: run(pixels).last_hidden_state


PEERS = {
    peer.name: peer
    for peer in (
        Peer("segment_anything_fast", "segment_anything_fast.modeling", _fork),
        Peer("transformers", "transformers.models.sam.modeling_sam", _transformers),
    )
}
