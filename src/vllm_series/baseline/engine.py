"""Runs test files one process each; what takes a process down is that test's result, and the rest goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from vllm_series.baseline.outcome import LEFT_OUT, NOT_RUN, FileRun, Node
from vllm_series.baseline.reportlog import outcomes, records
from vllm_series.baseline.workers import Job, Pool, Process, end_group

MAX_PROCESSES = 25  # of one file: a file in which every test takes the process down is not worth more
POLL_S = 0.1


@dataclass(frozen=True)
class Limits:
    """Seconds that one test and one whole file may take; ``grace_s`` more before a test's process is
    killed. Of a file with more than ``sample`` tests only that many run (0: all)."""

    test_s: float = 120.0
    file_s: float = 600.0
    grace_s: float = 30.0
    sample: int = 0


@dataclass
class _Attempt:
    """What one process of a file left behind."""

    tests: dict[str, Node] = field(default_factory=dict)
    collectors: dict[str, Node] = field(default_factory=dict)
    collected: list[str] | None = None
    left_out: list[str] = field(default_factory=list)
    running: str | None = None
    ended: bool = False
    cpu: float = 0.0


class FileRunner:
    """Runs one test file of a site to the end, over as many processes as it takes."""

    def __init__(self, pool: Pool, site: Path, scratch: Path, limits: Limits) -> None:
        self.pool, self.site, self.scratch, self.limits = pool, site, scratch, limits

    def run(self, name: str, only: Iterable[str] | None = None) -> FileRun:
        """Run ``name`` (posix path in the site), or only the given node ids of it."""
        place = self.scratch / name.replace("/", "+")
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(parents=True)
        result, started = FileRun(processes=0), time.monotonic()
        wanted = set(only) if only is not None else None
        if not (self.site / name).exists():
            return result
        if wanted is not None:
            (place / "only.txt").write_text("\n".join(sorted(wanted)), encoding="utf-8")
        deadline = started + self.limits.file_s
        order: list[str] = []
        left_out: list[str] = []
        over = False
        while result.processes < MAX_PROCESSES:
            result.processes += 1
            (place / "done.txt").write_text("\n".join(result.nodes), encoding="utf-8")
            attempt, death, over = self._attempt(name, place, result.processes, deadline, wanted is not None)
            result.cpu = round(result.cpu + attempt.cpu, 2)
            order = attempt.collected if attempt.collected is not None else order
            left_out = attempt.left_out or left_out
            result.nodes.update(attempt.tests)
            result.nodes.update(
                {k or name: v for k, v in attempt.collectors.items() if k not in attempt.tests}
            )
            if attempt.ended and death is None:
                break
            culprit = attempt.running or (name if attempt.collected is None else None)
            if culprit is not None and not (over and death is None):
                result.nodes[culprit] = death or Node("crash", "the process ended early")
            if over or culprit is None or culprit == name:
                break
        if over and not order and not result.nodes:
            result.nodes[name] = Node(
                NOT_RUN, "the limit of the file was reached before its tests were known"
            )
        for node in left_out:
            result.nodes[node] = Node(LEFT_OUT, f"not in the sample of {len(order) - len(left_out)} tests")
        for node in order:
            if node not in result.nodes and (wanted is None or node in wanted):
                result.nodes[node] = Node(NOT_RUN, "the limit of the file was reached")
        result.seconds = round(time.monotonic() - started, 2)
        shutil.rmtree(place / "tmp", ignore_errors=True)
        return result

    def _attempt(
        self, name: str, place: Path, number: int, deadline: float, only: bool
    ) -> tuple[_Attempt, Node | None, bool]:
        report, events = place / f"report.{number}.jsonl", place / f"events.{number}.jsonl"
        env = {
            "SERIES_EVENTS": str(events),
            "SERIES_DONE": str(place / "done.txt"),
            "TMPDIR": str(place / "tmp"),
            **({"SERIES_ONLY": str(place / "only.txt")} if only else {}),
            **({"SERIES_SAMPLE": str(self.limits.sample)} if self.limits.sample else {}),
        }
        argv = [
            *("-p", "series_probe", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short"),
            *("-c", str(self._config()), "--rootdir", str(self.site), f"--report-log={report}"),
            *(
                f"--basetemp={place / 'tmp' / 'pytest'}",
                f"--timeout={self.limits.test_s:g}",
                "--timeout-method=signal",
            ),
            str(self.site / name),
        ]
        cwd = self.site / "tests" if (self.site / "tests").is_dir() else self.site
        process = self.pool.start(Job(argv, cwd, place / f"log.{number}.txt", env))
        death, over = self._watch(process, events, deadline)
        end_group(process.pid)  # what the tests left running
        attempt = _Attempt(cpu=process.cpu)
        attempt.tests, attempt.collectors = outcomes(records(report), self.site)
        for event in records(events):
            kind, value = event.get("e"), event.get("n")
            if kind == "collected" and isinstance(value, list):
                attempt.collected = [str(one) for one in value]
            elif kind == "left_out" and isinstance(value, list):
                attempt.left_out = [str(one) for one in value]
            elif kind == "start":
                attempt.running = str(value)
            elif kind == "finish":
                attempt.running = None
            elif kind == "end":
                attempt.ended = True
        if attempt.running is not None:
            attempt.tests.pop(attempt.running, None)  # half told: setup only
        return attempt, death, over

    def _config(self) -> Path:
        """Upstream's pytest settings (markers); the site's own file."""
        for name in ("pyproject.toml", "pytest.ini"):
            if (self.site / name).is_file():
                return self.site / name
        return Path(os.devnull)

    def _watch(self, process: Process, events: Path, deadline: float) -> tuple[Node | None, bool]:
        """Wait for the end. Returns ``(how it died or None, was it the file's limit)``."""
        hard = (
            self.limits.test_s + self.limits.grace_s
        )  # pytest-timeout comes first, unless C code holds the interpreter
        began, seen, offset, current = time.monotonic(), time.monotonic(), 0, 0
        while True:
            status = process.wait(POLL_S if time.monotonic() - began < 5 else 5 * POLL_S)
            if status is not None:
                return _death(status), False
            now = time.monotonic()
            size = events.stat().st_size if events.exists() else 0
            if size != offset:
                offset, seen, current = size, now, current + 1
            if now - seen > hard + (0 if current else 60):  # importing the file may take longer than a test
                self._kill(process)
                return Node(
                    "timeout", f"no answer after {self.limits.test_s:g} s", round(now - seen, 1)
                ), False
            if now > deadline:
                self._kill(process)
                return None, True

    @staticmethod
    def _kill(process: Process) -> None:
        """Abort, so that faulthandler writes into the log where it hung, then kill."""
        end_group(process.pid, signal.SIGABRT)
        if process.wait(5) is None:
            end_group(process.pid)
            process.wait(30)


def _death(status: int) -> Node | None:
    """Turn a wait status into an outcome; None if pytest ended by itself."""
    if status < 0:
        number = -status
        if status == -1:
            return Node("crash", "the test server died")
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
    else:
        code = os.WEXITSTATUS(status)
        return None if code in (0, 1, 2, 5) else Node("crash", f"the process ended with exit code {code}")
    if number == signal.SIGKILL:
        return Node("killed", "SIGKILL from outside: most likely out of memory")
    return Node("crash", signal.Signals(number).name)


def run_files(
    runner: FileRunner,
    files: Iterable[str],
    jobs: int,
    told: Callable[[str, FileRun], None] = lambda name, run: None,
    only: Mapping[str, Iterable[str]] | None = None,
    until: float | None = None,
) -> dict[str, FileRun]:
    """Run many files, ``jobs`` at a time, started in the given order; ``told`` is called as each ends.

    After ``until`` (of ``time.monotonic``) no further file is started: those are not in the result.
    """
    names = list(dict.fromkeys(files))
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as threads:

        def one(name: str) -> FileRun | None:
            if until is not None and time.monotonic() >= until:
                return None
            done = runner.run(name, only.get(name) if only is not None else None)
            told(name, done)
            return done

        pairs = zip(names, threads.map(one, names), strict=True)
        return {name: done for name, done in pairs if done is not None}
