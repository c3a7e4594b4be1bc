"""Triton kernels that one process compiled are found by another: compiled here for a GPU, as that needs none."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

import samopt
from samopt import kernel_cache, optimize, save
from samopt.kernel_cache import compiled, restore
from samopt.passes import LinearPatchEmbed
from samopt.report import report
from samopt.saved_folder import read_manifest
from tests.models import random_sam
from tests.test_compile_cache import in_a_process

if not has_triton_package():
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Triton's language before any test ran: its interpreter puts functions of its own there, and leaves them where an
# interpreted kernel raises.
LANGUAGE = {
    owner: dict(vars(owner))
    for owner in (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)
}

GPU = torch.device("cuda", 99)  # nothing else ran there
HOPPER = GPUTarget("cuda", 90, 32)


def negate(x, N: tl.constexpr):  # type: ignore[no-untyped-def] # Triton says what its arguments are
    at = tl.arange(0, N)
    tl.store(x + at, -tl.load(x + at))


class Driver:
    """As of a GPU that is not here: enough to compile for it."""

    device = GPU.index

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return HOPPER


def compile_kernel(size: int, function: Any = None) -> Any:
    """What a launch does before it launches, in a process that has not launched the kernel yet, or of its function."""
    function = function or JITFunction(negate)  # also where tests let `triton.jit` interpret
    return function.warmup(torch.float32, N=size, grid=(1,))


def there(folder: Path) -> list[Path]:
    """The files in a cache."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's language as it was."""
    for owner, members in LANGUAGE.items():
        for name in vars(owner).keys() - members.keys():
            monkeypatch.delattr(owner, name)
        for name, member in members.items():
            if vars(owner).get(name) is not member:
                monkeypatch.setattr(owner, name, member)


@pytest.fixture
def cache(language: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Triton's cache, of which PyTorch then makes another."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    with triton.knobs.cache.scope():
        triton.knobs.cache.home_dir = str(tmp_path)
        yield tmp_path / ".triton" / "cache"


@pytest.fixture
def launched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """A kernel of samopt's, in two sizes that ran on `GPU`; it ran on another GPU, too."""
    module: Any = types.ModuleType("samopt.negating")
    module.function, module.other = JITFunction(negate), 3
    imported: Any = types.ModuleType("samopt.negating_launch")
    imported.function = module.function
    monkeypatch.setitem(sys.modules, "samopt.negating", module)
    monkeypatch.setitem(sys.modules, "samopt.negating_launch", imported)
    monkeypatch.setitem(sys.modules, "samopt.negating_never", None)  # as where an import is refused
    with monkeypatch.context() as other:
        other.setattr(Driver, "device", 98)
        compile_kernel(256, module.function)
    return {size: compile_kernel(size, module.function) for size in (64, 128)}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling fails, where a kernel is not in the cache."""
    backend: Any = type(triton.compiler.make_backend(HOPPER))

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled anew")

    monkeypatch.setattr(backend, "add_stages", refuse)


def test_what_was_compiled_for_the_gpu(launched: dict[int, Any]) -> None:
    found = compiled(GPU)
    wanted = {f"{kernel.hash}/negate.{kind}" for kernel in launched.values() for kind in ("cubin", "json")}
    assert found.keys() == wanted
    for kernel in launched.values():
        assert found[f"{kernel.hash}/negate.cubin"].numpy().tobytes() == kernel.asm["cubin"]
    assert len(compiled(torch.device("cuda", 98))) == 2
    assert compiled(torch.device("cuda", 97)) == {}
    assert compiled(torch.device("cpu")) == {}
    assert sys.modules["samopt.negating"].function.device_caches.keys() == {98, 99}, "looking adds none"


LAUNCHER = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(7); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.mark.parametrize("with_descriptors", [False, True])
def test_modules_that_launch_kernels_are_not_built_anew(
    cache: Path, launched: dict[int, Any], monkeypatch: pytest.MonkeyPatch, with_descriptors: bool
) -> None:
    build: Any = importlib.import_module("triton.runtime.build")
    launch = build.compile_module_from_src(LAUNCHER, "launcher").launch

    def inner(*args: Any) -> Any:
        return launch(*args)

    launched[64]._run = types.SimpleNamespace(launch=inner if with_descriptors else launch)
    files = compiled(GPU)
    (name,) = (name for name in files if name.endswith(".so"))
    assert len(files) == 5
    shutil.rmtree(cache)
    assert restore(files, GPU) is None
    monkeypatch.setattr(build, "_build", None)
    assert build.compile_module_from_src(LAUNCHER, "launcher").launch() == 7
    assert [path.name for path in there(cache) if path.suffix == ".so"] == [name.partition("/")[2]]


def test_a_module_from_elsewhere_is_left_out(launched: dict[int, Any]) -> None:
    launched[64]._run = types.SimpleNamespace(launch=math.sqrt)
    assert len(compiled(GPU)) == 4


def test_kernels_that_cannot_be_collected_are_left_out(launched: dict[int, Any]) -> None:
    Path(launched[64].metadata_group["negate.cubin"]).unlink()
    kernels = sys.modules["samopt.negating"].function.device_caches[GPU.index][0]
    kernels["waiting"] = object()  # as while Triton compiles in threads
    assert {name.partition("/")[0] for name in compiled(GPU)} == {launched[128].hash}
    cubin = Path(launched[128].metadata_group["negate.cubin"])
    content = cubin.read_bytes()
    cubin.write_bytes(b"")
    assert compiled(GPU) == {}
    cubin.write_bytes(content)
    launched[128].metadata_group["../negate.json"] = launched[128].metadata_group.pop("negate.json")
    assert compiled(GPU) == {}


@pytest.mark.parametrize("generated", [False, True])
def test_restored_kernels_are_not_compiled_anew(
    cache: Path, launched: dict[int, Any], monkeypatch: pytest.MonkeyPatch, request: Any, generated: bool
) -> None:
    files, wanted = compiled(GPU), launched[128].asm["cubin"]
    shutil.rmtree(cache)
    request.getfixturevalue("no_compiler")
    with pytest.raises(AssertionError, match="compiled anew"):
        compile_kernel(128)
    assert restore(files, GPU) is None
    folder = cache
    if generated:  # PyTorch sets this at the first kernel that it generates
        folder = cache.parents[1] / "inductor" / "triton" / "99"
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    found = compile_kernel(128)
    assert found.asm["cubin"] == wanted
    assert all(Path(path).is_relative_to(folder) for path in found.metadata_group.values())
    assert triton.knobs.cache.dir == str(folder), "what was set to restore is as it was"


@pytest.mark.usefixtures("launched")
def test_what_is_there_stays(cache: Path) -> None:
    files = compiled(GPU)
    before = {path: path.stat().st_mtime_ns for path in there(cache)}
    assert restore(files, GPU) is None
    assert {path: path.stat().st_mtime_ns for path in there(cache)} == before
    (half,) = cache.rglob(f"{triton.runtime.cache._base32(next(iter(files)).partition('/')[0])}/*.cubin")
    half.unlink()  # as where a cache is tidied up
    assert restore(files, GPU) is None
    assert half.exists()


@pytest.mark.parametrize(
    "name",
    [
        "{key}/../../outside.json",
        "{key}/..",
        "{key}//outside.json",
        "../{key}/negate.json",
        "{key}/.hidden",
        "{key}",
        "ABC/negate.json",
        "{key}/neg\u00e4te.json",
        "{key}/negate.json\n",
    ],
)
def test_nothing_is_written_for_names_that_are_none(cache: Path, launched: dict[int, Any], name: str) -> None:
    files = compiled(GPU)
    shutil.rmtree(cache)
    name = name.format(key=launched[64].hash)
    assert restore({**files, name: torch.zeros(3, dtype=torch.uint8)}, GPU) == f"{name!r} is no file of a kernel"
    assert there(cache.parents[1]) == []


@pytest.mark.usefixtures("launched")
def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    files = compiled(GPU)
    shutil.rmtree(cache)
    cache.touch()
    assert (restore(files, GPU) or "").startswith("Triton's cache cannot be used: NotADirectoryError: ")


def test_kernels_travel_with_a_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"key/a.cubin": torch.arange(3, dtype=torch.uint8)}
    monkeypatch.setattr(sys.modules["samopt.save"], "compiled", lambda device: files)
    restored: list[tuple[dict[str, Tensor], torch.device]] = []
    reasons = [None, "Triton's cache is full"]

    def take(found: dict[str, Tensor], device: torch.device) -> str | None:
        restored.append((found, device))
        return reasons.pop(0)

    monkeypatch.setattr(sys.modules["samopt.load"], "restore", take)
    folder = tmp_path / "model"
    save(optimize(random_sam(), [LinearPatchEmbed()], verify="off"), folder)
    (note,) = report(samopt.load(folder)).notes
    assert note == "compiled code in the folder not used: load(..., compile_cache=True), if you trust whoever made it"
    assert restored == []
    (note,) = report(samopt.load(folder, compile_cache=True)).notes
    assert note == "compiled code in the folder used"
    ((found, device),) = restored
    assert found.keys() == files.keys()
    assert torch.equal(found["key/a.cubin"], files["key/a.cubin"])
    assert device == torch.device("cpu")
    (note,) = report(samopt.load(folder, compile_cache=True)).notes
    assert note == "compiled code in the folder ignored: Triton's cache is full"
    path = folder / read_manifest(folder)["files"]["triton_kernels.safetensors"]["name"]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(samopt.SavedModelError, match="its checksum is another"):
        samopt.load(folder, compile_cache=True)
    assert len(restored) == 2


@pytest.mark.usefixtures("cache")
def test_samopts_own_kernels_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from samopt.passes.kernels import mask_upscaling

    assert list(kernel_cache._launched(GPU.index)) == [], "those that tests interpret are none"
    monkeypatch.setattr(mask_upscaling, "upscale", JITFunction(negate))
    kernel = compile_kernel(64, mask_upscaling.upscale)
    assert list(kernel_cache._launched(GPU.index)) == [kernel]


SAVED = """
import sys
from samopt import optimize, save
from samopt.passes import CastDtype, HoistRelPos, SDPAttention, TritonAttention
from samopt.tiny import load_tiny
passes = [HoistRelPos(), SDPAttention(), CastDtype(), TritonAttention()]
save(optimize(load_tiny(256, "cuda"), passes, verify="off"), sys.argv[1])
"""
STARTED = """
import sys
import triton
import samopt
found = {True: [], False: []}
def listen(*, src, cache_hit, **_):
    if src.fn.module.startswith("samopt."):
        found[cache_hit].append(src.name)
triton.knobs.compilation.listener = listen
samopt.load(sys.argv[1], compile_cache=True, verify=True)
print(sorted({*found[True]}), found[False])
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_fresh_process_compiles_no_kernel_anew(tmp_path: Path) -> None:
    in_a_process(SAVED, tmp_path / "model", caches=tmp_path / "first")
    found = in_a_process(STARTED, tmp_path / "model", caches=tmp_path / "second")
    kernels = [
        f"['global_attention', {windows}] []\n"
        for windows in ("'hopper_window_attention', 'position_terms'", "'position_terms', 'window_attention'")
    ]
    assert found in kernels
