"""What is installed, and what `import samopt` does: as a user of the wheel gets it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "PIL",
    "matplotlib",
    "pyarrow",
    "pycocotools",
    "ray",
    "rich",
    "segment_anything",
    "torchao",
    "torchvision",
    "triton",
    "typer",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("samopt", "passes", "recipes", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "passes" / "kernels" / "tuned.json").touch()  # made on a GPU, and not there before
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (found,) = out.glob("samopt-*.whl")
    return found


def test_only_samopt_is_installed_and_all_of_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {re.sub(r"-.*\.dist-info", ".dist-info", top) for top in tops} == {"samopt", "samopt.dist-info"}
    kinds = (".py", ".toml", ".safetensors", ".json", ".typed")
    for folder in (ROOT / "samopt", ROOT / "passes", ROOT / "recipes"):
        prefix = "samopt" if folder.name == "samopt" else f"samopt/{folder.name}"
        files = (path for path in folder.rglob("*") if path.suffix in kinds or path.name == "py.typed")
        missing = {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in files} - set(names)
        assert not missing
    assert {"samopt/passes/kernels/attention.py", "samopt/passes/kernels/tuned.json"} <= set(names)


IMPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import samopt
seen = {"file": samopt.__file__, "modules": sorted(sys.modules)}
import torch
seen["cuda"] = torch.cuda.is_initialized()
from samopt.passes import PASSES
seen["passes"] = sorted(PASSES)
made = [pass_() for pass_ in PASSES.values()]
seen["modules of passes"] = sorted(sys.modules)
seen["cuda of passes"] = torch.cuda.is_initialized()
seen["recipes"] = [samopt.Recipe.of(name).name for name in ("exact", "fast", "max")]
seen["public"] = [name for name in samopt.__all__ if not hasattr(samopt, name)]
json.dump(seen, sys.stdout)
"""


def test_import_is_light_and_touches_no_gpu_and_the_wheel_works(wheel: Path) -> None:
    command = [sys.executable, "-I", "-W", "error", "-c", IMPORT, str(wheel)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=wheel.parent)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    seen = json.loads(run.stdout)
    assert seen["file"].startswith(str(wheel))
    assert [name for name in HEAVY if name in seen["modules"]] == []
    assert [name for name in HEAVY if name in seen["modules of passes"]] == []
    assert seen["cuda"] is seen["cuda of passes"] is False
    assert seen["recipes"] == ["exact", "fast", "max"]
    assert seen["public"] == [], "every public name is there"
    assert {"sdpa", "triton_attention", "linear_gelu", "layer_norm"} <= set(seen["passes"])


@pytest.mark.parametrize("name", ["passes", "main.passes"])
def test_the_passes_refuse_another_name(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "passes" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"this package is samopt\.passes, not {name}: use `import samopt\.passes`"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
