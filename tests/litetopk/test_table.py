"""The engine uses LiteTopK only where bench/results says that it is not slower; docs say the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    """Queries, keys, ratio to the default path, and the case, of all stored rows; the newest of a case."""
    data = json.loads((ROOT / "bench/results/litetopk/0.33.0-h200.json").read_text(encoding="utf-8"))
    newest = {
        row["case"]: row
        for row in data["rows"]
        if row["metric"] == "time" and "budget=512MiB" in row["case"] and "B=1 " in row["case"]
    }
    found = []
    for case, row in newest.items():
        value = dict(part.split("=") for part in case.split())
        found.append((int(value["Q"]), int(value["S"]), row["ratio"], case))
    return found


def test_no_size_of_the_table_was_measured_to_be_slower() -> None:
    rows = measured()
    yes = asked([[queries, keys] for queries, keys, _, _ in rows])["yes"]
    slower = [case for (_, _, ratio, case), used in zip(rows, yes, strict=True) if used and ratio < 1]
    assert slower == []
    assert sum(map(bool, yes)) >= 12  # the table is not empty, and the file has rows to prove it


def test_the_documented_table_is_the_one_in_use() -> None:
    found = asked([])
    text = (
        (ROOT / "docs/litetopk.md").read_text(encoding="utf-8").split("| queries that a rank scores |", 1)[1]
    )
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \|$", text.split("\n\n", 1)[0], re.MULTILINE)
    most = [int(row[0]) for row in found["table"]]  # type: ignore[index]
    fewest = [int(row[1]) for row in found["table"]]  # type: ignore[index]
    assert [int(keys) for _, keys in rows] == fewest
    assert [name for name, _ in rows] == [
        f"up to {most[0]}",
        f"{most[0] + 1} to {most[1]}",
        f"{most[1] + 1} and more",
    ]
