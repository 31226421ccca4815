"""Runs one step of the GPU suite and judges what came out."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from catalog import ROOT, TESTS, Machine, Step, commit, unsupported

OK, FAILED, UNSUPPORTED, LEFT_OUT = "ok", "FAILED", "unsupported", "left out"


@dataclass
class Row:
    """What became of one step."""

    case: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


def run_step(step: Step, machine: Machine, out: Path, log: Path, python: str = sys.executable) -> Row:
    """Run one step; its output goes to ``log``, the end of it to the terminal."""
    row = Row(f"{step.suite} {step.name}", UNSUPPORTED, unsupported(step, machine))
    if row.reason:
        return row
    if step.kernels and machine.kernels:
        return Row(row.case, FAILED, machine.kernels)
    with tempfile.TemporaryDirectory() as scratch:
        place, report = ROOT, Path(scratch) / "junit.xml"
        if step.tests:
            place = stage(Path(scratch))
            options = ["-q", "-ra", "-p", "no:cacheprovider", f"--junitxml={report}"]
            command = [python, "-m", "pytest", *options, *(f"tests/dsa/{name}" for name in step.tests)]
        else:
            filled = step.command.format(out=out, line=machine.line, card=machine.card, commit=commit(ROOT))
            command = [python, *shlex.split(filled)]
        print(f"\n== {row.case}: {shlex.join(command)}", flush=True)
        start = time.monotonic()
        code = _stream(command, place, log, max(60.0, 3 * step.seconds))
        row.seconds = round(time.monotonic() - start, 1)
        row.state = OK if code == 0 else FAILED
        if code:
            row.reason = "stopped after three times its estimate" if code == -1 else f"exit code {code}"
            row.reason += f", see {log}"
        if step.tests:
            _judge(row, report, step.tests)
    return row


def stage(folder: Path) -> Path:
    """Lay the overlay's tests out as the package ``tests.dsa``, as in a patched tree, with no vLLM beside."""
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    shutil.copytree(ROOT / TESTS, folder / "tests" / "dsa", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _stream(command: list[str], place: Path, log: Path, limit: float) -> int:
    """Run a command with its children in a group of its own; -1: it was stopped after ``limit`` seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, cwd=place, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]), flush=True)
    return code


def _judge(row: Row, report: Path, files: tuple[str, ...]) -> None:
    """Count the outcomes; a file of which no test passed or failed did not run, whatever the exit code."""
    if not report.is_file():
        return
    counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
    idle = {Path(name).stem for name in files}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        if outcome != "skipped":
            idle -= set(str(case.get("classname")).split("."))
    row.counts = counts
    if row.state == OK and idle:
        row.state, row.reason = FAILED, f"all tests were skipped in {', '.join(sorted(idle))}"
