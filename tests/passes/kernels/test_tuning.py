"""The tuner: right first, then fast. On a CPU, with made-up candidates and a made-up clock."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import attention_problem, scaled_problem, tuning
from samopt.passes.kernels.devices import GPU_ALONE
from samopt.passes.kernels.tuning import Config
from tests.made_up_problem import Candidate, Tuner, nothing, off_by, one_row, refuse, right

pytest.importorskip("triton", reason="needs Triton")


def test_the_fastest_right_one_wins(tuner: Tuner) -> None:
    problem = tuner.problem(Candidate(3.0, right), Candidate(1.0, right), Candidate(2.0, right))
    assert tuner.chosen(problem) == 1


def test_those_that_are_close_are_measured_again_in_turns(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is measured while the GPU is cold, and never as fast again."""
    candidates = [Candidate(seconds, right) for seconds in (1.03, 1.0, 1.04, 1.2)]
    problem = tuner.problem(*candidates)
    measured: list[int] = []

    def gpu_seconds(run: Callable[[], object]) -> float:
        run()
        index = dict(tuner.runs[-1].blocks)["BLOCK"]
        measured.append(index)
        return 0.99 if measured == [0] else candidates[index].seconds

    monkeypatch.setattr(tuning, "gpu_seconds", gpu_seconds)
    assert tuner.chosen(problem) == 1
    assert measured == [0, 1, 2, 3] + [0, 1] * tuning.ROUNDS, "1.04 is more than a twentieth above 0.99"


@pytest.mark.parametrize("write", [off_by(0.1), off_by(-1), off_by(float("inf")), one_row, nothing, refuse])
def test_what_is_not_right_is_never_chosen(tuner: Tuner, write: Callable[[Tensor], object]) -> None:
    problem = tuner.problem(Candidate(2.0, right), Candidate(0.1, write), Candidate(1.0, right))
    assert tuner.chosen(problem) == 2


@pytest.mark.parametrize("dtype", tuning.TOLERANCE, ids=str)
def test_how_right_it_must_be_depends_on_the_dtype(tuner: Tuner, dtype: torch.dtype) -> None:
    tolerance = tuning.TOLERANCE[dtype]
    candidates = [Candidate(1 / (1 + off), off_by(off * tolerance)) for off in (0.0, 0.9, 1.1)]
    assert tuner.chosen(tuner.problem(*candidates, dtype=dtype)) == 1, "the last is fastest, and too far off"


def test_one_that_fails_while_it_is_timed_is_passed_over(tuner: Tuner) -> None:
    calls: list[None] = []

    def once(out: Tensor) -> None:
        calls.append(None)
        right(out) if len(calls) == 1 else refuse(out)

    assert tuner.chosen(tuner.problem(Candidate(0.1, once), Candidate(1.0, right))) == 1
    assert len(calls) == 2


def test_nothing_is_captured_while_candidates_are_tried_and_a_capture_may_try_some(tuner: Tuner) -> None:
    """Timing waits for the whole GPU, which would break a capture of another thread."""
    free: list[bool] = []

    def see(out: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(GPU_ALONE.acquire, blocking=False).result())
        right(out)

    with GPU_ALONE:
        assert tuner.chosen(tuner.problem(Candidate(1.0, see))) == 0
    tuner.forget()
    assert tuner.chosen(tuner.problem(Candidate(1.0, see), shape=(("N", 4),))) == 0
    assert free == [False] * 4
    assert GPU_ALONE.acquire(blocking=False)
    GPU_ALONE.release()
    with ThreadPoolExecutor(1) as pool, GPU_ALONE:  # what is known is told also while another thread captures
        known = tuner.problem(Candidate(1.0, right), shape=(("N", 4),))
        assert pool.submit(tuning.choose, known).result(timeout=60) == known.candidates[0]


def test_where_none_works_the_reasons_are_told(tuner: Tuner, cache: Path) -> None:
    problem = tuner.problem(Candidate(1.0, refuse), Candidate(1.0, off_by(0.25)), Candidate(1.0, nothing))
    with pytest.raises(Unsupported) as error:
        tuning.choose(problem)
    assert str(error.value) == (
        "no configuration of made_up works for {'N': 3} on cpu: RuntimeError: out of resource: shared memory; "
        "wrong result, relative error 2.5e-01; wrong result, relative error nan"
    )
    assert not cache.exists()


def test_where_none_worked_none_is_tried_again(tuner: Tuner) -> None:
    problem = tuner.problem(Candidate(1.0, nothing))
    for _ in range(2):
        with pytest.raises(Unsupported, match="no configuration of made_up works"):
            tuning.choose(problem)
    assert len(tuner.runs) == 1


def test_a_problem_is_tuned_once(tuner: Tuner) -> None:
    first = tuning.choose(tuner.problem())
    tuner.runs.clear()
    assert tuning.choose(tuner.problem()) is first
    assert tuner.runs == []


def test_threads_wait_for_the_one_that_tunes(tuner: Tuner) -> None:
    problem = tuner.problem(Candidate(2.0, right), Candidate(1.0, right))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(tuner.chosen, [problem] * 16)) == {1}
    assert len(tuner.runs) == 2 * len(problem.candidates), "once to see that it is right, once to time it"


def test_nothing_is_sought_while_a_graph_is_captured(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = tuner.problem(), tuner.problem(kernel="another")
    config = tuning.choose(known)
    tuner.runs.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match="while a CUDA graph is captured; run the model once before the capture"):
        tuning.choose(unknown)
    assert tuning.choose(known) is config
    assert tuner.runs == []


def test_launch_options_are_what_triton_takes() -> None:
    assert Config.of(BLOCK=3, num_warps=2).launch_options() == {"BLOCK": 3, "num_warps": 2, "num_stages": 3}
    assert Config.of(maxnreg=64).launch_options() == {"num_warps": 4, "num_stages": 3, "maxnreg": 64}
    assert Config.of(A=1, B=2) == Config.of(B=2, A=1)


KERNEL = '''
"""A kernel."""

@jit
def kernel(x, N: constexpr):  # adds
    """Adds."""
    return x + N  # the sum
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [("A kernel.", "One kernel."), ("# adds", ""), ('    """Adds."""\n', ""), ("(x, N", "(\n    x, N"), ("\n\n", "\n")],
)
def test_comments_and_layout_are_no_code(old: str, new: str) -> None:
    assert old in KERNEL
    assert tuning.code_of(KERNEL.replace(old, new)) == tuning.code_of(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + N", "x - N"), ("@jit", "@noinline"), ("N: constexpr", "N"), ("return", '"Said twice."; return')],
)
def test_code_is_code(old: str, new: str) -> None:
    assert old in KERNEL
    assert tuning.code_of(KERNEL.replace(old, new)) != tuning.code_of(KERNEL)


def test_code_is_the_same_text_with_every_python() -> None:
    """Of quotes inside f-strings `ast.unparse` makes others from 3.12 on; `ast.dump` writes empty lists up to 3.12."""
    assert tuning.code_of("""def f(): return f"{a or '0'}"  # so""") == (
        "Module(body=[FunctionDef(name='f', args=arguments(), body=[Return(value=JoinedStr(values=[FormattedValue("
        "value=BoolOp(op=Or(), values=[Name(id='a', ctx=Load()), Constant(value='0')]), conversion=-1)]))])])"
    )


@pytest.mark.parametrize(
    ("sources", "name", "old", "new"),
    [
        (attention_problem.WINDOW_SOURCES, "arithmetic", "-30000.0", "-20000.0"),
        (attention_problem.WINDOW_SOURCES, "position_terms", "constexpr = D1 + D2", "constexpr = D2 + D1"),
        (attention_problem.GLOBAL_SOURCES, "global_attention", "constexpr = D1 + D2", "constexpr = D2 + D1"),
        (attention_problem.WINDOW_SOURCES, "window_attention", "constexpr = D1 + D2", "constexpr = D2 + D1"),
        (scaled_problem.SOURCES, "scaled_matmul", "1.0 / tl.load", "1 / tl.load"),
        (scaled_problem.SOURCES, "gelu", "-2.3022", "-2.3023"),
        (scaled_problem.SOURCES, "scaled_launch", "GROUP = 8", "GROUP = 4"),
    ],
)
def test_the_source_hash_is_that_of_every_source(
    sources: tuple[str, ...], name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in sources:
        shutil.copy(Path(tuning.__file__).parent / f"{source}.py", tmp_path)
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    source_hash = tuning.source_hash.__wrapped__
    assert source_hash(sources) == tuning.source_hash(sources)
    file = tmp_path / f"{name}.py"
    file.write_text(file.read_text() + "\n# said once more\n")
    assert source_hash(sources) == tuning.source_hash(sources)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert source_hash(sources) != tuning.source_hash(sources)


def test_kernels_have_sources_of_their_own(tuner: Tuner) -> None:
    problem = tuner.problem()
    keys = {
        dataclasses.replace(problem, sources=one).key()
        for one in (attention_problem.WINDOW_SOURCES, scaled_problem.SOURCES)
    }
    assert len(keys) == 2
