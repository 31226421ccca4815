"""The engine uses LiteTopK only where bench/results says that it is not slower; docs say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import litetopk_rows  # noqa: E402

ASK = """
import json, sys
from vllm.dsa.litetopk import dispatch
cases = json.load(sys.stdin)
print(json.dumps({"table": dispatch.TABLE, "k": dispatch.MEASURED_K,
                  "yes": [dispatch.worthwhile(queries, keys) for queries, keys in cases]}))
"""


def asked(cases: list[list[int]]) -> dict[str, list[object]]:
    """Ask the overlay's own code, without torch or vLLM around it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    env |= {"PYTHONPATH": str(ROOT / "overlay"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", ASK], input=json.dumps(cases), capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


def measured() -> list[tuple[int, int, float, str]]:
    """Queries, keys of a request, ratio to the default path, and the case; the newest row of a case."""
    data = json.loads((ROOT / "bench/results/litetopk/0.33.0-h200.json").read_text(encoding="utf-8"))
    newest = {
        row["case"]: row for row in data["rows"] if row["metric"] == "time" and "budget=512MiB" in row["case"]
    }
    found = []
    for case, row in newest.items():
        value = dict(part.split("=") for part in case.split())
        keys = int(value["S"]) // int(value["B"])
        found.append((int(value["Q"]), keys, row["ratio"], case))
    return found


def test_no_size_of_the_table_was_measured_to_be_slower() -> None:
    rows = measured()
    yes = asked([[queries, keys] for queries, keys, _, _ in rows])["yes"]
    slower = [case for (_, _, ratio, case), used in zip(rows, yes, strict=True) if used and ratio < 1]
    assert slower == []
    assert sum(map(bool, yes)) >= 12  # the table is not empty, and the file has rows to prove it


def test_the_documented_table_is_the_one_in_use() -> None:
    found = asked([])
    rows: list[tuple[int, int]] = [tuple(row) for row in found["table"]]  # type: ignore[misc]
    assert litetopk_rows.PAGE_TABLE.findall((ROOT / "docs/litetopk.md").read_text(encoding="utf-8"))
    assert litetopk_rows.page(rows) in (ROOT / "docs/litetopk.md").read_text(encoding="utf-8")
    source = (ROOT / "overlay/vllm/dsa/litetopk/dispatch.py").read_text(encoding="utf-8")
    assert litetopk_rows.TABLE.findall(source) == [litetopk_rows.code(rows)]


def points(fewest: dict[int, int], heads: tuple[int, ...] = (32, 64)) -> list[tuple[int, int, int, float]]:
    """Times of each number of queries: slower below its number of keys, faster from there on."""
    lengths = (1 << 15, 1 << 17, 1 << 18, 1 << 20)
    return [
        (head, queries, keys, 1.1 if keys >= least else 0.9)
        for queries, least in fewest.items()
        for keys in lengths
        for head in heads
    ]


def test_a_table_is_derived_from_rows() -> None:
    derive = litetopk_rows.table
    found = points({8: 1 << 15, 64: 1 << 17, 1024: 1 << 20, 8192: 1 << 18})
    assert derive(found, 1.0) == [(8, 1 << 15), (64, 1 << 17), (7167, 1 << 20), (1 << 31, 1 << 18)]
    # A number of queries that one number of heads lacks allows nothing, but it can forbid.
    assert derive(found + points({2048: 1 << 15}, (64,)), 1.0) == derive(found, 1.0)
    assert derive([*found, (64, 16, 1 << 18, 0.9)], 1.0)[1] == (64, 1 << 19)
    # One slower row among longer ones, of whatever distribution: from the next length on.
    slower = [*found, (64, 8192, 1 << 19, 0.99)]
    assert derive(slower, 1.0)[-1] == (1 << 31, 1 << 20)
    assert derive([*found, (32, 8, 1 << 20, 0.99)], 1.0)[0] == (64, litetopk_rows.NEVER)
    assert derive(found, 1.2) == [(1 << 31, litetopk_rows.NEVER)]


def test_only_times_against_the_default_path_count() -> None:
    case = "H=64 K=2048 Q=8 S=4096 B={} budget={} dist=iid"
    rows = [
        {"case": case.format(requests, budget), "metric": metric, "ratio": 2.0}
        for requests in (1, 4)
        for budget in ("512MiB", "matrix")
        for metric in ("time", "peak_MiB")
    ]
    rows.append({"case": "e2e heads=16 index=64 S=131072 dist=seeded", "metric": "prefill", "ratio": 3.0})
    assert litetopk_rows.sizes(rows) == [(64, 8, 4096, 2.0), (64, 8, 1024, 2.0)]
