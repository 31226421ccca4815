# SPDX-License-Identifier: Apache-2.0
"""The kernels of the engine in their order: upstream's against this project's with the overlap switched off.

    PYTHONPATH=upstream python bench/overlap_kernels.py --run upstream.json
    VLLM_DISABLE_INDEXER_STREAM=1 VLLM_DSA_FUSED_Q=off python bench/overlap_kernels.py --run disabled.json
    VLLM_INDEXER_OVERLAP=full VLLM_DSA_FUSED_Q=off python bench/overlap_kernels.py --run full.json
    python bench/overlap_kernels.py --compare upstream.json disabled.json full.json --out rows.json

Each run starts an engine and takes a kernel trace of an eager prefill and of decode steps in FULL graphs.
The first file of ``--compare`` is what the others are compared with, stream by stream. ``full`` is the
control: it must differ. The query packing of this project (``VLLM_DSA_FUSED_Q``) is another kernel, so it is
off here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file

#: Name, batch, context, steps before the trace and steps in it. A prompt of 700 tokens is prefilled eagerly.
CASES = [("prefill", 1, 700, 0, 1), ("decode", 4, 3000, 6, 3)]
SWITCHES = ("VLLM_DSA", "VLLM_DISABLE_INDEXER_STREAM", "VLLM_INDEXER_OVERLAP", "VLLM_DSA_FUSED_Q")
#: How much of a kernel's name a row keeps.
SHOWN = 60


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine that is installed and trace all cases: per case the kernel names of each stream."""
    import vllm
    from decode_engine import Engine

    settings = {
        "heads": args.heads,
        "index_heads": args.index_heads,
        "layers": args.layers,
        "max_len": 4096,
        "per_step": 1,
        "batches": [batch for _, batch, _, _, _ in CASES],
        "graph": "FULL_AND_PIECEWISE",
        "hf": {},
        "llm": {"num_gpu_blocks_override": 1024} | args.llm,
    }
    engine = Engine(settings, filled=False)
    traces = {}
    for name, batch, context, before, steps in CASES:
        for _ in range(2):  # what the first pass compiles is not part of the trace
            engine._add(batch, context, before + steps + 8)
            engine._steps(before)
            traces[name] = by_stream(engine._profile(steps))
            engine._finish()
    about = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    shape = {"heads": args.heads, "index_heads": args.index_heads, "layers": args.layers}
    return {"vllm": str(Path(vllm.__file__).parent), "switches": about, "traces": traces} | shape


def by_stream(events: list[dict[str, Any]]) -> list[list[str]]:
    """Names of kernels in order, per stream; the stream with the most kernels comes first."""
    streams: dict[Any, list[str]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        streams.setdefault(event.get("args", {}).get("stream"), []).append(event["name"])
    return sorted(streams.values(), key=lambda names: (-len(names), names))


def compare(upstream: dict[str, Any], other: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """One row per case: 1.0 if every stream has upstream's kernels in upstream's order, else 0.0.

    Args:
        upstream: what `run` gave in upstream's tree.
        other: in this project's.
        mode: what the row calls it.
    """
    rows = []
    for name, wanted in upstream["traces"].items():
        found = other["traces"][name]
        value = float(found == wanted and sum(map(len, wanted)) > 0)
        head = f"mode={mode} phase=kernels heads={other['heads']} index={other['index_heads']}"
        row = {"case": f"{head} graph=FULL_AND_PIECEWISE {name}", "metric": "same kernels as upstream"}
        row |= {"unit": "1", "baseline": 1.0, "ours": value, "ratio": value, "runs": 1}
        row["kernels"] = {
            "upstream": [len(names) for names in wanted],
            "ours": [len(names) for names in found],
        }
        row["sequence"] = [[short(kernel) for kernel in names] for names in found]
        rows.append(row | {"switches": other["switches"]})
    return rows


def short(kernel: str) -> str:
    """A kernel's name without return type and arguments, cut."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name[:SHOWN]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="trace what is installed and write this file")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="upstream's first")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--line", default="0.33.0")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.run:
        args.run.write_text(json.dumps(run(args)))
        return 0
    if not args.compare or len(args.compare) < 2:
        parser.error("--run FILE, or --compare with upstream's file and others")
    upstream, *others = (json.loads(file.read_text()) for file in args.compare)
    names = [file.stem for file in args.compare[1:]]
    rows = [row for name, other in zip(names, others, strict=True) for row in compare(upstream, other, name)]
    about = {"commit": args.commit, "date": datetime.date.today().isoformat()}
    rows = [row | about for row in rows]
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "sequence"}))
    if args.out:
        results_file.add(args.out, "overlap", args.line, rows, replace=True)
    expected = all((row["ours"] == 1.0) is ("mode=full " not in row["case"]) for row in rows)
    return 0 if expected else 1


if __name__ == "__main__":
    sys.exit(main())
