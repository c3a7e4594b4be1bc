"""The script that fills `tuned.json`: what it writes when, and what it says where it cannot. The tuner is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

from samopt.errors import Unsupported
from samopt.passes.kernels import attention_problem, scaled_problem, tune, tuning
from samopt.passes.kernels.tuning import Config, Problem

COUNT = 16 + 8 + 32 + 8  # of attention in encoder and decoder, and of int8 and float8 products


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not there yet, on a machine where kernels run, and each is best in its first configuration."""
    monkeypatch.setattr(tune, "cannot_run", lambda device: None)
    monkeypatch.setattr(tuning, "tune", lambda problem: problem.candidates[0])
    return tmp_path / "tuned.json"


def entries(file: Path) -> list[str]:
    return list(json.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "sources", [attention_problem.WINDOW_SOURCES, scaled_problem.SOURCES], ids=["attention", "products"]
)
def test_every_problem_is_added_and_what_is_stale_is_dropped(file: Path, sources: tuple[str, ...]) -> None:
    kept = f"kernel(N=1) float16 on A100, source {tuning.source_hash(sources)}, torch 2.11.0, triton 3.6.0"
    file.write_text(
        json.dumps({kept: {}, "kernel(N=1) float16 on A100, source 0123, torch 2.11.0, triton 3.6.0": {}}),
        encoding="utf-8",
    )
    tune.main([str(file)])
    assert len(entries(file)) == COUNT + 1
    assert entries(file)[0] == kept
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_what_the_file_has_is_not_sought_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.main([str(file)])
    whole = json.loads(file.read_text(encoding="utf-8"))
    lost = list(whole)[5]
    file.write_text(json.dumps({key: value for key, value in whole.items() if key != lost}), encoding="utf-8")
    sought: list[str] = []

    def found(problem: Problem) -> Config:
        sought.append(problem.versioned_key())
        return problem.candidates[0]

    monkeypatch.setattr(tuning, "tune", found)
    tune.main([str(file)])
    assert sought == [lost]
    assert json.loads(file.read_text(encoding="utf-8")) == whole


def test_without_a_file_it_is_the_one_that_ships(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SHIPPED", file)
    tune.main([])
    assert len(entries(file)) == COUNT


def test_an_interruption_loses_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def interrupted(problem: Problem) -> Config:
        if len(found) == 3:
            raise KeyboardInterrupt
        found.append(problem.versioned_key())
        return problem.candidates[0]

    monkeypatch.setattr(tuning, "tune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.main([str(file)])
    assert entries(file) == found


def test_a_problem_that_nothing_works_for_is_told_and_the_others_go_on(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def picky(problem: Problem) -> Config:
        if dict(problem.shape).get("D") == 80:
            raise Unsupported("too little shared memory")
        return problem.candidates[0]

    monkeypatch.setattr(tuning, "tune", picky)
    tune.main([str(file)])
    assert len(entries(file)) == COUNT - 4
    assert capsys.readouterr().out.count(": too little shared memory\n") == 4


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_where_kernels_cannot_run_it_says_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "cannot_run", lambda device: "Triton is not installed")
    assert refusal([str(file)], capsys).endswith("error: nothing can be tuned here: Triton is not installed")
    assert not file.exists()


@pytest.mark.parametrize("content", ["[]", "{", "é"])
def test_a_file_of_something_else_is_left_alone(file: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(content, encoding="latin-1")
    assert f"{file} cannot be added to: " in refusal([str(file)], capsys)
    assert file.read_text(encoding="latin-1") == content


def test_help_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        tune.main(["--help"])
    assert stop.value.code == 0
    assert "JSON file to add to" in capsys.readouterr().out
