"""Compiled code goes with a saved model, and is used where it fits and its user trusts it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from segment_anything.modeling import Sam

import samopt
from samopt import SavedModelError, optimize, save
from samopt.compile_cache import artifacts, differences, machine
from samopt.passes import Compile
from samopt.report import report
from samopt.saved_folder import read_manifest
from tests.models import random_sam

CACHE = "compile_cache.bin"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compiled model, with a stand-in for what PyTorch compiled."""
    monkeypatch.setattr(sys.modules["samopt.save"], "artifacts", lambda model: b"compiled code")
    save(optimize(random_sam(), [Compile()], verify="off").cpu().eval(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is given to PyTorch to load."""
    given: list[bytes] = []

    def load(content: bytes) -> object:
        given.append(content)
        return object() if content == b"compiled code" else None

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return given


@pytest.mark.usefixtures("dynamo_only")
def test_used_only_where_that_is_asked_for(compiled: Path, used: list[bytes]) -> None:
    (note,) = report(samopt.load(compiled)).notes
    assert note == "compiled code in the folder not used: load(..., compile_cache=True), if you trust whoever made it"
    assert used == []
    (note,) = report(samopt.load(compiled, compile_cache=True)).notes
    assert note == "compiled code in the folder used"
    assert used == [b"compiled code"]


@pytest.mark.usefixtures("dynamo_only")
def test_ignored_where_it_does_not_fit(compiled: Path, used: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(torch.device("cpu")) | {"capability": "MMX"}
    monkeypatch.setattr(sys.modules["samopt.load"], "machine", lambda device: here)
    first, second = report(samopt.load(compiled, compile_cache=True)).notes
    assert first.startswith("saved elsewhere, and its figures are of there: capability ")
    assert second.startswith("compiled code in the folder ignored: capability ")
    assert second.endswith(" there and MMX here")
    assert used == []


@pytest.mark.usefixtures("dynamo_only")
def test_changed_code_is_not_used(compiled: Path, used: list[bytes]) -> None:
    path = compiled / read_manifest(compiled)["files"][CACHE]["name"]
    path.write_bytes(b"Compiled code")
    samopt.load(compiled)
    with pytest.raises(SavedModelError, match="its checksum is another"):
        samopt.load(compiled, compile_cache=True)
    assert used == []


@pytest.mark.usefixtures("dynamo_only")
def test_code_that_pytorch_cannot_read(tmp_path: Path, used: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["samopt.save"], "artifacts", lambda model: b"something else")
    save(optimize(random_sam(), [Compile()], verify="off"), tmp_path / "model")
    (note,) = report(samopt.load(tmp_path / "model", compile_cache=True)).notes
    assert note == "compiled code in the folder ignored: PyTorch could not read it"
    assert used == [b"something else"]


def test_a_model_that_is_not_compiled_has_none(sam: Sam) -> None:
    assert artifacts(sam) is None


def test_memory_formats_pickle_alike_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pickle.dumps(torch.channels_last)
    first = types.ModuleType("a_service")
    first.torch = torch  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "modules", {"a_service": first, **sys.modules})
    assert pickle.dumps(torch.channels_last) == plain
    assert pickle.loads(plain) is torch.channels_last


def test_differences_in_words() -> None:
    assert differences({"torch": "1"}, {"torch": "1"}) == ""
    there, here = {"torch": "1", "gpu": "H200"}, {"torch": "2", "processor": "x86"}
    words = "torch 1 there and 2 here, gpu H200 there and none here, processor none there and x86 here"
    assert differences(there, here) == words


ROOT = Path(__file__).parents[1]
SAVED = """
import sys
from safetensors.torch import save_file
from samopt import optimize, save
from samopt.answers import record
from samopt.passes import Compile
from tests.models import random_sam
model = optimize(random_sam(depth=1, global_blocks=()), [Compile()], verify="off")
save(model, sys.argv[1])
save_file(record(model), sys.argv[2])
"""
STARTED = """
import sys
import torch
torch.set_num_threads(1)
import samopt
from samopt.answers import record
from safetensors.torch import save_file
from torch._dynamo.utils import counters
model = samopt.load(sys.argv[1], compile_cache=True)
save_file(record(model), sys.argv[2])
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
print(samopt.report(model).notes)
"""


@pytest.mark.slow
def test_a_fresh_process_compiles_nothing_anew(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted, answers = tmp_path / "wanted.safetensors", tmp_path / "answers.safetensors"
    in_a_process(SAVED, tmp_path / "model", wanted, caches=tmp_path / "first")
    assert read_manifest(tmp_path / "model")["files"][CACHE]["bytes"] > 10_000
    counts, notes = in_a_process(STARTED, tmp_path / "model", answers, caches=tmp_path / "second").splitlines()
    assert counts == "3 0", "patch embedding, block and neck were found, and nothing was compiled"
    assert notes == "('compiled code in the folder used',)"
    expected = load_file(wanted)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(answers).items())


def in_a_process(code: str, *arguments: Path, caches: Path) -> str:
    """What a new Python process prints, whose caches are its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_HOME": str(caches)}
    environment.pop("TRITON_CACHE_DIR", None)  # which PyTorch sets
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout
