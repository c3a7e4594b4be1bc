"""The notebooks run as they stand, and their committed outputs come from a run that went well."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One process for all notebooks, which start without each other's names: importing torch takes its time."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    manager.start_kernel(env={**os.environ, **own, "PYTHONPATH": str(ROOT)})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, kernel: Any, tmp_path: Path) -> None:
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client: Any = NotebookClient(notebook, km=kernel, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    for cell, committed in zip(code(notebook)[1:], code(read(path)), strict=True):
        kinds = [
            sorted(output.get("data", {"stdout": ""})) for output in cell.outputs if output.get("name") != "stderr"
        ]
        assert bool(kinds) is bool(committed.outputs), "what is committed shows what the cell shows"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_a_whole_run_of_any_machine(path: Path) -> None:
    cells = code(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", text), "no path of the machine that ran it"
    assert len(text) < 200_000


def test_there_are_all_five_and_each_leads_to_the_next() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    for path, following in itertools.pairwise(NOTEBOOKS):
        assert f"({following.name})" in read(path).cells[-1].source
