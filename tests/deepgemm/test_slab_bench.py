"""The slab's benches in an engine, as far as they run without one, and what is said of the stored rows."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACTIVE = [{"feature": "logits_slab", "outcome": "active", "reason": "526 MiB", "count": 1}]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("logits_slab_engine")


def engine(did: list[dict[str, Any]], *values: float, token: int = 7) -> dict[str, Any]:
    return {"did": did, "answers": [{"token": token, "logprobs": {"7": value}} for value in values]}


@pytest.mark.parametrize("tokens", [1, 163840 - 1024, 163840, 262144, 524288])
def test_the_rotary_table_holds_every_position(bench: ModuleType, tokens: int) -> None:
    config = bench.e2e_model.rope(tokens)
    rows = config["rope_scaling"]["factor"] * config["rope_scaling"]["original_max_position_embeddings"]
    assert config["max_position_embeddings"] == rows >= max(tokens + 1024, 163840)
    assert (rows == 163840) == (tokens <= 163840 - 1024)


def test_the_differences_are_those_to_the_other_and_of_the_baseline_with_itself(bench: ModuleType) -> None:
    found = bench.judged(engine([], -1.0, -2.0, -2.25), engine(ACTIVE, -1.5, -2.0, -2.0))
    assert found == {
        "same_first_tokens": True,
        "largest_difference": 0.5,
        "largest_difference_of_baseline_with_itself": 0.25,
    }
    other = engine(ACTIVE, -1.0, -2.0, -2.0, token=8)
    assert bench.judged(engine([], -1.0, -2.0, -2.25), other)["same_first_tokens"] is False


def test_a_run_without_the_buffer_is_refused(bench: ModuleType) -> None:
    own, slab = engine([], -1.0, -2.0, -2.0), engine(ACTIVE, -1.0, -2.0, -2.0)
    declined = [*ACTIVE, ACTIVE[0] | {"outcome": "declined"}]
    for one, two in ((own, own), (slab, slab), (own, engine(declined, -1.0, -2.0, -2.0))):
        with pytest.raises(SystemExit, match="not used as it should"):
            bench.judged(one, two)


def test_equal_logits_are_a_row_and_others_or_none_are_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.run_info, "facts", lambda commit: {"commit": commit})
    args = SimpleNamespace(heads=16, index_heads=64, tokens=4096, steps=512, commit="c")
    totals = {"chunks": 8, "logits": 1000, "differ": 0}
    row = bench.bits_row({"compared": totals, "did": ACTIVE}, args)
    assert (row["case"], row["ours"]) == ("slab bits heads=16 index=64 S=4096 step=512", 1.0)
    assert row["compared"] == totals and row["commit"] == "c"
    for wrong in (totals | {"differ": 1}, totals | {"logits": 0}):
        with pytest.raises(SystemExit, match="other logits, or none"):
            bench.bits_row({"compared": wrong, "did": ACTIVE}, args)


def test_times_are_of_runs_that_used_the_buffer_with_on_alone(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = importlib.import_module("logits_slab_times")
    monkeypatch.setattr(bench.run_info, "facts", lambda commit: {"commit": commit})
    args = SimpleNamespace(heads=16, index_heads=64, tokens=4096, steps=512, layers=3, commit="c")
    seconds = {"off": [3.0, 1.0, 2.0], "on": [1.0, 9.0, 1.0]}
    row = times.row({"seconds": seconds, "more": 1 << 20, "did": ACTIVE}, args)
    assert (row["baseline"], row["ours"], row["ratio"], row["runs"]) == (2.0, 1.0, 2.0, 3)
    assert row["case"] == "slab prefill heads=16 index=64 S=4096 step=512"
    for did, more in (([], 1), (ACTIVE, 0), ([ACTIVE[0] | {"outcome": "declined"}], 1)):
        with pytest.raises(SystemExit, match="not used as it should"):
            times.row({"seconds": seconds, "more": more, "did": did}, args)


@pytest.mark.parametrize("end", ["", "; raise SystemExit(3)"])
def test_an_engine_that_ends_without_a_result_says_what_it_printed(bench: ModuleType, end: str) -> None:
    script = f"print('noise'); print('RESULT {{}}' if {bool(end)} else 'nothing'){end}"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with pytest.raises(SystemExit, match="no result:\nnoise"):
        bench.result_of(child)
    script = "print('noise'); print('RESULT {\"did\": []}'); print('more')"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert bench.result_of(child) == {"did": []}


def test_engines_at_once_and_all_ended_when_one_fails(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {
        # more than a pipe holds: an engine must not wait for the other to be read
        "off": "print('x' * 300000); print('RESULT {\"did\": \"off\"}')",
        "on": 'import sys; sys.stdin.read(); print(\'RESULT {"did": "on"}\')',
        "fails": "raise SystemExit(3)",
    }
    children: list[subprocess.Popen[str]] = []

    def started(switch: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", scripts[switch]]
        # the engine "on" ends when its input does: at once, or never if a write end stays open
        stdin = subprocess.PIPE if "fails" in running else subprocess.DEVNULL
        children.append(subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, text=True))
        return children[-1]

    monkeypatch.setattr(bench, "started", started)
    running = {"own": "off", "slab": "on"}
    assert bench.results(running, True) == {"own": {"did": "off"}, "slab": {"did": "on"}}
    running = {"own": "fails", "slab": "on"}
    with pytest.raises(SystemExit, match="ended with 3"):
        bench.results(running, True)
    assert all(child.poll() is not None for child in children)


def stored(line: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"bench/results/deepgemm/{line}-h200.json").read_text())[
        "rows"
    ]
    return rows


def test_auto_is_on_where_a_long_prefill_of_an_engine_was_measured_on_both_lines() -> None:
    code = (ROOT / "overlay/vllm/dsa/logits_slab/feature.py").read_text()
    (measured,) = re.findall(r"^MEASURED: .* = frozenset\((.*)\)$", code, re.MULTILINE)
    assert measured == "{(9, 0)}", "rows of an H200 are stored, of no other card"
    for line in ("0.33.0", "0.28.0"):
        case = "slab e2e heads=16 index=64 S=262144 step=2048"
        (row,) = [row for row in stored(line) if (row["case"], row["metric"]) == (case, "growth_MiB")]
        assert row["baseline"] > 5000 and row["ours"] < 64


def test_the_table_of_the_page_is_that_of_the_rows() -> None:
    page = (ROOT / "docs/deepgemm.md").read_text()
    table = re.findall(r"^\| (engine|operator), \d layers \| ([\d.]+) \| (\d+) \|(.*)\|$", page, re.MULTILINE)
    said, rows = [], []
    for level, line, step, figures in table:
        growth, peak = ([int(x) for x in figures.split("|")][i : i + 2] for i in (0, 2))
        said.append((line, level, int(step), *growth, *peak))
    for line in ("0.33.0", "0.28.0"):
        values = {(row["case"], row["metric"]): (row["baseline"], row["ours"]) for row in stored(line)}
        for case, metric in values:
            if metric == "growth_MiB":
                level = "engine" if " e2e " in case else "operator"
                step = int(case.rsplit("=", 1)[1])
                rows.append((line, level, step, *values[case, metric], *values[case, "peak_MiB"]))
    assert sorted(said) == sorted(rows)
