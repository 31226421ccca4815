"""Times the tool's own steps on this machine and writes bench/results/tool/speed.json.

Warm means: downloads are in the cache and the upstream sources are imported. Figures are medians of the runs.
Usage: .venv/bin/python bench/tool_speed.py [--runs 5]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from vllm_series.files import write_atomic
from vllm_series.wheel import gather, repack
from vllm_series.workspace import Workspace

LINES = ("0.33.0", "0.28.0")


def timed(command: list[str], runs: int) -> list[float]:
    """Wall seconds of each run."""
    seconds = []
    for _ in range(runs):
        start = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.monotonic() - start)
    return seconds


def repacks(ws: Workspace, line: str, runs: int) -> list[float]:
    """Seconds of writing the whole wheel, comparison with the source included, without the kernels' build."""
    recipe = gather.gather(ws, line, "x86_64", with_kernels=False)
    seconds = []
    for number in range(runs + 1):
        start = time.monotonic()
        with repack.written(ws.work / "speed" / str(recipe.name), recipe):
            seconds.append(time.monotonic() - start)
        if number == 0:
            seconds.clear()  # the first run reads the wheel from disk
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    ws = Workspace.find(Path(__file__))
    series = [sys.executable, "-m", "vllm_series.cli", "--root", str(ws.root)]
    rows = []

    def add(case: str, seconds: list[float]) -> None:
        rows.append(
            {"case": case, "metric": "wall", "unit": "s", "median": round(statistics.median(seconds), 2),
             "worst": round(max(seconds), 2), "runs": len(seconds)}
        )  # fmt: skip
        print(f"{case:40} {rows[-1]['median']:6.2f} s  (worst {rows[-1]['worst']:.2f})", flush=True)

    for line in LINES:
        subprocess.run([*series, "apply", line], check=True)
        touched = ws.build(line) / "vllm" / "envs.py"
        seconds = []
        for _ in range(runs):  # a deleted tree: everything but the import is done again
            subprocess.run(["rm", "-rf", str(ws.build(line))], check=True)
            seconds += timed([*series, "apply", line], 1)
        assert touched.is_file()
        add(f"apply line={line} tree=absent", seconds)
        add(f"apply line={line} tree=applied", timed([*series, "apply", line], runs))
        add(f"repack line={line}", repacks(ws, line, runs))
    add("verify lines=all", timed([*series, "verify"], max(runs - 2, 1)))
    commit = subprocess.check_output(
        ["git", "-C", ws.root, "rev-parse", "--short=9", "HEAD"], text=True
    ).strip()
    result = {
        "schema": 1,
        "kind": "time",
        "feature": "tool",
        "cores": os.cpu_count(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": rows,
        "notes": "warm: downloads cached, sources imported; load average at the end "
        + f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    }
    write_atomic(ws.root / "bench/results/tool/speed.json", json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
