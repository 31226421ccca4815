"""bench/overlap_kernels.py, as far as it runs without an engine."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("overlap_kernels")


def traced(*streams: list[str]) -> dict[str, Any]:
    shape = {"heads": 16, "index_heads": 64, "layers": 3}
    return {"traces": {"decode": list(streams)}, "switches": {}} | shape


def test_kernels_are_compared_stream_by_stream(
    kernels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "upstream": traced(["a", "b", "void c(int)"], ["copy"]),
        "disabled": traced(["a", "b", "void c(int)"], ["copy"]),
        "full": traced(["a", "void c(int)"], ["b"], ["copy"]),
        "turned": traced(["b", "a", "void c(int)"], ["copy"]),
    }
    files = {name: str(tmp_path / f"{name}.json") for name in found}
    for name, trace in found.items():
        Path(files[name]).write_text(json.dumps(trace))
    out = tmp_path / "rows.json"
    command = ["--compare", files["upstream"], files["disabled"], files["full"], "--out", str(out)]
    assert kernels.main(command) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"].split()[0], row["ours"]) for row in rows] == [
        ("mode=disabled", 1.0),
        ("mode=full", 0.0),
    ]
    assert rows[0]["sequence"] == [["a", "b", "c(int)"], ["copy"]]
    assert rows[1]["kernels"] == {"upstream": [3, 1], "ours": [2, 1, 1]}
    assert kernels.main(["--compare", files["upstream"], files["turned"]]) == 1
    assert kernels.main(["--compare", files["disabled"], files["upstream"]]) == 0
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps(traced()))
    assert kernels.main(["--compare", str(empty), str(empty)]) == 1
    with pytest.raises(SystemExit):
        kernels.main(["--compare", files["upstream"]])
    assert "upstream's file" in capsys.readouterr().err


def test_the_stored_traces_have_upstreams_kernels_where_the_overlap_is_switched_off() -> None:
    """An eager prefill and decode steps in FULL graphs of an engine on an H200."""
    file = BENCH / "results" / "overlap" / "0.33.0-h200.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if " phase=kernels " in row["case"]]
    found = {(row["case"].split()[0], row["case"].split()[-1]): row for row in rows}
    for case in ("prefill", "decode"):
        disabled, full = found["mode=disabled", case], found["mode=full", case]
        assert disabled["switches"]["VLLM_DISABLE_INDEXER_STREAM"] == "1"
        assert (
            disabled["ours"] == 1.0 and len(disabled["sequence"]) == 1 and len(disabled["sequence"][0]) > 80
        )
        assert full["ours"] == 0.0 and len(full["sequence"]) == 2  # the control


def test_a_trace_is_split_by_stream(kernels: ModuleType) -> None:
    def event(name: str, at: int, stream: int) -> dict[str, Any]:
        return {"name": name, "ts": at, "args": {"stream": stream}}

    events = [event("b", 2, 7), event("x", 1, 9), event("a", 0, 7)]
    assert kernels.by_stream(events) == [["a", "b"], ["x"]]
