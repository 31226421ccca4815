"""What the commands print: prose and progress on stderr, one JSON object on stdout with ``--json``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from vllm_series.files import mebibytes
from vllm_series.workspace import Workspace


def say(message: str) -> None:
    """Print one line of prose to stderr."""
    print(message, file=sys.stderr, flush=True)


def emit(data: dict[str, Any], *, as_json: bool, text: str = "") -> None:
    """Print the result of a command: ``data`` as one JSON object, or ``text`` for a person."""
    if as_json:
        print(json.dumps(data, indent=2, sort_keys=False, default=str))
    elif text:
        print(text)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` (parameter ``as_json``) to a click command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)


def workspace(ctx: click.Context) -> Workspace:
    """Return the workspace that ``--root`` or the current folder names."""
    return Workspace.find(ctx.find_root().obj)


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a byte progress; yields ``advance(n_bytes)``.

    A bar on a terminal, elsewhere one plain line at the start and at each quarter (at most every second).
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, completed=done)
            yield lambda n: bar.advance(task, n)
        return
    say(f"{label} ({mebibytes(total)})" + (f", going on at {mebibytes(done)}" if done else ""))
    have, shown, last = done, done * 4 // max(total, 1), time.monotonic()

    def advance(n: int) -> None:
        nonlocal have, shown, last
        have += n
        quarter = have * 4 // max(total, 1)
        if quarter > shown and (time.monotonic() - last > 1 or have >= total):
            shown, last = quarter, time.monotonic()
            say(f"{label}: {quarter * 25} %")

    yield advance
