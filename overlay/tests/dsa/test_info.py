# SPDX-License-Identifier: Apache-2.0
"""vllm.dsa.info(): shape, states, reasons, and that nothing makes it raise."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.dsa
from vllm.dsa import counters, features, provenance, report
from vllm.dsa.__main__ import main
from vllm.dsa.features import Feature, State, Status

ORDER = ["overlap", "litetopk", "litedsa", "fused_q", "logits_slab"]


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch):
    """Lay a feature into the registry in place of overlap, whatever this release ships."""

    def ship(probe) -> Feature:
        feature = Feature("overlap", "overlap", ("VLLM_INDEXER_OVERLAP",), probe)
        original = features.load
        monkeypatch.setattr(
            features, "load", lambda known: feature if known.name == "overlap" else original(known)
        )
        return feature

    return ship


def test_shape():
    data = vllm.dsa.info()
    assert json.loads(json.dumps(data)) == data
    assert data["schema"] == 1 and data["enabled"] is True
    assert list(data["features"]) == ORDER
    for row in data["features"].values():
        assert set(row) == {"title", "state", "reason", "switches", "counters"}
        assert row["state"] in {"active", "off", "declined", "unavailable"}
        assert row["reason"] or row["state"] == "active"
        assert row["switches"]


def test_a_feature_without_its_subpackage_is_not_claimed():
    folder = Path(features.__file__).parent
    for name, row in vllm.dsa.info()["features"].items():
        if not (folder / name / "feature.py").exists():
            assert (row["state"], row["reason"]) == ("unavailable", "not in this release")


def test_a_shipped_feature_that_does_not_load_says_so(monkeypatch: pytest.MonkeyPatch):
    module = "vllm.dsa.overlap.feature"

    def fail(name):
        assert name == module
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(features.importlib, "import_module", fail)
    status = features.status(features.KNOWN[0])
    assert status == Status(State.UNAVAILABLE, "cannot be loaded: No module named 'cutlass'")


def test_probe_decides(shipped):
    shipped(lambda config: Status(State.DECLINED, f"config is {config}"))
    assert report.info("mine")["features"]["overlap"]["reason"] == "config is mine"
    assert features.status(features.KNOWN[0]).state is State.DECLINED


def test_a_model_without_an_indexer_has_nothing_to_accelerate(shipped):
    shipped(lambda config: Status(State.ACTIVE))

    def config(**text_config):
        return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text_config)))

    overlap = features.KNOWN[0]
    assert features.status(overlap, config(index_topk=2048)) == Status(State.ACTIVE)
    assert features.status(overlap, config(hidden_size=64)) == Status(State.OFF, "this model has no indexer")
    assert features.status(overlap, SimpleNamespace(model_config=None)) == Status(State.ACTIVE)


def test_probe_that_raises_is_a_state_not_a_crash(shipped):
    def probe(config):
        raise RuntimeError("no card")

    shipped(probe)
    row = vllm.dsa.info()["features"]["overlap"]
    assert (row["state"], row["reason"]) == ("unavailable", "probe failed: RuntimeError: no card")


def test_wrong_value_of_a_switch_is_a_state_not_a_crash(shipped, monkeypatch: pytest.MonkeyPatch):
    shipped(lambda config: Status(State.ACTIVE))
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "fast")
    row = vllm.dsa.info()["features"]["overlap"]
    assert row["state"] == "unavailable"
    assert "Invalid value 'fast' for VLLM_INDEXER_OVERLAP" in row["reason"]
    assert "Invalid value" in row["switches"]["VLLM_INDEXER_OVERLAP"]["error"]
    monkeypatch.setenv("VLLM_DSA", "5")
    assert vllm.dsa.info()["enabled"] is None


def test_master_switch(shipped, monkeypatch: pytest.MonkeyPatch):
    shipped(lambda config: Status(State.ACTIVE))
    monkeypatch.setenv("VLLM_DSA", "0")
    data = vllm.dsa.info()
    assert data["enabled"] is False
    assert (data["features"]["overlap"]["state"], data["features"]["overlap"]["reason"]) == (
        "off",
        "VLLM_DSA=0",
    )
    assert not [row for row in data["features"].values() if row["state"] == "active"]


def test_run_time_report_wins_over_the_probe(shipped):
    shipped(lambda config: Status(State.ACTIVE, "where it applies"))
    features.report_declined("overlap", "piecewise capture")
    row = vllm.dsa.info()["features"]["overlap"]
    assert (row["state"], row["reason"]) == ("declined", "piecewise capture")
    features.report_active("overlap", "wk")
    features.report_declined("overlap", "too many tokens")
    row = vllm.dsa.info()["features"]["overlap"]
    assert (row["state"], row["reason"]) == ("active", "wk")
    assert row["counters"] == [
        {"outcome": "active", "reason": "wk", "count": 1},
        {"outcome": "declined", "reason": "piecewise capture", "count": 1},
        {"outcome": "declined", "reason": "too many tokens", "count": 1},
    ]


def test_provenance_of_a_wheel(tmp_path: Path):
    record = {
        "kind": "wheel",
        "line": "0.33.0",
        "version": "0.33.0+dsa.7",
        "series_version": 7,
        "upstream_commit": "4ba787ec9",
    }
    (tmp_path / provenance.RECORD).write_text(json.dumps(record))
    build = provenance.read(tmp_path)
    assert (build.line, build.version, build.series_version) == ("0.33.0", "0.33.0+dsa.7", "7")
    assert build.upstream_commit == "4ba787ec9" and build.record == record


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_damaged_record_is_reported_not_raised(text: str, tmp_path: Path):
    (tmp_path / provenance.RECORD).write_text(text)
    build = provenance.read(tmp_path)
    assert build.upstream_commit == "unknown"
    assert provenance.RECORD in build.record["error"]


@pytest.mark.parametrize(
    ("version", "line", "series"),
    [("0.33.0+dsa.2", "0.33.0", "2"), ("0.33.0", "0.33.0", "unknown"), ("dev", "unknown", "unknown")],
)
def test_without_a_record_vllms_version_tells_the_line(
    version: str, line: str, series: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vllm.version.__version__", version)
    build = provenance.read(tmp_path)
    assert (build.line, build.series_version, build.version) == (line, series, version)
    assert build.record == {"kind": "source tree"}


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    done = subprocess.run(
        [sys.executable, "-m", "vllm.dsa", "--json"], capture_output=True, text=True, check=True
    )
    data = json.loads(done.stdout)
    assert list(data["features"]) == ORDER
    monkeypatch.setattr(sys, "argv", ["vllm.dsa"])
    main()
    text = capsys.readouterr().out
    for name, row in data["features"].items():
        assert f"  {name:<12} {row['state']}" in text
    assert "VLLM_INDEXER_OVERLAP = auto" in text


def test_readable_shows_counters_and_errors(shipped, monkeypatch: pytest.MonkeyPatch):
    shipped(lambda config: Status(State.ACTIVE))
    counters.count("overlap", "declined", "because", 3)
    monkeypatch.setenv("VLLM_LITEDSA", "x")
    text = report.readable(vllm.dsa.info())
    assert "declined (because): 3" in text
    assert "VLLM_LITEDSA = Invalid value 'x' for VLLM_LITEDSA" in text
