"""bench/results_file.py: rows are added or take the place of older ones, and nothing else changes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    return importlib.import_module("results_file")


def test_rows_of_the_same_case_and_metric_are_replaced_or_kept(results: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.json"
    first = [{"case": "a", "metric": "time", "ours": 1}, {"case": "a", "metric": "peak", "ours": 2}]
    results.add(file, "litetopk", "0.33.0", first, replace=True)
    data = json.loads(file.read_text())
    assert (data["feature"], data["line"], data["card"], data["schema"]) == ("litetopk", "0.33.0", "h200", 1)
    file.write_text(json.dumps(data | {"notes": "kept"}))
    again = {"case": "a", "metric": "time", "ours": 3}
    results.add(file, "another", "0.28.0", [again], replace=True)
    data = json.loads(file.read_text())
    assert data["rows"] == [first[1], again]
    assert (data["feature"], data["line"], data["notes"]) == ("litetopk", "0.33.0", "kept")
    results.add(file, "litetopk", "0.33.0", [again], replace=False)
    assert json.loads(file.read_text())["rows"] == [first[1], again, again]
