# SPDX-License-Identifier: Apache-2.0
"""The outcomes of all processes on /metrics: summed, of this server only, nothing where nothing counts."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from vllm.dsa import counters, metrics

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name=["v32", "other"], model="path"),
    parallel_config=SimpleNamespace(data_parallel_index=1),
)
#: A process with vllm.dsa alone: without importing vllm itself, and with it torch, it starts in no time.
ALONE = """
import os, sys, types
package = types.ModuleType("vllm")
package.__path__ = [sys.argv[1]]
sys.modules["vllm"] = package
"""
#: A worker: counts, writes at once, and lives until its stdin closes.
WORKER = """
from vllm.dsa import counters, metrics
counters.count("overlap", "active", n=int(sys.argv[2]))
counters.count("litetopk", "declined", 'a "quoted" reason')
assert metrics.write(), "nobody collects"
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process as a server, under a temporary folder of its own."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metrics.os, "getppid", os.getpid)  # the engine core's parent is the server
    monkeypatch.setattr(metrics, "start", lambda: None)  # the tests write themselves
    return metrics.folder(os.getpid())


def serve(registry: CollectorRegistry, **model: int) -> None:
    """Start a server with ``/metrics`` on that registry, of a model with an indexer unless said otherwise."""
    app = FastAPI()
    app.state.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**(model or {"index_topk": 2048})))
    )
    metrics.attach(registry, app)
    with TestClient(app):
        pass


def alone(code: str) -> list[str]:
    return [sys.executable, "-c", ALONE + code, str(Path(metrics.__file__).parents[1])]


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [row for row in text.splitlines() if not row.startswith("#")]


def test_workers_are_summed_and_the_dead_left_out(place: Path) -> None:
    registry = CollectorRegistry()
    serve(registry)
    serve(registry)  # an application that is built twice
    metrics.announce(CONFIG)
    assert generate_latest(registry) == b"", "nothing was counted"
    workers = []
    for count in ("3", "4"):
        command = [*alone(WORKER), count]
        workers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
        )
    for worker in workers:
        assert worker.stdout.readline() == b"ready\n"
    (place / "not-a-number.json").write_text("{}")
    (place / f"{os.getpid()}.json").write_text("{")
    labels = 'engine="1",feature="{}",model_name="v32",outcome="{}",reason="{}"'
    assert sorted(lines(registry)) == sorted(
        [
            metrics.NAME + "_total{" + labels.format("overlap", "active", "") + "} 7.0",
            metrics.NAME
            + "_total{"
            + labels.format("litetopk", "declined", 'a \\"quoted\\" reason')
            + "} 2.0",
        ]
    )
    workers[0].communicate()
    assert any(row.endswith("} 4.0") for row in lines(registry))
    workers[1].communicate()
    assert lines(registry) == []


#: A worker that leaves the writing to the thread that its first count starts; waits as long as it takes.
BY_ITSELF = """
import json, pathlib, time
from vllm.dsa import counters, metrics
metrics.PERIOD_S = 0.01
counters.count("overlap", "active")
path = pathlib.Path(json.loads(os.environ[metrics.VARIABLE])["folder"]) / f"{os.getpid()}.json"
while not path.is_file():
    time.sleep(0.05)
print(json.loads(path.read_text())["rows"][0]["count"], flush=True)
os._exit(0)
"""


def test_the_first_count_starts_the_writing(place: Path) -> None:
    serve(CollectorRegistry())
    metrics.announce(CONFIG)
    done = subprocess.run(alone(BY_ITSELF), env=dict(os.environ), capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr[-2000:]


def test_a_model_without_an_indexer_leaves_no_folder(place: Path) -> None:
    registry = CollectorRegistry()
    serve(registry, hidden_size=1)
    assert not place.exists() and generate_latest(registry) == b""


def test_without_a_server_nothing_is_written(place: Path) -> None:
    metrics.announce(CONFIG)
    counters.count("overlap", "active")
    assert metrics.write() == "" and not place.exists()


def test_only_changes_are_written(place: Path) -> None:
    serve(CollectorRegistry())
    metrics.announce(CONFIG)
    counters.count("overlap", "active")
    text = metrics.write()
    (place / f"{os.getpid()}.json").unlink()
    assert metrics.write(text) == text and not list(place.iterdir())
    counters.count("overlap", "active")
    assert json.loads(metrics.write(text))["rows"][0]["count"] == 2
    assert [path.name for path in place.iterdir()] == [f"{os.getpid()}.json"]


def test_several_api_servers_share_one_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    one, other = CollectorRegistry(), CollectorRegistry()
    for registry in (one, other):
        serve(registry)
    metrics.announce(CONFIG)
    counters.count("overlap", "active")
    metrics.write()
    assert len(lines(one)) == 1 and lines(one) == lines(other)


def test_a_folder_that_cannot_be_made_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog_vllm
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    registry = CollectorRegistry()
    serve(registry)
    assert generate_latest(registry) == b""
    assert "no outcomes on /metrics" in caplog_vllm.text


#: Upstream's own application code with the hook, first with VLLM_DSA=0, then with 1.
SERVED = """
import os, sys
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.metrics import attach_router

def page():
    app = FastAPI()
    attach_router(app)
    return app

page()
print("RESULT off", "vllm.dsa" in sys.modules)
os.environ["VLLM_DSA"] = "1"
app = page()
print("RESULT before", [name for name in os.listdir(os.environ["TMPDIR"]) if "dsa" in name])
from vllm.dsa import counters, metrics
os.getppid = os.getpid
metrics.announce(None)
with TestClient(app) as client:
    counters.count("fused_q", "active")
    metrics.write()
    text = client.get("/metrics").text
print("RESULT on", "vllm:dsa_feature_outcomes_total{" in text)
"""


def test_upstreams_metrics_page(tmp_path: Path) -> None:
    env = {**os.environ, "VLLM_DSA": "0", "TMPDIR": str(tmp_path)}
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    done = subprocess.run([sys.executable, "-c", SERVED], env=env, capture_output=True, text=True)
    said = [row for row in done.stdout.splitlines() if row.startswith("RESULT")]
    assert said == ["RESULT off False", "RESULT before []", "RESULT on True"], done.stderr[-2000:]
    assert list(tmp_path.glob("vllm-dsa-*")) == [], "the server removes its folder"


def test_without_a_temporary_folder_everything_else_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog_vllm
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    metrics.announce(CONFIG)
    assert metrics.VARIABLE in os.environ
    monkeypatch.setattr(metrics.tempfile, "gettempdir", none)
    registry = CollectorRegistry()
    serve(registry)
    metrics.announce(CONFIG)
    assert metrics.VARIABLE not in os.environ
    assert generate_latest(registry) == b""
    assert "No usable temporary directory" in caplog_vllm.text


def test_a_count_survives_a_thread_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(metrics.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metrics, "_writer", None)
    monkeypatch.setattr(metrics.threading.Thread, "start", refuse)
    metrics.announce(CONFIG)
    counters.count("overlap", "active")
    assert counters.snapshot("overlap")[0]["count"] == 1 and metrics._writer is None
