# SPDX-License-Identifier: Apache-2.0
"""The counters of all processes of a server on vLLM's ``/metrics``: ``vllm:dsa_feature_outcomes_total``.

Features count in worker processes (`vllm.dsa.counters`); ``/metrics`` is served by the API server, and
upstream has no way for a worker's counters to get there. So each process that counts writes a small file,
once a second if something changed, into a folder of the server, which sums the files up when it is asked:

1. ``attach`` (API server, where ``/metrics`` is mounted) makes the folder when the server starts to serve a
   model with an indexer. Without it nothing is written, so an engine without a server leaves nothing behind.
2. ``announce`` (engine core, at start-up) works out the same folder and leaves it, with model name and engine
   index, in an environment variable that the workers inherit.
3. ``start`` (any process, at its first count) starts the thread that writes.

The folder is named after the API server's process, or lies in ``PROMETHEUS_MULTIPROC_DIR`` when several API
servers share one. It is on one machine: workers on other nodes, and those that Ray starts, are not seen.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from vllm.dsa import counters, features, log

#: Name as upstream names its own; prometheus_client appends ``_total``.
NAME = "vllm:dsa_feature_outcomes"
HELP = "Outcomes of the DSA features (used, declined and why), summed over the engine's worker processes."
LABELS = ("model_name", "engine", "feature", "outcome", "reason")
#: Not ``VLLM_...``: upstream reports unknown variables with that prefix.
VARIABLE = "_DSA_METRICS"
PERIOD_S = 1.0

_writer: threading.Thread | None = None


def folder(server: int) -> Path:
    """Return the folder of the server whose API process is ``server`` (a process id)."""
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if shared:
        return Path(shared) / "vllm-dsa"
    return Path(tempfile.gettempdir()) / f"vllm-dsa-{os.getuid()}-{server}"


def attach(registry: Any, app: Any) -> None:
    """Make ``registry``, the one that ``/metrics`` shows, also collect the features' outcomes.

    Called by upstream's ``attach_router`` of ``/metrics``, before the application knows its model. Never
    raises: without a folder nothing is shown.

    Args:
        registry: prometheus_client's.
        app: the FastAPI application.
    """
    try:
        place = folder(os.getpid())
    except OSError as error:  # no temporary folder
        log.warning_once("metrics", "vllm.dsa: no outcomes on /metrics: %s", error)
        return
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        if features.has_indexer(getattr(served.state, "vllm_config", None)):
            _make(place)
        async with inner(served) as state:
            yield state

    app.router.lifespan_context = lifespan
    with contextlib.suppress(ValueError):  # attached before
        registry.register(Collector(place))


def _make(place: Path) -> None:
    """Make the folder in which the engine's processes write, removed when this process ends."""
    shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
    try:
        if not shared:
            shutil.rmtree(place, ignore_errors=True)  # of a process that had our number
        place.mkdir(mode=0o700, exist_ok=shared)
    except OSError as error:
        log.warning_once("metrics", "vllm.dsa: no outcomes on /metrics: %s", error)
        return
    if not shared:
        atexit.register(shutil.rmtree, place, True)


def announce(config: Any) -> None:
    """Tell this process and its children where to write, and as which model and engine.

    Called in the engine core before it starts its workers. Without a temporary folder nothing is announced,
    so nothing is written.

    Args:
        config: the engine's VllmConfig.
    """
    model = getattr(config, "model_config", None)
    name = getattr(model, "served_model_name", None) or getattr(model, "model", "")
    parallel = getattr(config, "parallel_config", None)
    try:
        place = folder(os.getppid())
    except OSError:  # no temporary folder, as in a container that is read-only throughout
        os.environ.pop(VARIABLE, None)
        return
    about = {
        "folder": str(place),
        "model_name": name[0] if isinstance(name, (list, tuple)) else str(name),
        "engine": str(getattr(parallel, "data_parallel_index", 0)),
    }
    os.environ[VARIABLE] = json.dumps(about)


def start() -> None:
    """Start the thread that writes this process's counters, if the process belongs to an engine.

    Never raises: it is called in the middle of a forward pass.
    """
    global _writer
    if _writer is None and VARIABLE in os.environ:
        writer = threading.Thread(target=_write_for_ever, name="dsa-metrics", daemon=True)
        with contextlib.suppress(RuntimeError):  # at the limit of threads, or the interpreter is ending
            writer.start()
            _writer = writer


def write(last: str = "") -> str:
    """Write this process's counters if they are not ``last`` and somebody collects them; returns the text."""
    about = json.loads(os.environ[VARIABLE])
    place = Path(about["folder"])
    text = json.dumps({**about, "rows": counters.snapshot()})
    if text == last or not place.is_dir():
        return last
    target = place / f"{os.getpid()}.json"
    part = target.with_suffix(f".{threading.get_ident()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)
    return text


def _write_for_ever() -> None:
    last = ""
    stop = threading.Event()
    while not stop.wait(PERIOD_S):
        # The folder may go with the server, the disk may be full: counting goes on.
        with contextlib.suppress(OSError, ValueError):
            last = write(last)


class Collector:
    """Reads the files of all living processes; ``collect`` is prometheus_client's protocol."""

    #: By this upstream's ``unregister_vllm_metrics`` finds what is vLLM's.
    _name = NAME

    def __init__(self, place: Path) -> None:
        self.place = place

    def describe(self) -> list[Any]:
        """Name the metric without reading anything."""
        return [_family()]

    def collect(self) -> Iterator[Any]:
        """Yield the one metric, or nothing as long as no feature counted anything."""
        sums: dict[tuple[str, ...], int] = {}
        for path in self.place.glob("*.json"):
            try:
                os.kill(int(path.stem), 0)
                said = json.loads(path.read_text(encoding="utf-8"))
                for row in said["rows"]:
                    named = {**said, **row}
                    key = tuple(str(named[label]) for label in LABELS)
                    sums[key] = sums.get(key, 0) + int(row["count"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # of a process that ended, or no file of ours
        if sums:
            metric = _family()
            for key, total in sorted(sums.items()):
                metric.add_metric(list(key), total)
            yield metric


def _family() -> Any:
    from prometheus_client.core import CounterMetricFamily  # only where there is a server

    return CounterMetricFamily(NAME, HELP, labels=LABELS)


def _after_fork() -> None:
    global _writer
    _writer = None  # threads do not survive a fork


os.register_at_fork(after_in_child=_after_fork)
