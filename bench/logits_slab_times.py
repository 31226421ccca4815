# SPDX-License-Identifier: Apache-2.0
"""Times prefill in one vLLM engine with the logits buffer and without it, in turn.

    python bench/logits_slab_times.py --line 0.33.0 --tokens 131072 [--pairs 9] [--out FILE]

The engine starts with VLLM_INDEXER_LOGITS_SLAB=on, so the buffer is there; ``off`` between two prompts lets
upstream allocate its logits, from blocks that the allocator holds since a first prompt that is not timed.
Needs what ``logits_slab.py`` needs, and a card alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_prefill
import logits_slab_engine
import results_file
import run_info

SWITCH = "VLLM_INDEXER_LOGITS_SLAB"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each prefill by setting, and the bytes that ``off`` makes the allocator add."""
    os.environ[SWITCH] = "on"
    llm = logits_slab_engine.start(args)
    import torch
    from vllm.dsa import counters

    def seconds(switch: str) -> float:
        e2e_prefill.apply({SWITCH: switch})
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits_slab_engine.steps(llm.llm_engine, args.tokens, 1)
        return time.perf_counter() - start

    reserved = []
    for switch in ("on", "off"):
        seconds(switch)
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.current"])
    found: dict[str, list[float]] = {"off": [], "on": []}
    for pair in range(args.pairs):
        for switch in (("off", "on"), ("on", "off"))[pair % 2]:
            found[switch].append(seconds(switch))
    return {"seconds": found, "more": reserved[1] - reserved[0], "did": counters.snapshot("logits_slab")}


def row(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the row to store.

    Raises:
        SystemExit: the buffer was not used with ``on``, or with ``off`` too.
    """
    if {one["outcome"] for one in found["did"]} != {"active"} or found["more"] <= 0:
        raise SystemExit(f"the buffer was not used as it should: {found['did']}, {found['more']} bytes more")
    off, on = found["seconds"]["off"], found["seconds"]["on"]
    baseline, ours = statistics.median(off), statistics.median(on)
    case = f"slab prefill heads={args.heads} index={args.index_heads} S={args.tokens} step={args.steps}"
    return (
        {"case": case, "metric": "prefill", "unit": "s"}
        | {"baseline": baseline, "ours": ours, "ratio": baseline / ours}
        | run_info.facts(args.commit)
        | {"runs": len(on), "layers": args.layers, "baseline_seconds": off, "ours_seconds": on}
    )


def main() -> None:
    parser = logits_slab_engine.parser_for(__doc__)
    parser.add_argument("--pairs", type=int, default=9, help="timed prefills with each setting")
    args = parser.parse_args()
    one = row(run(args), args)
    print(json.dumps(one))
    if args.out:
        results_file.add(args.out, "deepgemm", args.line, [one], replace=True)


if __name__ == "__main__":
    main()
