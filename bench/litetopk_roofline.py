# SPDX-License-Identifier: Apache-2.0
"""Times LiteTopK's kernel with parts of it left out, on one GPU: what its time consists of. Needs nvcc.

    python bench/litetopk_roofline.py --line 0.33.0 --out rows.json

Builds the kernel twice more (LT_PROBE in csrc/dsa/litetopk_scan.cuh): without appending to the lists, and
without the products too. Their results are wrong, their times are the point. All three take turns on the same
inputs; medians. The CUDA cores' share is what everything but the products takes. The products alone are in
litetopk_pipes.py: left alone in this kernel, the compiler drops or serialises them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import litetopk_operator
import litetopk_pipes
import results_file
import run_info

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "overlay/csrc/dsa"
#: LT_PROBE, and what the kernel then does.
PROBES = {0: "whole", 1: "no appending", 2: "all but products, no appending"}
SHAPES = [(heads, 8192, keys) for keys in (1 << 17, 1 << 19) for heads in (64, 32)]


def build(nvcc: str, probe: int, folder: Path) -> Path:
    """Compile one variant for Hopper."""
    target = folder / f"probe{probe}.so"
    command = [nvcc, *litetopk_pipes.HOPPER, f"-DLT_PROBE={probe}"]
    command += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-shared", "-o", str(target), "litetopk.cu", "abi.cu"]
    subprocess.run(command, cwd=SOURCES, check=True)
    return target


def measure(libraries: dict[int, Any], shape: tuple[int, int, int], runs: int) -> dict[int, float]:
    """Milliseconds of each variant."""
    import torch
    from dsa.litetopk_cases import make
    from vllm.dsa import kernels
    from vllm.dsa.litetopk import kernel, plan

    heads, queries, keys = shape
    case = make(queries, keys, heads)
    how = plan.plan(queries, keys, heads, 2048, torch.cuda.get_device_properties(0).multi_processor_count)
    out = torch.empty(queries, 2048, dtype=torch.int32, device="cuda")
    workspace = torch.empty(how.workspace, dtype=torch.uint8, device="cuda")
    times: dict[int, list[float]] = {probe: [] for probe in libraries}
    for run in range(runs + 1):
        for probe in list(libraries)[:: -1 if run % 2 else 1]:
            kernels._loaded = libraries[probe]
            took = litetopk_operator.timed(lambda: kernel.litetopk(*case, out, plan=how, workspace=workspace))
            if run:
                times[probe].append(took)
    return {probe: statistics.median(found) for probe, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nvcc", default=litetopk_pipes.NVCC)
    parser.add_argument("--commit", default="", help="instead of what git says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from vllm.dsa import kernels

    common = run_info.facts(args.commit)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor() as pool:
            built = list(pool.map(lambda probe: build(args.nvcc, probe, Path(folder)), PROBES))
        libraries = {probe: kernels.open_library(path) for probe, path in zip(PROBES, built, strict=True)}
        for shape in SHAPES:
            heads, queries, keys = shape
            found = measure(libraries, shape, args.runs)
            rows += rows_of(shape, found, {"runs": args.runs, **common})
            flop = 2 * heads * 128 * queries * (keys - (queries - 1) / 2)
            print(
                f"H={heads} Q={queries} S={keys}: "
                + ", ".join(
                    f"{PROBES[p]} {ms:.2f} ms ({flop / ms / 1e9:.0f} TFLOP/s)" for p, ms in found.items()
                ),
                flush=True,
            )
    if args.out:
        results_file.add(args.out, "litetopk", args.line, rows, replace=True)


def rows_of(
    shape: tuple[int, int, int], found: dict[int, float], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the results schema: the whole kernel against each variant."""
    heads, queries, keys = shape
    return [
        {
            "case": f"roofline H={heads} Q={queries} S={keys} dist=iid: {PROBES[probe]}",
            "metric": "kernel time",
            "unit": "ms",
            "baseline": found[0],
            "ours": ms,
            "ratio": found[0] / ms,
            **common,
        }
        for probe, ms in found.items()
        if probe
    ]


if __name__ == "__main__":
    main()
