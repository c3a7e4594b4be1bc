"""The same report on a terminal, in print, and in a notebook with and without HTML."""

from __future__ import annotations

from IPython.core.formatters import DisplayFormatter
from rich.console import Console

from samopt.profiling import Audit
from tests.made_up_results import COMPARISON


def test_a_notebook_gets_html_and_readable_text() -> None:
    formatter = DisplayFormatter()
    for made in (COMPARISON, COMPARISON.before, COMPARISON.before.audit):
        data, _ = formatter.format(made)
        assert "<table>" in data["text/html"]
        assert data["text/plain"] == str(made)
        assert "Audit(" not in data["text/plain"]
        console = Console(width=130, color_system=None)
        with console.capture() as captured:
            console.print(made)
        assert [line.rstrip() for line in captured.get().rstrip().splitlines()] == [
            line.rstrip() for line in str(made).splitlines()
        ]


def test_an_audit_that_found_nothing_is_shown() -> None:
    assert "0 a call" in str(Audit(()))
