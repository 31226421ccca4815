"""Keeps a long run's results while it goes, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from vllm_series.baseline.fingerprint import differences
from vllm_series.baseline.outcome import FileRun, Run
from vllm_series.errors import CheckFailed
from vllm_series.ui import say

SAVE_S = 10.0  # at most so much finished work is lost when the tool is killed


class Progress:
    """The saved run of a mode while it grows. ``kept`` are the files that need not run again."""

    def __init__(self, run: Run, path: Path, *, resume: bool) -> None:
        self.run, self.path = run, path
        self.kept: dict[str, FileRun] = _usable(run, path) if resume else {}
        self._saved, self._lock = time.monotonic(), threading.Lock()
        run.files = dict(self.kept)

    def left(self, files: Iterable[str]) -> list[str]:
        """The files that have no result yet, in the given order."""
        return [name for name in dict.fromkeys(files) if name not in self.run.files]

    def add(self, name: str, result: FileRun) -> None:
        """Take in one file's result; now and then everything is written to disk."""
        with self._lock:
            self.run.files[name] = result
            if time.monotonic() - self._saved >= SAVE_S:
                self._write()

    def save(self) -> None:
        """Write the run with all that is known, what other selections ran on the same tree included."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self.run.save(self.path)
        self._saved = time.monotonic()

    def of(self, files: Collection[str]) -> Run:
        """The run reduced to ``files``, in their order; those that were not reached are not in it."""
        found = {name: self.run.files[name] for name in files if name in self.run.files}
        return replace(self.run, files=found)


def _usable(run: Run, path: Path) -> dict[str, FileRun]:
    """Results of an earlier run of the same tree, switches, machine, packages and settings."""
    if not path.is_file():
        return {}
    try:
        old = Run.load(path)
    except CheckFailed as error:
        say(f"{run.line} {run.mode}: {error}; starting anew")
        return {}
    other = differences(old.fingerprint, run.fingerprint)
    if old.tree != run.tree:
        other.append(f"tree: {old.tree[:12]} / {run.tree[:12]}")
    if old.env != run.env:
        other.append("switches")
    if other:
        say(f"{run.line} {run.mode}: the saved run differs ({'; '.join(other)}), starting anew")
        return {}
    say(f"{run.line} {run.mode}: going on after {len(old.files)} files of {old.date}")
    return old.files


class Shares:
    """Shares a time out among runs: each gets its part of what the ones before it left."""

    def __init__(self, minutes: float | None, lines: int) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._lines, self._runs = lines, 0

    def modes(self, number: int) -> None:
        """Begin a line with so many runs; the lines after it are taken to have as many."""
        self._runs, self._lines = number * self._lines, self._lines - 1

    def next(self) -> float | None:
        """Seconds of the next run; None without a limit."""
        if self._end is None:
            return None
        share = max(0.0, self._end - time.monotonic()) / max(1, self._runs)
        self._runs -= 1
        return share
