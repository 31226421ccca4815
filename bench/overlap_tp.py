# SPDX-License-Identifier: Apache-2.0
"""Two ranks decode with and without the overlap: same tokens, and no hang.

    python bench/overlap_tp.py --run /tmp/tp --out rows.json        # all of what follows
    python bench/overlap_tp.py --run /tmp/tp --in-process --out rows.json   # one start: off, full, off again
    torchrun --nproc-per-node 2 bench/overlap_tp.py --mode off --tokens off.json
    torchrun --nproc-per-node 2 bench/overlap_tp.py --mode full --tokens full.json
    python bench/overlap_tp.py --compare off.json full.json --out rows.json

Every rank runs an engine of its own in this process (vLLM's external launcher), so that all ranks seed their
weights alike. Ids of every top-k are sorted, so that equal selections give equal tokens. Collectives run on
NCCL alone, where another order on one rank hangs, and without NVLink multicast. A run that takes longer than
``--limit`` seconds is a hang: it prints where every thread is and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file
import run_info
from decode_rows import agreement

#: Names of the passes of --in-process; the last one is off once more, to see whether off agrees with itself.
AGAIN = "again"
TURNS = f"off,full,{AGAIN}"
#: Steps, and (batch, context) of what is generated; prompts are prefilled for real.
STEPS = 200
POINTS = [(1, 3000), (16, 900), (4, 9000)]


#: Turns NVLink multicast off in NCCL, PyTorch, NVSHMEM and vLLM's own all-reduces.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}


def nccl_alone() -> None:
    """Keep the collectives of this process on NCCL, without multicast.

    The fused all-reduce and norm of 0.33.0's DSA models has no switch: it asks FlashInfer for a workspace, by
    default one in multicast memory, and takes NCCL where that fails.
    """
    import flashinfer.comm

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("overlap_tp.py keeps collectives on NCCL")

    os.environ |= NO_MULTICAST
    flashinfer.comm.create_allreduce_fusion_workspace = refuse
    with contextlib.suppress(ImportError):
        from cuda.bindings import driver

        driver.cuMulticastCreate = refuse
    accept_an_older_nccl()


def accept_an_older_nccl() -> None:
    """Let vLLM call NCCL itself also where the library lacks functions that nothing here needs.

    vLLM wants those of 2.29.7 (suspending a communicator); where one is missing it takes PyTorch's calls
    without a word, and upstream's exchange of top-k between ranks then fails.
    """
    import ctypes

    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import find_nccl_library

    library = ctypes.CDLL(find_nccl_library())
    missing = [made.name for made in NCCLLibrary.exported_functions if not hasattr(library, made.name)]
    if missing:
        print(f"this NCCL lacks {', '.join(missing)}", flush=True)
        kept = [made for made in NCCLLibrary.exported_functions if made.name not in missing]
        NCCLLibrary.exported_functions = kept


def count_exchanges() -> list[int]:
    """Return a list of one number: how often this rank exchanged top-k ids of its share of prefill rows."""
    from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard

    found, exchange = [0], PrefillRowShard.exchange_topk

    def counted(shard: Any, *args: Any, **kwargs: Any) -> None:
        found[0] += 1
        exchange(shard, *args, **kwargs)

    PrefillRowShard.exchange_topk = counted
    return found


def generate(args: argparse.Namespace) -> None:
    """One rank. Of several modes (line 0.33.0) each has graphs of its own in one engine."""
    names = args.mode.split(",")
    os.environ["VLLM_INDEXER_OVERLAP"] = names[0]
    nccl_alone()
    from decode_engine import Engine

    world = int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = {
        "heads": args.heads * world,
        "index_heads": args.index_heads,
        "layers": args.layers,
        "max_len": max(context for _, context in POINTS) + STEPS + 64,
        "batches": sorted({batch for batch, _ in POINTS}),
        "graph": args.graph,
        "per_step": 1,
        "hf": {},
        "llm": ({"max_num_batched_tokens": args.budget} if args.budget else {})
        | ({"attention_config": {"indexer_tp_shard_min_rows": args.row_shard}} if args.row_shard else {})
        | ({"kv_cache_dtype": args.kv_cache_dtype} if args.kv_cache_dtype else {})
        | {
            # A fixed small cache: other work may be on the cards.
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 3_000_000_000,
            "decode_context_parallel_size": args.dcp,
            "tensor_parallel_size": world,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,
            "seed": 0,
        },
    }
    exchanges = count_exchanges()
    engine = Engine(settings, filled=False, ordered=True)
    import torch
    import vllm.dsa
    from vllm.dsa import counters

    turns = None
    if len(names) > 1:
        from decode_modes import Modes

        turns = Modes(engine.runner)
    for name in names:
        if turns is not None:
            turns.capture(name, "off" if name == AGAIN else name)
        found: dict[str, Any] = {}
        exchanges[0] = 0
        for batch, context in POINTS:
            found[f"B={batch} ctx={context}"] = engine.check(batch, context, STEPS)
            print(f"{name} B={batch} ctx={context} done", flush=True)
        if os.environ["RANK"] == "0":
            about = {"mode": "off" if name == AGAIN else name, "tag": tag(args), "world": world}
            about |= {"points": found, "torch": torch.__version__}
            about |= {"heads": args.heads, "index_heads": args.index_heads, "graph": args.graph}
            about["overlap"] = vllm.dsa.info()["features"]["overlap"]
            about |= {"forks": counters.snapshot("overlap"), "exchanges": exchanges[0]}
            (args.tokens / f"{name}.json" if turns else args.tokens).write_text(json.dumps(about))
            print(f"{name}: {about['forks']}, {exchanges[0]} exchanges of top-k")
            print(f"{name}: {STEPS} steps of {len(POINTS)} batches on {world} ranks", flush=True)


def tag(args: argparse.Namespace) -> str:
    """What a case says of the options that are not the default."""
    said = {"dcp": args.dcp if args.dcp > 1 else 0, "budget": args.budget, "rowshard": args.row_shard}
    said["kv"] = args.kv_cache_dtype
    return "".join(f" {name}={value}" for name, value in said.items() if value)


def compare(
    off: dict[str, Any], ours: dict[str, Any], again: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows: whether all tokens are equal, and the share of steps with equal logits.

    Args:
        off: what rank 0 wrote in mode off.
        ours: in another mode.
        again: in mode off once more. Where it differs from ``off``, the better of both counts.
    """
    rows = []
    for point in off["points"]:
        mine = ours["points"][point]
        passes = [passed["points"][point] for passed in (off, again) if passed is not None]
        against = [agreement(theirs, mine) for theirs in passes]
        share, tokens = max(against)
        head = f"mode={ours['mode']} phase=check heads={ours['heads']} index={ours['index_heads']}"
        where = f"{head} graph={ours['graph']} {point} tp={ours['world']}{ours.get('tag', '')}"
        for metric, value in (("equal tokens", tokens), ("equal logits", share)):
            row = {
                "case": where,
                "metric": metric,
                "unit": "1",
                "baseline": 1.0,
                "ours": value,
                "ratio": value,
            }
            more = {name: ours[name] for name in ("forks", "exchanges") if name in ours}
            if "forks" in more:
                forks = more.pop("forks")
                more["forked"] = sum(row["count"] for row in forks if row["outcome"] == "forked")
            row |= {"runs": len(mine["logits"]), "off_passes": [pair[0] for pair in against]}
            rows.append(row | more)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=["off", "wk", "full", TURNS])
    parser.add_argument("--heads", type=int, default=16, help="per rank")
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--graph", default="FULL_AND_PIECEWISE")
    parser.add_argument("--limit", type=int, default=280, help="seconds")
    parser.add_argument("--tokens", type=Path, help=f"where rank 0 writes; of {TURNS} a folder")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="start off and full on --ranks ranks, compare"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--in-process", action="store_true", help="with --run: all in one start")
    parser.add_argument("--budget", type=int, default=0, help="tokens of a step at most (upstream's default)")
    parser.add_argument(
        "--row-shard", type=int, default=0, help="prefill rows from which ranks share the indexer's work"
    )
    parser.add_argument("--kv-cache-dtype", default="", help="upstream's default if empty")
    parser.add_argument("--dcp", type=int, default=1, help="ranks of decode context parallelism")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OFF", "OURS"))
    parser.add_argument("--line", default="0.33.0")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.run:
        args.run.mkdir(parents=True, exist_ok=True)
        args.compare = [args.run / "off.json", args.run / "full.json"]
        both = [(TURNS, args.run)]
        for mode, file in both if args.in_process else [(file.stem, file) for file in args.compare]:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(args.ranks),
                __file__,
            ]
            command += ["--mode", mode, "--tokens", str(file), "--graph", args.graph]
            command += ["--heads", str(args.heads), "--index-heads", str(args.index_heads)]
            command += ["--budget", str(args.budget), "--dcp", str(args.dcp)]
            command += ["--row-shard", str(args.row_shard), "--kv-cache-dtype", args.kv_cache_dtype]
            command += ["--layers", str(args.layers), "--limit", str(args.limit)]
            subprocess.run(command, check=True)
    if args.compare:
        off, ours = (json.loads(file.read_text()) for file in args.compare)
        rows = compare(off, ours)
        control = args.compare[0].with_name(f"{AGAIN}.json")
        if control.is_file():
            again = json.loads(control.read_text())
            rows = compare(off, ours, again) + compare(off, again)
        about = run_info.facts(args.commit, ours["torch"])
        rows = [row | about for row in rows]
        for row in rows:
            print(json.dumps(row))
        if args.out:
            results_file.add(args.out, "overlap", args.line, rows, replace=False)
        ours_rows = [row for row in rows if "mode=off " not in row["case"]]
        return 0 if ours_rows and all(row["ours"] == 1.0 for row in ours_rows) else 1
    if not args.mode or not args.tokens:
        parser.error("--mode and --tokens are both needed, or --run or --compare")

    faulthandler.dump_traceback_later(args.limit, exit=True)  # a thread of its own: works inside a CUDA call
    generate(args)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
