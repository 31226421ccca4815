# SPDX-License-Identifier: Apache-2.0
"""Reserved memory of the indexer's prefill logits, operator level: upstream's allocation against one buffer.

    python bench/logits_slab.py --line 0.33.0 [--tokens 262144] [--steps 8192] [--out FILE] [--plot FILE.png]

Scores the chunks that upstream's planner makes of a prefill of ``--tokens`` tokens in steps of ``--steps``,
for several layers a step, with an activation of a changing size between two chunks, as an engine has them.
Each way runs in a process of its own and reports the allocator's reserved bytes after each step. Needs a card
of compute capability 9.0 and a vLLM with a patched DeepGEMM (docs/deepgemm.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file
import run_info

BUDGET = 512 << 20


def planner() -> Any:
    from vllm.v1.attention.backends.mla import indexer

    if hasattr(indexer, "split_indexer_prefill_chunks"):
        return indexer.split_indexer_prefill_chunks
    return indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks


def run(way: str, args: argparse.Namespace) -> list[int]:
    """Return the reserved bytes after each step."""
    import torch
    from vllm.dsa.logits_slab import slab
    from vllm.dsa.logits_slab.layout import Layout
    from vllm.utils import deep_gemm

    if not deep_gemm.has_mqa_logits_out():
        raise SystemExit("this DeepGEMM is not patched (docs/deepgemm.md)")
    split, device, heads = planner(), "cuda", args.heads
    q_all = torch.randn(args.steps, heads, 128, device=device).to(torch.float8_e4m3fn)
    k_all = torch.randn(args.tokens, 128, device=device).to(torch.float8_e4m3fn)
    scale, weights = torch.ones(args.tokens, device=device), torch.randn(args.steps, heads, device=device)
    logits = deep_gemm.fp8_fp4_mqa_logits
    if way == "slab":
        size = Layout(heads, slab.COMPRESSED).most_bytes(BUDGET, args.steps, args.tokens) + 1024
        logits = slab.Logits(torch.zeros(size, dtype=torch.uint8, device=device))
    reserved = []
    for done in range(0, args.tokens, args.steps):
        keys = min(done + args.steps, args.tokens)
        queries = keys - done
        chunks = split(torch.tensor([keys]), torch.tensor([queries]), args.tokens, BUDGET)
        for layer in range(args.layers):
            for _, rows in chunks:
                m = rows.stop - rows.start
                position = torch.arange(done + rows.start, done + rows.stop, device=device, dtype=torch.int32)
                ks, ke = torch.zeros_like(position), position + 1
                rest = (keys,) if slab.COMPRESSED else (False,)
                k = (k_all[:keys], scale[:keys])
                scores = logits((q_all[:m], None), k, weights[:m], ks, ke, *rest)
                # what an engine allocates while the scores live: K top positions, and an activation;
                # upstream's loop keeps the scores of a chunk until those of the next are there
                kept = torch.empty(m, 2048, dtype=torch.int32, device=device)
                activation = torch.empty(
                    queries * 7168 // (1 + layer % 3), dtype=torch.bfloat16, device=device
                )
                del kept, activation
            del scores
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.current"])
    return reserved


def rows_of(found: dict[str, list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    mib = {way: [value / 2**20 for value in values] for way, values in found.items()}
    peak = {way: max(values) for way, values in mib.items()}
    grown = {way: values[-1] - values[0] for way, values in mib.items()}
    rows = []
    for metric, value in (("peak_MiB", peak), ("growth_MiB", grown)):
        ratio = value["own"] / value["slab"] if value["slab"] else None
        rows.append(
            {
                "case": f"slab S={args.tokens} step={args.steps}",
                "metric": metric,
                "baseline": value["own"],
                "ours": value["slab"],
            }
            | {"ratio": ratio, "unit": "MiB"}
            | {"runs": 1}
            | run_info.facts(args.commit)
        )
    rows[0]["series_MiB"] = {"baseline": mib["own"], "ours": mib["slab"]}
    return rows


def plot(found: dict[str, list[int]], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for way, label in (("own", "upstream: new logits for each chunk"), ("slab", "one buffer")):
        steps = [args.steps * (i + 1) / 1024 for i in range(len(found[way]))]
        pyplot.plot(steps, [value / 2**30 for value in found[way]], label=label)
    pyplot.xlabel("context (K tokens)")
    pyplot.ylabel("reserved memory (GiB)")
    pyplot.ylim(bottom=0)
    pyplot.legend()
    pyplot.savefig(args.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--steps", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--commit", default="", help="of the checkout, where git cannot tell it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--way", choices=("own", "slab"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(run(args.way, args)))
        return
    found = {}
    for way in ("own", "slab"):
        argv = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        found[way] = json.loads(
            subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        )
    rows = rows_of(found, args)
    for row in rows:
        print(json.dumps(row))
    if args.out:
        results_file.add(args.out, "deepgemm", args.line, rows, replace=True)
    if args.plot:
        plot(found, args)


if __name__ == "__main__":
    main()
