"""Times the tool's own steps on this machine and writes bench/results/tool/speed.json.

Warm means: downloads are in the cache and the upstream sources are imported. Figures are medians of the runs.
Usage: .venv/bin/python bench/tool_speed.py [--runs 5]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_series import fetch
from vllm_series.files import write_atomic
from vllm_series.pins import load_pin
from vllm_series.wheel import gather, repack
from vllm_series.workspace import Workspace

LINES = ("0.33.0", "0.28.0")


Sample = tuple[float, float]  # wall seconds, processor seconds


def cpu() -> float:
    """Processor seconds of this process and its ended children."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


@contextmanager
def measured(samples: list[Sample]) -> Iterator[None]:
    """Append wall and processor seconds of the block to ``samples``."""
    wall, used = time.monotonic(), cpu()
    yield
    samples.append((time.monotonic() - wall, cpu() - used))


def timed(command: list[str], runs: int) -> list[Sample]:
    """Samples of a command."""
    samples: list[Sample] = []
    for _ in range(runs):
        with measured(samples):
            subprocess.run(command, check=True, capture_output=True)
    return samples


def repacks(ws: Workspace, line: str, runs: int) -> list[Sample]:
    """Samples of writing the whole wheel, comparison with the source included, without the kernels' build."""
    recipe = gather.gather(ws, line, "x86_64", with_kernels=False)
    samples: list[Sample] = []
    for _ in range(runs + 1):
        with measured(samples), repack.written(ws.work / "speed" / str(recipe.name), recipe):
            pass
    return samples[1:]  # the first run reads the wheel from disk


def unpacks(ws: Workspace, line: str, runs: int) -> list[Sample]:
    """Samples of unpacking the sdist with tar into a folder beside the trees, each time after removing it."""
    archive, place = fetch.fetch(ws, load_pin(ws, line).source.sdist), ws.root / "build" / ".speed"
    samples: list[Sample] = []
    for _ in range(runs):
        subprocess.run(["rm", "-rf", place], check=True)
        place.mkdir(parents=True)
        samples += timed(["tar", "-xzf", str(archive), "-C", str(place)], 1)
    subprocess.run(["rm", "-rf", place], check=True)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    ws = Workspace.find(Path(__file__))
    series = [sys.executable, "-m", "vllm_series.cli", "--root", str(ws.root)]
    rows = []

    def add(case: str, samples: list[Sample]) -> None:
        for number, metric in enumerate(("wall", "processor")):
            seconds = [sample[number] for sample in samples]
            median, worst = round(statistics.median(seconds), 2), round(max(seconds), 2)
            rows.append(
                {"case": case, "metric": metric, "unit": "s", "median": median, "worst": worst,
                 "runs": len(seconds), "load": round(os.getloadavg()[0], 1)}
            )  # fmt: skip
            print(f"{case:32} {metric:9} {median:6.2f} s  (worst {worst:.2f})", flush=True)

    for line in LINES:
        subprocess.run([*series, "apply", line], check=True)
        add(
            f"tar -x of the sdist line={line}", unpacks(ws, line, runs)
        )  # what any way of making the files takes
        touched = ws.build(line) / "vllm" / "envs.py"
        samples: list[Sample] = []
        for _ in range(runs):  # a deleted tree: everything but the import is done again
            subprocess.run(["rm", "-rf", str(ws.build(line))], check=True)
            samples += timed([*series, "apply", line], 1)
        assert touched.is_file()
        add(f"apply line={line} tree=absent", samples)
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
        "notes": "warm: downloads cached, sources imported; load: processes that wanted a core then",
    }
    write_atomic(ws.root / "bench/results/tool/speed.json", json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
