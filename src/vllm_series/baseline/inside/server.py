# ruff: noqa: PTH110, PTH118, PTH119, PTH120, PTH100, PTH123, PTH207
"""Runs pytest jobs in forked children of one process that has vLLM imported, or one job in this process.

    python server.py SITE            jobs as JSON lines on stdin, answers as JSON lines on stdout
    python server.py SITE --once JOB one job, no preloading, no fork

A job is ``{"id", "argv", "cwd", "log", "env"}``; the answers are ``{"id", "pid"}`` when the child runs and
``{"id", "status", "cpu"}`` (a wait status, seconds) when it is gone. Importing vLLM takes 10 to 20 seconds;
forking saves them for every test file while each file still has a process of its own, since state leaks
between upstream's files.
"""

import ast
import contextlib
import faulthandler
import gc
import glob
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any


def preload(site: str) -> dict[str, str]:
    """Import what upstream's root conftest imports, and the op schemas of the compiled parts."""
    failed: dict[str, str] = {}
    conftest = os.path.join(site, "tests", "conftest.py")
    if os.path.exists(conftest):
        with open(conftest, encoding="utf-8") as handle:
            tree = ast.parse(handle.read())
        for node in tree.body:
            names: list[tuple[str, list[str]]] = []
            if isinstance(node, ast.Import):
                names = [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [(node.module, [alias.name for alias in node.names])]
            for module, attributes in names:
                if module.split(".")[0] == "tests":
                    continue  # pytest rewrites the asserts of test modules; leave them to it
                try:
                    loaded = importlib.import_module(module)
                    for attribute in attributes:
                        getattr(loaded, attribute, None)
                except Exception as error:
                    failed[module] = f"{type(error).__name__}: {error}"
    failed.update(load_ops(site))
    # No GPU is there, so nothing can be re-initialised: without this a test would fail with "Cannot
    # re-initialize CUDA in forked subprocess" instead of saying that there is no GPU.
    torch: Any = sys.modules.get("torch")
    if torch is not None and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        torch._C._cuda_isInBadFork = lambda: False
        torch.cuda._is_in_bad_fork = lambda: False
    return failed


def cuda_forks() -> bool:
    """Whether a forked child can use the GPU: not if importing touched the driver in this process."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return False
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def load_ops(site: str) -> dict[str, str]:
    """Register the schemas of vLLM's compiled operators (no kernel can run without a GPU)."""
    failed: dict[str, str] = {}
    if os.environ.get("SERIES_LOAD_OPS") != "1":
        return failed
    import torch  # type: ignore[import-not-found, unused-ignore]

    for library in sorted(glob.glob(os.path.join(site, "vllm", "*.abi3.so"))):
        try:
            torch.ops.load_library(library)
        except Exception as error:
            failed[os.path.basename(library)] = f"{type(error).__name__}: {str(error)[:200]}"
    return failed


def run_job(job: dict[str, Any], site: str) -> int:
    """Become the job: redirect output, set the environment, run pytest, leave with its exit code."""
    with contextlib.suppress(OSError):  # already a leader when started with --once
        os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    os.environ.update(job["env"])
    # When memory runs out the kernel shall end the test, not the machine.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as handle:
        handle.write("800")
    os.chdir(job["cwd"])
    for folder in (os.path.dirname(os.path.abspath(__file__)), site):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    # A forked child may spawn interpreters: they find the parent's main module by this name.
    sys.argv = ["pytest", *job["argv"]]
    import pytest

    return int(pytest.main(job["argv"]))


def finish(code: int) -> None:
    """Leave at once: a test's stray threads and exit handlers must not hold the result back."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def answer(out: int, **what: object) -> None:
    os.write(out, (json.dumps(what) + "\n").encode())


def serve(site: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what imports print must not mix with the answers
    started = time.monotonic()
    failed = preload(site)
    forks = cuda_forks() if os.environ.get("SERIES_GPU") == "1" else True
    # Upstream's fixtures unfreeze and collect garbage after every test: 0.35 s each for walking what was
    # imported here. What lies frozen before the fork stays so; what the tests make is collected as ever.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    answer(out, id="ready", seconds=round(time.monotonic() - started, 1), failed=failed, forks=forks)
    running: dict[int, str] = {}
    buffer, open_stdin = b"", True
    while open_stdin or running:
        ready, _, _ = select.select([0] if open_stdin else [], [], [], 0.1 if running else None)
        if ready:
            chunk = os.read(0, 65536)
            if not chunk:  # the runner is gone or done: nobody reads what still runs
                open_stdin = False
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.close(out)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = 70
                try:
                    code = run_job(job, site)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finish(code)
            running[pid] = job["id"]
            answer(out, id=job["id"], pid=pid)
        for pid in list(running):
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                cpu = used.ru_utime + used.ru_stime
                answer(out, id=running.pop(pid), status=status, cpu=round(cpu, 2))


def main() -> None:
    site = sys.argv[1]
    if sys.argv[2:3] == ["--once"]:
        with open(sys.argv[3], encoding="utf-8") as handle:
            job = json.load(handle)
        sys.path.insert(0, site)
        load_ops(site)
        finish(run_job(job, site))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends us
    sys.path.insert(0, site)
    serve(site)


if __name__ == "__main__":
    main()
