"""A progress bar with the time left on a terminal, and nothing where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """Shows the step at hand. A context manager; `step` moves on."""

    def __init__(self, total: int) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._total, self._done = total, -1
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal and console.file.isatty():  # FORCE_COLOR may call a log file a terminal
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            # A step may take minutes, and the time left is estimated from all that are done.
            self._bar = Bar(*columns, console=console, transient=True, speed_estimate_period=86_400)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, description: str) -> None:
        """Counts the last step as done and names the next one."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=description)
