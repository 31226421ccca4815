# SPDX-License-Identifier: Apache-2.0
"""How LiteTopK's inner loop shares a multiprocessor's tensor and CUDA cores, on one Hopper GPU. Needs nvcc.

    python bench/litetopk_pipes.py --line 0.33.0 --out rows.json

Builds and runs litetopk_pipes.cu: warpgroups that do nothing but the products of half a tile, its weighted
sums, or both in turn. The cycles of both in turn are a floor for any kernel of this design: loading keys,
gates, lists and selections come on top. Needs no vLLM; torch only names its version in the rows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file
import run_info

ROOT = Path(__file__).resolve().parents[1]
#: Arguments of nvcc.
HOPPER = ("-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def build(nvcc: str, target: Path) -> None:
    """Compile the program for Hopper."""
    source, headers = ROOT / "bench/litetopk_pipes.cu", ROOT / "overlay/csrc/dsa"
    subprocess.run([nvcc, *HOPPER, "-I", str(headers), "-o", str(target), str(source)], check=True)


def parse(text: str) -> dict[str, tuple[float, float]]:
    """From the program's output: case -> cycles of half a tile for products and for sums, 0 for neither.

    Raises:
        ValueError: a line is not of the form name, tab, number, tab, number.
    """
    found = {}
    for line in text.splitlines():
        name, products, sums = line.split("\t")
        found[name] = (float(products), float(sums))
    return found


def rows_of(found: dict[str, tuple[float, float]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the results schema; the baseline is the products alone at the full rate of the tensor cores."""
    alone = found["3 warpgroups, products"][0]
    rows = []
    for name, cycles in found.items():
        for kind, value in zip(("products", "sums"), cycles, strict=True):
            if value:
                row = {"case": f"pipes {name}", "metric": f"{kind} of half a tile", "unit": "cycles"}
                rows.append(
                    row | {"baseline": alone, "ours": value, "ratio": alone / value, "runs": 1} | common
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--nvcc", default=NVCC)
    parser.add_argument("--commit", default="", help="instead of what git says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pipes"
        build(args.nvcc, program)
        text = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(text, end="")
    if args.out:
        rows = rows_of(parse(text), run_info.facts(args.commit))
        results_file.add(args.out, "litetopk", args.line, rows, replace=True)


if __name__ == "__main__":
    main()
