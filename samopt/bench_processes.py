"""One benchmark of several models: a process for each, one after the other.

Compilations, memory and clocks of one model are to be in no other's figures.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from samopt.cli_common import say

# Not by the console script, which need not be on the PATH; -P, as no file of the user's folder is to be imported.
SAMOPT = (sys.executable, "-P", "-c", "from samopt.cli import app; app(prog_name='samopt')")


def file_of(path: Path | None, model_type: str) -> Path | None:
    """The results file of one of several models: rows.json becomes rows-vit_b.json."""
    return None if path is None else path.with_stem(f"{path.stem}-{model_type}")


def run_each(context: typer.Context, model_types: Sequence[str]) -> None:
    """Runs a command of `samopt bench` once for each of several `--model-type`, with its other options as they are.

    Ctrl-C ends it with the rows that are done: the model at hand says which, and the others are not begun.

    Raises:
        typer.Exit: 130 after Ctrl-C; 2 where a process refused what was asked, and the models after it are not begun; 1
            where a row failed, or a process was ended by a signal, after the others.
    """
    failed = False
    for model_type in model_types:
        code, interrupted = _run([*SAMOPT, "bench", str(context.info_name), *_options(context, model_type)])
        if interrupted or code in (2, 130):
            raise typer.Exit(130 if interrupted else code)
        if code < 0:
            say(f"{model_type}: its process was ended by signal {-code}")
        failed |= code != 0
    if failed:
        raise typer.Exit(1)


def _options(context: typer.Context, model_type: str) -> Iterator[str]:
    """The command line of one model: the options as they were understood, in full."""
    for option in context.command.params:
        value = context.params[str(option.name)]
        if option.name == "model_type":
            value = [model_type]
        elif isinstance(value, Path) and option.name in ("json_out", "csv_out"):
            value = file_of(value, model_type)
        yield from _written(option.opts[0], value)


def _written(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from (name, str(each))
    elif value is True:
        yield name
    elif value is not None and value is not False:  # False is every flag's default
        yield from (name, str(value))


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """The exit code of a process, negative for a signal, and whether Ctrl-C came meanwhile.

    The terminal tells the process, too, of Ctrl-C, and it is waited for: it has rows to show. SIGTERM ends both.
    """
    interrupted = False
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with subprocess.Popen(command) as process:
            while True:
                try:
                    return process.wait(), interrupted
                except KeyboardInterrupt:
                    interrupted = True
                except SystemExit:
                    process.terminate()
                    raise
    finally:
        signal.signal(signal.SIGTERM, before)
