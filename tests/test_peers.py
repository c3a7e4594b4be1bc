"""Other implementations of the image encoder: that they compute the same, and that none runs uncompiled."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt.errors import InvalidInput
from samopt.peers import (
    FORK_SWITCH,
    PEERS,
    compiled,
    find_peer,
    fork_encoder,
    transformers_encoder,
    transformers_keys,
    version,
)
from samopt.verify import relative_error
from tests.models import random_sam

CPU = torch.device("cpu")
FORK = "segment_anything_fast"


@pytest.fixture
def small() -> Sam:
    """A Sam whose every size differs from the others', and from any default."""
    return random_sam(
        img_size=128, width=96, heads=3, depth=4, window=5, global_blocks=(0, 3), decoder_width=32, qkv_bias=False
    )


def peer_module(name: str) -> Any:
    """The peer's module, or the test is skipped. What it warns of while it is imported is its own affair."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    return importlib.import_module(PEERS[name].module)


@pytest.mark.parametrize(("name", "build"), [(FORK, fork_encoder), ("transformers", transformers_encoder)])
@torch.no_grad()
def test_a_peer_computes_what_segment_anything_does(small: Sam, name: str, build: Any) -> None:
    peer_module(name)
    pixels = torch.randn(2, 3, 128, 128)
    encoder = build(small.image_encoder)
    assert not encoder.training
    output = encoder(pixels)
    answer = output if isinstance(output, Tensor) else output.last_hidden_state
    assert relative_error([answer], [small.image_encoder(pixels)]) < 1e-6


@pytest.mark.parametrize("name", [FORK, "transformers"])
@torch.no_grad()
def test_a_peer_is_compiled_and_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_module(name)
    monkeypatch.chdir(tmp_path)
    sam = random_sam(img_size=64, depth=1, global_blocks=(0,))
    before = {key: value.clone() for key, value in sam.state_dict().items()}
    pixels = torch.randn(2, 3, 64, 64)
    torch._dynamo.reset()
    with PEERS[name].build(sam, CPU) as encoder:
        if name == FORK:
            assert Path.cwd() != tmp_path
        output = encoder(pixels)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert 1e-4 < relative_error([output], [sam.image_encoder(pixels)]) < 5e-2
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(before[key], value) for key, value in sam.state_dict().items())


def test_keys_of_transformers() -> None:
    names = transformers_keys(random_sam(depth=1).image_encoder.state_dict())
    assert [name for name in names if not name.startswith("layers.0.attn.")] == [
        "pos_embed",
        "patch_embed.projection.weight",
        "patch_embed.projection.bias",
        "layers.0.layer_norm1.weight",
        "layers.0.layer_norm1.bias",
        "layers.0.layer_norm2.weight",
        "layers.0.layer_norm2.bias",
        "layers.0.mlp.lin1.weight",
        "layers.0.mlp.lin1.bias",
        "layers.0.mlp.lin2.weight",
        "layers.0.mlp.lin2.bias",
        "neck.conv1.weight",
        "neck.layer_norm1.weight",
        "neck.layer_norm1.bias",
        "neck.conv2.weight",
        "neck.layer_norm2.weight",
        "neck.layer_norm2.bias",
    ]


class _Breaks(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return pixels + 1


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, pixels: Tensor) -> Tensor:
        self.calls += 1  # compiled anew for every count
        return pixels + self.calls


def test_a_graph_break_is_an_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(_Breaks(), CPU, backend="eager")(torch.zeros(2))


def test_the_limit_on_recompilations_is_an_error() -> None:
    torch._dynamo.reset()
    run = compiled(_Counts(), CPU, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            assert run(torch.zeros(2)).dtype == torch.bfloat16
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run(torch.zeros(2))


def test_a_peer_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FORK).mkdir()
    (tmp_path / FORK / "__init__.py").write_text("import a_package_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == FORK]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidInput, match=rf"peer {FORK} cannot be imported .*a_package_it_needs"):
        find_peer(FORK)


def test_the_forks_own_switch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORK_SWITCH, raising=False)
    assert PEERS[FORK].label == FORK
    monkeypatch.setitem(os.environ, FORK_SWITCH, "0")
    assert PEERS[FORK].label == f"{FORK} without its kernel"
    assert PEERS["transformers"].label == "transformers"


def test_versions() -> None:
    assert version("torch") == metadata.version("torch")
    assert version("PIL") == metadata.version("pillow")
    assert version("not_installed_anywhere") == "unknown"
