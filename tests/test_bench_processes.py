"""Several models in one call of a benchmark: processes, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tests.benches
from samopt import bench_processes
from samopt.bench_processes import file_of
from samopt.cli import app

SMALL = """
import os
from pathlib import Path

import pytest

from samopt.cli import app
from tests.benches import bench_small

bench_small(pytest.MonkeyPatch())
with Path("processes").open("a") as file:
    print(os.getpid(), file=file)
app(prog_name="samopt")
"""


@pytest.mark.slow
def test_each_model_has_a_process_and_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(tests.benches.__file__).parents[1]), *sys.path]))
    monkeypatch.setattr(bench_processes, "SAMOPT", (sys.executable, "-c", SMALL))
    (tmp_path / "one.toml").write_text('[[pass]]\nname = "sdpa"\n')
    models = ("--model-type", "vit_b", "--model-type", "vit_l", "--model-type", "vit_b")
    options = ("--recipe", "one.toml", "--device", "cpu", "--batch-size", "2", "--seed", "7")
    done = CliRunner().invoke(app, ["bench", "encoder", *models, *options, "--json", "r.json", "--csv", "r.csv"])
    output = capfd.readouterr()
    assert done.exit_code == 0, output.err
    assert len({*(tmp_path / "processes").read_text().split()} | {str(os.getpid())}) == 3
    results = sorted(path.name for path in tmp_path.glob("r*"))
    assert results == ["r-vit_b.csv", "r-vit_b.json", "r-vit_l.csv", "r-vit_l.json"]
    for name in ("vit_b", "vit_l"):
        written = json.loads((tmp_path / f"r-{name}.json").read_text())
        assert (written["model"], written["seed"], written["recipes"]) == (name, 7, ["one"])
        assert [row["what"] for row in written["rows"]] == ["unmodified", "eager bfloat16", "eager bfloat16", "one"]
        assert {row["batch_size"] for row in written["rows"]} == {1, 2}
        assert f"--model-type {name} --recipe one.toml" in written["command"]
        assert f"{name}, image encoder, seed 7" in output.out


def test_the_process_is_the_command_line_of_samopt(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('a file of the user, no package')")
    command = [*bench_processes.SAMOPT, "bench", "compare", "a.json", "b.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a.json: cannot be read")


def run(monkeypatch: pytest.MonkeyPatch, child: str, *options: str) -> Result:
    """Runs a waterfall of vit_b and vit_h, with Python code in the place of samopt."""
    monkeypatch.setattr(bench_processes, "SAMOPT", (sys.executable, "-S", "-c", child))
    models = ("--model-type", "vit_b", "--model-type", "vit_h")
    return CliRunner().invoke(app, ["bench", "waterfall", *models, *options])


WRITE = "import os, sys; print(sys.argv[1:], file=open('said', 'a')); "


def test_all_options_are_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--each", "--recipe", "exact", "--batch-size", "2", "--batch-size", "3", "--limit", "5")
    assert run(monkeypatch, WRITE, *options, "--json", "a b.json").exit_code == 0
    for line, name in zip((tmp_path / "said").read_text().splitlines(), ("vit_b", "vit_h"), strict=True):
        expected = ["bench", "waterfall", "--model-type", name, "--recipe", "exact", "--batch-size", "2"]
        expected += ["--batch-size", "3", "--each", "--limit", "5", "--seed", "0", "--json", f"a b-{name}.json"]
        assert line == str([*expected, "--device", "auto"])


@pytest.mark.parametrize(
    ("child", "exit_code", "runs"),
    [
        ("sys.exit(1)", 1, 2),  # a row failed: the next model may do
        ("os.kill(os.getpid(), 9)", 1, 2),  # as where memory runs out
        ("sys.exit(2)", 2, 1),  # refused, as all would be
        ("sys.exit(130)", 130, 1),
    ],
)
def test_what_becomes_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: str, exit_code: int, runs: int
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(monkeypatch, WRITE + "" + child)
    assert (result.exit_code, (tmp_path / "said").read_text().count("\n")) == (exit_code, runs)
    assert ("vit_h: its process was ended by signal 9" in result.output) == ("kill" in child)


def test_ctrl_c_waits_for_the_model_at_hand_and_begins_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[str] = []

    def wait(self: Any, timeout: float | None = None) -> int:
        waits.append("")
        if len(waits) == 1:
            raise KeyboardInterrupt
        return original(self, timeout)

    original = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.chdir(tmp_path)
    result = run(monkeypatch, "import time; time.sleep(0.2); " + WRITE)
    assert (result.exit_code, (tmp_path / "said").read_text().count("\n")) == (130, 1)


def test_sigterm_ends_the_model_at_hand_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    result = run(monkeypatch, WRITE + "os.kill(os.getppid(), 15); import time; time.sleep(60)")
    assert (result.exit_code, (tmp_path / "said").read_text().count("\n")) == (143, 1)
    assert time.monotonic() - start < 30


def test_names_of_files() -> None:
    assert file_of(Path("out/rows.json"), "vit_b") == Path("out/rows-vit_b.json")
    assert file_of(Path("rows"), "vit_b") == Path("rows-vit_b")
    assert file_of(None, "vit_b") is None
