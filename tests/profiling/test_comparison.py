"""Before and after a recipe: two profiles, what became of its entries, and what torch.compile did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from segment_anything.modeling import Sam
from torch import Tensor

from samopt import Recipe, Sample, Step
from samopt.passes import Compile, HoistRelPos, TritonAttention, WhereIndexing
from samopt.profiling import compare
from samopt.profiling.comparison import named_loops
from samopt.profiling.kernels import kernels_of
from samopt.report import ATTRIBUTE

RECIPE = Recipe(
    [Step(HoistRelPos()), Step(WhereIndexing()), Step(TritonAttention(), required=False), Step(Compile())], name="mine"
)


@pytest.mark.usefixtures("dynamo_only")
def test_before_and_after(sam: Sam, pictures: list[Sample], tmp_path: Path) -> None:
    found = compare(sam, RECIPE, pictures, out=tmp_path, logs=True)
    assert ATTRIBUTE not in vars(sam)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.trace.json.gz", "before.trace.json.gz"]
    assert [status for _, status in found.passes] == ["applied", "applied", "skipped", "applied"]
    assert (found.image, found.recipe) == ("picture 0", "mine")
    if torch.version.cuda is not None:
        assert found.before.audit is not None
        assert found.after.audit is not None
        assert len(found.before.audit.inside()) == 7
        assert found.after.audit.inside() == ()
    assert found.compilations is not None
    assert len(found.compilations.compiled) >= 4  # patch embedding, two kinds of blocks, neck
    assert found.compilations.breaks == []
    written = json.loads(json.dumps(found.to_dict()))
    assert written["passes"][2]["status"] == "skipped"
    assert written["after"]["groups"]
    assert len(written["compilations"]["compiled"]) == len(found.compilations.compiled)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(found)
    for text in ("before ms", "after ms", "recipe mine, picture 0", "TritonAttention() skipped", "graph breaks"):
        assert text in captured.get()


def test_in_place_and_without_logs(sam: Sam, pictures: list[Sample]) -> None:
    found = compare(sam, Recipe([Step(HoistRelPos())]), pictures, inplace=True)
    assert ATTRIBUTE in vars(sam)
    assert found.compilations is None
    assert found.to_dict()["compilations"] is None


def test_loops_that_are_compiled_for_a_cpu_have_names() -> None:
    torch._dynamo.reset()

    @torch.compile
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(2 * x)

    with named_loops(), torch.no_grad():
        gelu(torch.ones(512))
    with torch.profiler.profile() as found, torch.no_grad():
        gelu(torch.ones(512))
    groups = {kernel.name: kernel.group for kernel in kernels_of(found.key_averages(), cuda=False)}
    assert [group for name, group in groups.items() if "cpp_fused_" in name] == ["elementwise"]
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.gpu
def test_on_a_gpu_kernels_memory_and_snapshots(tmp_path: Path) -> None:
    from samopt.tiny import load_tiny

    found = compare(load_tiny().to("cuda"), "fast", out=tmp_path, logs=True)
    peaks = []
    for one in (found.before, found.after):
        assert one.memory is not None
        peaks.append(one.memory.peak_bytes)
        assert one.memory.peak_bytes > one.memory.weight_bytes > 10_000_000
        assert not any(kernel.name.startswith("aten::") for kernel in one.kernels)
        stages = {stage.name: stage for stage in one.stages}
        assert 0 < stages["image encoder"].gpu_seconds <= one.kernel_seconds * 1.01
    assert found.after.kernel_seconds < found.before.kernel_seconds
    assert peaks[1] < peaks[0]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{when}.{kind}" for when in ("before", "after") for kind in ("trace.json.gz", "memory.pickle")
    }
    torch._dynamo.reset()
