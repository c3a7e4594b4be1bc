"""What the tuner found, in files: the user's own, and the one that samopt ships."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import attention_problem, image_to_token, linear, scaled_problem, tuning
from samopt.passes.kernels.attention_problem import GLOBAL_CANDIDATES, WINDOW_CANDIDATES
from samopt.passes.kernels.hopper_launch import HOPPER_CANDIDATES
from samopt.passes.kernels.tuning import Config
from tests.made_up_problem import Candidate, Tuner, off_by, right

triton = pytest.importorskip("triton", reason="needs Triton")

COMMITTED = tuning.SHIPPED
TWO = (Candidate(2.0, right), Candidate(1.0, right))
SECOND = {"blocks": [["BLOCK", 1]], "num_warps": 4, "num_stages": 3, "maxnreg": None}
FIRST = {**SECOND, "blocks": [["BLOCK", 0]]}


def key_of(tuner: Tuner) -> str:
    """The key of the made-up problem in the user's file."""
    return tuner.problem(*TWO).versioned_key()


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_new_process_reads_what_was_found(tuner: Tuner, cache: Path) -> None:
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert read(cache) == {key_of(tuner): SECOND}
    assert [file.name for file in cache.parent.iterdir()] == ["kernels.json"]
    tuner.forget()
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert tuner.runs == []


def test_what_came_with_a_saved_model_is_used(tuner: Tuner, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_offered", {})
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    found = json.loads(json.dumps(tuning.found_here()))
    assert found == {key_of(tuner): SECOND}
    tuner.forget()
    cache.unlink()
    tuning.offer(found)
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert tuner.runs == []
    tuner.forget()
    tuning.offer({key_of(tuner): {**SECOND, "num_warps": 64}})
    with pytest.warns(UserWarning, match=r"a saved model: what it has for .* is ignored, as it is no candidate"):
        assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert tuner.runs != []


def test_it_tunes_anew_where_something_else_is_asked_for(tuner: Tuner, cache: Path) -> None:
    tuning.choose(tuner.problem())
    for other in (
        tuner.problem(kernel="another"),
        tuner.problem(shape=(("N", 4),)),
        tuner.problem(dtype=torch.bfloat16),
    ):
        tuner.forget()
        tuning.choose(other)
        assert tuner.runs
    assert len(read(cache)) == 4


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (tuning, "source_hash", lambda sources: "0123456789ab"),
        (tuning, "_gpu", lambda device: "NVIDIA H300 (11.0)"),
        (torch, "__version__", "2.99.0"),
        (triton, "__version__", "3.99.0"),
    ],
    ids=["source", "GPU", "torch", "triton"],
)
def test_it_tunes_anew_with_another(
    owner: Any, name: str, value: Any, tuner: Tuner, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning.choose(tuner.problem())
    tuner.forget()
    monkeypatch.setattr(owner, name, value)
    tuning.choose(tuner.problem())
    assert tuner.runs
    assert len(read(cache)) == 2
    assert any((value if isinstance(value, str) else value(None)) in key for key in read(cache))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"made_up(N=3) fl', b"\xff\xfe", b"[]", b"null", b'"text"'],
    ids=lambda content: repr(content),
)
def test_a_broken_file_is_repaired(content: bytes, tuner: Tuner, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    with pytest.warns(UserWarning, match="kernels.json is ignored: "):
        assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert read(cache) == {key_of(tuner): SECOND}
    tuner.forget()
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert tuner.runs == []


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        "text",
        [],
        {},
        {"blocks": SECOND["blocks"]},
        {**SECOND, "blocks": 1},
        {**SECOND, "blocks": ["BLOCK", 1]},
        {**SECOND, "blocks": [["BLOCK", "1"]]},
        {**SECOND, "blocks": [["BLOCK", float("inf")]]},
        {**SECOND, "blocks": [["BLOCK", 7]]},
        {**SECOND, "blocks": [["SIZE", 1]]},
        {**SECOND, "num_warps": "4"},
        {**SECOND, "num_stages": 1},
        {**SECOND, "grid": 1},
    ],
    ids=str,
)
def test_an_entry_that_is_no_candidate_is_repaired(entry: Any, tuner: Tuner, cache: Path) -> None:
    write(cache, {key_of(tuner): entry, "other": SECOND})
    with pytest.warns(UserWarning, match="is ignored, as it is no candidate"):
        assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert read(cache) == {key_of(tuner): SECOND, "other": SECOND}


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAMOPT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is ignored|are not kept") as seen:
        assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert "tuned configurations are not kept: " in str(seen[-1].message)
    assert tuner.chosen(tuner.problem(*TWO)) == 1, "it is kept in memory"


def test_writers_at_once_leave_a_whole_file(cache: Path) -> None:
    def write_some(writer: int) -> None:
        for entry in range(20):
            tuning._keep(f"{writer}, {entry}", Config.of(BLOCK=entry))

    tuning._keep("first", Config.of())
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write_some, writer) for writer in range(2)]
        while not all(writer.done() for writer in writers):
            assert "first" in read(cache)
    for writer in writers:
        writer.result()
    assert "first" in read(cache)
    assert read(cache).keys() & {"0, 19", "1, 19"}, "the last write stands"
    assert [file.name for file in cache.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize("place", ["SAMOPT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_where_the_file_is(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAMOPT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(place, str(tmp_path))
    inside = {"SAMOPT_CACHE_DIR": "", "XDG_CACHE_HOME": "samopt", "HOME": ".cache/samopt"}[place]
    assert tuning.cache_file() == tmp_path / inside / "kernels.json"


def test_what_is_shipped_needs_no_tuning(tuner: Tuner, cache: Path) -> None:
    write(tuning.SHIPPED, {key_of(tuner): FIRST})
    assert tuner.chosen(tuner.problem(*TWO)) == 0
    assert tuner.runs == []
    assert not cache.exists()


def test_what_was_found_here_comes_before_what_is_shipped(tuner: Tuner, cache: Path) -> None:
    write(tuning.SHIPPED, {key_of(tuner): FIRST})
    write(cache, {key_of(tuner): SECOND})
    assert tuner.chosen(tuner.problem(*TWO)) == 1
    assert tuner.runs == []


def test_shipped_configurations_of_other_kernels_are_not_taken(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tuning.SHIPPED, {key_of(tuner): FIRST})
    monkeypatch.setattr(tuning, "source_hash", lambda sources: "0123456789ab")
    assert tuner.chosen(tuner.problem(*TWO)) == 1


@pytest.mark.parametrize(("first", "chosen"), [(right, 0), (off_by(0.1), 1)], ids=["right", "wrong"])
def test_what_is_shipped_for_other_versions_must_prove_right_and_then_is_fast_enough(
    tuner: Tuner, cache: Path, first: Callable[[Tensor], object], chosen: int
) -> None:
    problem = tuner.problem(Candidate(2.0, first), Candidate(1.0, right))
    write(tuning.SHIPPED, {f"{problem.key()}, torch 2.0.0, triton 2.0.0": FIRST})
    assert tuner.chosen(problem) == chosen
    assert tuner.runs
    assert read(cache) == {problem.versioned_key(): [FIRST, SECOND][chosen]}


def test_without_memory_for_the_check_there_is_no_configuration(tuner: Tuner) -> None:
    def refuse() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 17 GiB")

    problem = dataclasses.replace(tuner.problem(), reference=refuse)
    with pytest.raises(Unsupported, match=r"made_up cannot be checked for .*CUDA out of memory"):
        tuning.choose(problem)


def test_without_triton_there_is_none(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "has_triton_package", lambda: False)
    with pytest.raises(Unsupported, match="Triton is not installed"):
        tuning.choose(tuner.problem())


@pytest.mark.skipif(not COMMITTED.exists(), reason="nothing is shipped")
def test_the_shipped_file_is_of_these_kernels() -> None:
    shipped = {
        "global_attention": (GLOBAL_CANDIDATES, attention_problem.GLOBAL_SOURCES),
        "window_attention": ((*HOPPER_CANDIDATES, *WINDOW_CANDIDATES), attention_problem.WINDOW_SOURCES),
        "int8_linear": (scaled_problem.INT8_CANDIDATES, scaled_problem.SOURCES),
        "float8_gelu": (scaled_problem.FLOAT8_CANDIDATES, scaled_problem.SOURCES),
        "linear": (linear.CANDIDATES, linear.SOURCES),
        "image_to_token": (image_to_token.CANDIDATES, image_to_token.SOURCES),
    }
    for key, entry in read(COMMITTED).items():
        candidates, sources = shipped[key.partition("(")[0]]
        assert f", source {tuning.source_hash(sources)}, torch " in key, "run python -m samopt.passes.kernels.tune"
        assert entry in [tuning.encode(config) for config in candidates]
