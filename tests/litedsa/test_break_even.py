"""The union ratios from which LiteDSA leaves a layer to upstream are those of the stored rows."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASE = re.compile(r"heads=(\d+) T=(\d+) u=([\d.]+) base=FLASH\w+( kv=fp8)?")


def test_break_even_lies_between_the_last_gain_and_the_first_loss() -> None:
    limits = runpy.run_path(str(ROOT / "overlay/vllm/dsa/litedsa/plan.py"))["BREAK_EVEN"]
    worst: dict[int, dict[float, float]] = {}  # by heads and union ratio: of tokens, caches and backends
    for row in json.loads((ROOT / "bench/results/litedsa/0.33.0-h200.json").read_text())["rows"]:
        case = CASE.fullmatch(row["case"])
        if case and row["metric"] == "time":
            of_heads = worst.setdefault(int(case[1]), {})
            of_heads[float(case[3])] = min(of_heads.get(float(case[3]), 99.0), row["ratio"])
    assert set(limits) <= set(worst) == {8, 16, 32}
    for heads, gains in worst.items():
        group = 64 / heads
        assert max(gains) == group and limits.get(heads, 0) < group  # measured up to disjoint selections
        limit = limits.get(heads, group)
        assert all((gain > 1) == (ratio <= limit) for ratio, gain in gains.items()), heads
