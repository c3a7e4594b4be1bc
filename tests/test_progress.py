from __future__ import annotations

import io
import sys

import pytest

from samopt.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal. Not a fixture: between set-up and test, pytest puts its own there."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return found


def test_a_terminal_sees_the_step_and_how_many_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with Progress(2) as progress:
        progress.step("Toy()")
        progress.step("Other(names=[red])")
    assert "Other(names=[red])" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()
    assert "-1" not in terminal.getvalue()


def work_and_fail() -> None:
    with Progress(1) as progress:
        progress.step("Toy()")
        raise KeyError


def test_an_error_passes_and_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with pytest.raises(KeyError):
        work_and_fail()
    written = terminal.getvalue()
    assert "\x1b[?25h" in written[written.rindex("\x1b[?25l") :], "the cursor is shown again"
    with Progress(1) as progress:
        progress.step("the next one works")


def test_nothing_is_written_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(1) as progress:
        progress.step("Toy()")
    assert capfd.readouterr() == ("", "")


def test_a_bar_inside_another_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with Progress(1) as outer:
        outer.step("Outer()")
        with Progress(1) as inner:
            inner.step("Inner()")
        outer.step("Again()")
    assert "Again()" in terminal.getvalue()
    assert "Inner()" not in terminal.getvalue()
    with Progress(1) as progress:
        progress.step("Inner()")
    assert "Inner()" in terminal.getvalue(), "and the next one is"


def test_standard_output_that_is_no_terminal_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, piped = as_terminal(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    with Progress(1) as progress:
        progress.step("Toy()")
        print("a row")
    assert piped.getvalue() == "a row\n"
    assert "a row" not in terminal.getvalue()


def test_the_time_left_is_estimated_from_the_steps_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("samopt.progress.time.perf_counter", lambda: now)
    with Progress(4) as progress:
        assert progress.left == ""
        progress.step("one")
        assert progress.left == "", "nothing is done yet"
        now += 20
        progress.step("two")
        assert progress.left == "about 60 s left"
        now += 120
        progress.step("three")
        assert progress.left == "about 2 min left"
        progress.step("four")
        progress.step()
        assert progress.left == ""


def test_many_alike_are_counted_with_their_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with Progress(40, unit="img") as progress:
        progress.name("segment [all]")
        for _ in range(3):
            progress.advance(8)
        progress.say("a line above [the bar]")
    written = terminal.getvalue()
    assert "segment [all]" in written
    assert "24/40" in written
    assert "img/s" in written
    assert "a line above [the bar]" in written


def test_a_line_is_said_without_a_terminal_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, unit="img") as progress:
        progress.advance(1)
        progress.say("a line")
    assert capsys.readouterr().err == "a line\n"
