"""Kills the tool, with all the git processes that it runs, right before a chosen change in the file system.

Unlike a kill after some seconds this depends neither on the machine's speed nor on its load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kill_at.c")


@dataclass(frozen=True)
class Run:
    """One run of a command. ``steps`` are its changes in the file system, as ``(what, path)``: all of them if
    it was not to be killed, else the one that it was killed before."""

    code: int
    steps: tuple[tuple[str, str], ...]
    said: str

    @property
    def killed(self) -> bool:
        return self.code < 0


class Killer:
    """Runs commands that die at a chosen step; ``folder`` takes the library that does it."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "kill_at.so"
        argv = ["g++", "-x", "c", "-std=gnu11", "-O1", "-shared", "-fPIC", str(SOURCE)]
        built = subprocess.run([*argv, "-o", str(self.library), "-ldl"], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr

    def run(self, argv: Sequence[str], at: int = 0, cwd: Path | None = None) -> Run:
        """Run ``argv``; it is killed before its step number ``at`` (from 1 on), or not at all with 0."""
        with tempfile.TemporaryDirectory() as tmp:
            count, log = Path(tmp) / "count", Path(tmp) / "log"
            count.write_bytes(bytes(4))
            env = {
                **os.environ, "LD_PRELOAD": str(self.library), "PYTHONDONTWRITEBYTECODE": "1",
                "KILL_AT": str(at), "KILL_COUNT": str(count), "KILL_LOG": str(log),
            }  # fmt: skip
            done = subprocess.run(
                list(argv), env=env, cwd=cwd, start_new_session=True, capture_output=True, text=True
            )
            rows = log.read_text(errors="replace").splitlines() if log.exists() else []
            steps = [tuple(row.split(" ", 2)[1:]) for row in rows]
            return Run(
                done.returncode, tuple((what, path) for what, path in steps), done.stdout + done.stderr
            )

    def series(self, root: Path, *args: str, at: int = 0) -> Run:
        return self.run([sys.executable, "-m", "vllm_series.cli", "--root", str(root), *args], at)
