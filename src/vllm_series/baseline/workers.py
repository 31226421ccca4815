"""Processes that run pytest jobs: forked from one that has vLLM imported, or fresh ones."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_series.errors import CheckFailed

INSIDE = Path(__file__).parent / "inside"
START_S = 300  # importing vLLM on a busy machine


@dataclass(frozen=True)
class Job:
    """One pytest process: its arguments, folder, log file and extra environment."""

    argv: list[str]
    cwd: Path
    log: Path
    env: dict[str, str]

    def as_dict(self, name: str) -> dict[str, Any]:
        return {"id": name, "argv": self.argv, "cwd": str(self.cwd), "log": str(self.log), "env": self.env}


class Process(Protocol):
    """A running job."""

    pid: int
    cpu: float  # seconds of processor time, known when it ended

    def wait(self, seconds: float) -> int | None:
        """Return the wait status, or None if it still runs after ``seconds``."""


class Pool(Protocol):
    """Starts jobs."""

    def start(self, job: Job) -> Process: ...

    def close(self) -> None: ...


def end_group(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal the process group of a job: its own process and what it spawned."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


_Answers = queue.Queue[tuple[int, float]]


class _Forked:
    def __init__(self, pid: int, done: _Answers) -> None:
        self.pid, self.cpu, self._done = pid, 0.0, done

    def wait(self, seconds: float) -> int | None:
        try:
            status, self.cpu = self._done.get(timeout=seconds)
        except queue.Empty:
            return None
        return status


class ForkPool:
    """Jobs forked from a server that has imported vLLM once (``inside/server.py``)."""

    def __init__(self, python: Path, site: Path, env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as handle:
            self._server = subprocess.Popen(
                [str(python), "-u", str(INSIDE / "server.py"), str(site)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                env=dict(env),
                cwd="/",
                start_new_session=True,
            )
        self._answers: dict[str, _Answers] = {}
        self._lock = threading.Lock()
        self._count = 0
        self.failed: dict[str, str] = {}
        #: False if forked children cannot use the GPU (asked only with ``SERIES_GPU=1``).
        self.forks = True
        ready: _Answers = queue.Queue()
        self._answers["ready"] = ready
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            if ready.get(timeout=START_S)[0] != 0:
                raise queue.Empty
        except queue.Empty:
            self.close()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise CheckFailed(
                f"the test server did not start:\n{tail}", fix=f"read {log}, or use --isolation fresh"
            ) from None

    def _queue(self, name: str) -> _Answers:
        with self._lock:
            return self._answers.setdefault(name, queue.Queue())

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            said = json.loads(line)
            if said["id"] == "ready":
                self.failed, self.forks = said["failed"], said["forks"]
                self._queue("ready").put((0, 0.0))
            elif "pid" in said:
                self._queue(f"{said['id']}.pid").put((said["pid"], 0.0))
            else:
                self._queue(said["id"]).put((said["status"], said["cpu"]))
        with self._lock:  # the server is gone: nobody waits for ever
            waiting = list(self._answers.values())
        for one in waiting:
            one.put((-1, 0.0))

    def start(self, job: Job) -> Process:
        with self._lock:
            self._count += 1
            name = str(self._count)
        done, pid = self._queue(name), self._queue(f"{name}.pid")
        assert self._server.stdin is not None
        try:
            self._server.stdin.write((json.dumps(job.as_dict(name)) + "\n").encode())
            self._server.stdin.flush()
            number, _ = pid.get(timeout=60)
        except (BrokenPipeError, queue.Empty) as error:
            raise CheckFailed("the test server died", fix=f"read {self._log}") from error
        if number < 0:
            raise CheckFailed("the test server died", fix=f"read {self._log}")
        return _Forked(number, done)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._server.stdin:
                self._server.stdin.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            end_group(self._server.pid)
            self._server.wait()


class _Fresh:
    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child, self.pid, self.cpu = child, child.pid, 0.0

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while True:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._child.returncode = os.waitstatus_to_exitcode(
                    status
                )  # so that Popen does not wait again
                self.cpu = round(used.ru_utime + used.ru_stime, 2)
                return status
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)


class FreshPool:
    """A new interpreter for every job: what upstream's CI does, 10 to 20 seconds more for each file."""

    def __init__(self, python: Path, site: Path, env: Mapping[str, str]) -> None:
        self._python, self._site, self._env = python, site, dict(env)
        self.failed: dict[str, str] = {}

    def start(self, job: Job) -> Process:
        plan = job.log.with_suffix(".job.json")
        plan.write_text(json.dumps(job.as_dict("once")))
        child = subprocess.Popen(
            [str(self._python), "-u", str(INSIDE / "server.py"), str(self._site), "--once", str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=job.log.open("ab"),
            env={**self._env, **job.env},
            cwd=job.cwd,
            start_new_session=True,
        )
        return _Fresh(child)

    def close(self) -> None:
        return None
