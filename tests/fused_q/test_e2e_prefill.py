"""bench/e2e_prefill.py, as far as it runs without an engine."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def e2e(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("e2e_prefill")


def test_settings(e2e: ModuleType) -> None:
    assert e2e.parse_set("A:VLLM_DSA=0") == ("A", {"VLLM_DSA": "0"})
    assert e2e.parse_set("B:X=1,Y=a=b") == ("B", {"X": "1", "Y": "a=b"})
    assert e2e.parse_set("A:") == ("A", {})
    for wrong in ("C:X=1", "A:X", "X=1"):
        with pytest.raises(argparse.ArgumentTypeError):
            e2e.parse_set(wrong)


def test_both_settings_are_needed(
    e2e: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["e2e_prefill.py", "--set", "A:X=1"])
    with pytest.raises(SystemExit) as stopped:
        e2e.main()
    assert stopped.value.code == 2 and "--set B:" in capsys.readouterr().err


def test_a_prompt_is_the_same_for_both_settings_and_differs_between_runs(e2e: ModuleType) -> None:
    assert e2e.prompt(50, 3) == e2e.prompt(50, 3) != e2e.prompt(50, 4)
    assert len(e2e.prompt(50, 3)["prompt_token_ids"]) == 50


def test_compare(e2e: ModuleType) -> None:
    a = [{"token": 7, "logprobs": {"7": -1.0, "8": -2.0}}]
    assert e2e.compare(a, a) == (True, 1.0, 0.0)
    other = [{"token": 8, "logprobs": {"8": -1.5, "9": -3.0}}]
    tokens, same, worst = e2e.compare(a, other)
    assert (tokens, same, worst) == (False, 0.0, 0.5)
    assert e2e.compare(a, [{"token": 7, "logprobs": {"1": -9.0}}]) == (True, 0.0, float("inf"))


def test_rows_are_appended(e2e: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "fused_q" / "0.33.0-h200.json"
    for case in ("e2e heads=16 index=64 S=4096", "e2e heads=8 index=32 S=4096"):
        e2e.results_file.add(file, "fused_q", "0.33.0", [{"case": case}], replace=False)
    doc = json.loads(file.read_text())
    assert (doc["feature"], doc["line"], len(doc["rows"])) == ("fused_q", "0.33.0", 2)


def test_the_model_has_the_layers_and_heads_asked_for(e2e: ModuleType) -> None:
    folder = e2e.e2e_model.write_config(8, 32, 5, {"index_topk_freq": 4})
    config = json.loads(Path(folder, "config.json").read_text())
    assert (config["num_attention_heads"], config["index_n_heads"], config["num_hidden_layers"]) == (8, 32, 5)
    assert config["first_k_dense_replace"] == 5 and config["index_topk_freq"] == 4
