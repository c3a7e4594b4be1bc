"""A progress bar with the time left on a terminal, and nothing where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """Shows the step at hand. A context manager; `step` moves on, or `advance` where steps are many and alike.

    One inside another shows nothing.

    Args:
        total: how many steps there are.
        unit: what is counted, to show how many of them are done in a second; "" shows the time taken instead.
    """

    _showing: ClassVar[bool] = False  # some bar is: a terminal has one last line

    def __init__(self, total: int, unit: str = "") -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._total, self._done, self._start, self._unit = total, -1, time.perf_counter(), unit
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal and console.file.isatty():  # FORCE_COLOR may call a log file a terminal
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}", markup=False)
            pace = TextColumn("{task.fields[pace]}") if unit else TimeElapsedColumn()
            columns = (text, BarColumn(), MofNCompleteColumn(), pace, TimeRemainingColumn())
            # A step may take minutes, and the time left is estimated from all that are done.
            # What goes to a file or a pipe on standard output is not to be shown above the bar instead.
            self._bar = Bar(
                *columns,
                console=console,
                transient=True,
                speed_estimate_period=86_400,
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        if Progress._showing:
            self._bar = None
        if self._bar is not None:
            Progress._showing = True
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, pace="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            Progress._showing = False
            self._bar.stop()

    def step(self, description: str = "") -> None:
        """Counts the last step as done and names the next one."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=description)

    @property
    def left(self) -> str:
        """The time left in words, where the steps to come take as long as those done did; "" where none is known."""
        if not 0 < self._done < self._total:
            return ""
        seconds = (time.perf_counter() - self._start) / self._done * (self._total - self._done)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def name(self, description: str) -> None:
        """Names what is being done."""
        if self._bar is not None:
            self._bar.update(self._task, description=description)

    def advance(self, count: int) -> None:
        """Counts some more as done, from any thread."""
        if self._bar is not None:
            speed = self._bar.tasks[self._task].speed
            pace = "" if speed is None else f"{speed:.1f} {self._unit}/s"
            self._bar.update(self._task, advance=count, pace=pace)

    def say(self, text: str) -> None:
        """Writes a line to standard error, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr)
