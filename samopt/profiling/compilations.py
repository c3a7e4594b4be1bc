"""What torch.compile did while something ran: what it compiled, where it broke a graph, what it compiled again and why.

It is read off the structured trace that PyTorch writes for its own tool, tlparse (`TORCH_TRACE`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from samopt.profiling.syncs import as_imported

if TYPE_CHECKING:
    from rich.console import Group

_BREAK = re.compile(r"Graph break in user code at (?P<file>.*):(?P<line>\d+)\nGraph Break Reason: (?P<reason>.*)", re.S)
_SKIP = re.compile(r'Graph break: .*following user code:\n.*File "(?P<file>[^"]*)", line (?P<line>\d+)', re.S)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+$")


@dataclass(frozen=True)
class Compilation:
    """One compilation of a function.

    Attributes:
        function: its name.
        file: where it is defined.
        line: in which line.
        seconds: how long it took.
        guard: why code compiled before did not do: the condition that failed, and the code that needs it where PyTorch
            says that; "" for a first compilation.
        failed: why nothing came of it; "" where code did.
    """

    function: str
    file: str
    line: int
    seconds: float
    guard: str = ""
    failed: str = ""

    def __str__(self) -> str:
        again = f"{self.function} ({as_imported(self.file)}:{self.line}) compiled again in {self.seconds:.1f} s"
        return f"{again}, as this no longer held: {self.guard}"


@dataclass(frozen=True)
class GraphBreak:
    """A line that torch.compile cannot take into a graph: it runs as Python, between two graphs.

    Attributes:
        file: where it is.
        line: the line there.
        reason: in PyTorch's words.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"graph break at {as_imported(self.file)}:{self.line}: {self.reason}"


@dataclass
class Compilations:
    """What was compiled, in order.

    Attributes:
        compiled: each compilation, those of the pieces between graph breaks too.
        breaks: each graph break once.
    """

    compiled: list[Compilation] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)

    @property
    def recompiled(self) -> list[Compilation]:
        """Those of code that had been compiled before."""
        return [one for one in self.compiled if one.guard]

    def to_dict(self) -> dict[str, Any]:
        """{compiled: [{function, file, line, seconds, guard, failed}], breaks: [{file, line, reason}]}, for JSON."""
        return asdict(self)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(*map(Text, str(self).splitlines()))

    def __str__(self) -> str:
        seconds = sum(one.seconds for one in self.compiled)
        summary = f"{len(self.compiled)} compilations in {seconds:.1f} s, {len(self.recompiled)} of them anew; "
        failed = [f"{one.function} was not compiled: {one.failed}" for one in self.compiled if one.failed]
        return "\n".join(
            [summary + f"{len(self.breaks)} graph breaks", *map(str, (*self.breaks, *self.recompiled)), *failed]
        )


@contextmanager
def record_compilations() -> Iterator[Compilations]:
    """Fills what it yields with what torch.compile does inside, in any thread."""
    found = Compilations()
    trace, handler = logging.getLogger("torch.__trace"), _Reader(found)
    trace.addHandler(handler)
    try:
        yield found
    finally:
        trace.removeHandler(handler)


class _Reader(logging.Handler):
    """Reads records of the structured trace, each a dictionary of one named event, and perhaps a text."""

    def __init__(self, found: Compilations) -> None:
        super().__init__(logging.DEBUG)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        event: dict[str, Any] = getattr(record, "metadata", {})
        payload = getattr(record, "payload", None)
        if "compilation_metrics" in event:
            self._compiled(event["compilation_metrics"])
        elif event.get("artifact", {}).get("name") == "dynamo_graph_break_reason":
            self._broke(str(payload))

    def _compiled(self, metrics: dict[str, Any]) -> None:
        name: str | None = metrics.get("co_name")
        if name is None:  # of the backward pass, or autograd's
            return
        file, line = str(metrics.get("co_filename")), int(metrics.get("co_firstlineno") or 0)
        resumed = _RESUMED.match(name)
        function = f"the rest of {resumed[1]}" if resumed else name
        seconds = (metrics.get("duration_us") or 0) / 1e6
        guard, failed = _guard(metrics.get("recompile_reason") or ""), _sentence(metrics.get("fail_reason") or "")
        self._found.compiled.append(Compilation(function, file, line, seconds, guard, failed))

    def _broke(self, text: str) -> None:
        if match := _BREAK.search(text) or _SKIP.search(text):
            reason = match.groupdict().get("reason", "the function cannot be resumed after it, and is not compiled")
            found = GraphBreak(match["file"], int(match["line"]), _sentence(reason))
            if found not in self._found.breaks:
                self._found.breaks.append(found)


def _guard(text: str) -> str:
    """A failed guard without the numbers of compilations, as in "0/0: n == 2  # y - n  # file.py:9 in f"."""
    guard = re.match(r"(?:\d+/\d+: )?(.*?)(?:\s+# (.*?)\s+# .*:(\d+) in .*)?$", text.partition("\n")[0])
    assert guard is not None, "the pattern matches any line"
    condition, code, line = guard.groups()
    return f"{condition}, for line {line}: {code}" if code else condition


def _sentence(text: str) -> str:
    """PyTorch's explanation in one line: what stands behind "Explanation:", or its first paragraph."""
    explanation = re.search(r"Explanation: (.*?)(?:\n\s*Hint:|\n\s*\n|$)", text, re.S)
    return " ".join((explanation[1] if explanation else text.partition("\n\n")[0]).split())
