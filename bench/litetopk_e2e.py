# SPDX-License-Identifier: Apache-2.0
"""Times prefill in the vLLM engine with LiteTopK off and on, in turn in one engine, and compares the results.

    python bench/litetopk_e2e.py --line 0.33.0 --heads 16 --index-heads 64 --tokens 524288 --out rows.json

One engine is started with VLLM_LITETOPK=1 (so that the start-up check runs and its workspace is set aside);
then the switch changes between requests: it is read when a step is planned and when the op runs. Weights are
seeded (bench/e2e_model.py), so hidden states, scores and tokens vary. Beside the times it stores

- whether the first tokens are the same off and on, for single prompts and for two concurrent long requests;
- how many of the top-k members differ from upstream's own kernels on the same inputs, and how far below
  upstream's cut-off the lowest of them scores, in sampled rows of each fused chunk;
- the distribution of the scores, without which a time of a top-k says little;
- how many requests were fused, and how many declined with which reason.

``--dispatch always`` with ``--min-keys`` measures sizes that the engine's table does not hold (yet). With
``--tensor-parallel 2`` and ``--shard-min-rows 1024`` upstream's row sharding is on (0.33.0).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_model
import e2e_prefill

SWITCH = "VLLM_LITETOPK"
SAMPLED_ROWS = 8


class Watch:
    """In place of the engine's kernel: runs it, and compares some rows with upstream's kernels."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.rows: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(self, q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any, out: Any) -> None:
        """See `vllm.dsa.litetopk.backend.Backend.run`."""
        self.kernel.run(q, k, k_scale, weights, ks, ke, out)
        few = slice(max(0, q.shape[0] - SAMPLED_ROWS), q.shape[0])
        self.rows.append(
            compared(q[few], k, k_scale, weights[few], ks[few].contiguous(), ke[few].contiguous(), out[few])
        )


def upstream_logits(q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any) -> Any:
    """Upstream's logits with column 0 at the row's first key, on either line."""
    import inspect

    from vllm.utils import deep_gemm

    logits = deep_gemm.fp8_fp4_mqa_logits
    if "max_seqlen_k" in inspect.signature(logits).parameters:
        return logits((q, None), (k, k_scale), weights, ks, ke, int((ke - ks).max()))
    start = int(ks.min())  # one request a chunk: all rows begin at the same key
    return logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=False)[:, start:]


def compared(q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any, ours: Any) -> dict[str, float]:
    """Compare rows of one chunk with upstream's logits and their top-k; and describe these logits."""
    import torch

    logits = upstream_logits(q, k, k_scale, weights, ks, ke).float()
    lengths = (ke - ks)[:, None]
    inside = torch.arange(logits.shape[1], device=logits.device) < lengths
    masked = torch.where(inside, logits, -torch.inf)
    width = min(ours.shape[1], logits.shape[1])
    best = masked.topk(width, 1)
    cut = best.values[:, -1]
    ids = ours[:, :width].long().clamp(min=0)
    lowest = masked.gather(1, ids).amin(1)
    mask = torch.zeros_like(inside).scatter_(1, ids, True)
    differ = (~mask.gather(1, best.indices)).sum(1)
    last = masked[-1, : int(lengths[-1])]
    centred = last - last.mean()
    newest = best.indices[-1] >= int(lengths[-1]) - 4096
    return {
        "members": float(width * ours.shape[0]),
        "differ": float(differ.sum()),
        "below_cut": float(((cut - lowest) / cut.abs().clamp(min=1)).max()),
        "mean": float(last.mean()),
        "deviation": float(last.std()),
        "skew": float((centred**3).mean() / last.std() ** 3),
        "kurtosis": float((centred**4).mean() / last.std() ** 4),
        "from_newest_4096": float(newest.float().mean()),
        "keys": float(lengths.max()),
    }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """All chunks of all layers together; the distribution is that of the longest row of each, averaged."""
    if not rows:
        return {"chunks": 0}
    found: dict[str, Any] = {"chunks": len(rows)}
    found["members"], found["differ"] = (sum(row[name] for row in rows) for name in ("members", "differ"))
    found["below_cut"] = max(row["below_cut"] for row in rows)
    for name in ("mean", "deviation", "skew", "kurtosis", "from_newest_4096"):
        found[name] = statistics.fmean(row[name] for row in rows)
    return found


def set_in_worker(_worker: Any, setting: dict[str, str]) -> None:
    """What `switch` does, in a worker process."""
    os.environ.update(setting)
    envs = sys.modules["vllm.envs"]
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def switch(engine: e2e_prefill.Engine, on: bool) -> None:
    """Set LiteTopK off or on for the requests that follow, in all processes of the engine."""
    setting = {SWITCH: str(int(on))}
    e2e_prefill.apply(setting)
    engine.llm.collective_rpc(set_in_worker, args=(setting,))


def rope(tokens: int) -> dict[str, Any]:
    """Let the positions reach the prompt's end: the released model's table holds 163840."""
    scaling = e2e_model.WIDTHS["rope_scaling"]
    factor = max(scaling["factor"], -(-(tokens + 1024) // scaling["original_max_position_embeddings"]))
    most = factor * scaling["original_max_position_embeddings"]
    return {"rope_scaling": scaling | {"factor": factor}, "max_position_embeddings": most}


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and return times, answers, comparisons and counters."""
    from vllm.dsa import counters
    from vllm.dsa.litetopk import backend

    e2e_prefill.apply(
        {
            SWITCH: "1",
            "VLLM_LITETOPK_DISPATCH": args.dispatch,
            "VLLM_LITETOPK_MIN_KEYS": str(args.min_keys),
        }
    )
    engine = e2e_prefill.Engine(args)
    result: dict[str, Any] = {"off": {"seconds": []}, "on": {"seconds": []}}
    pair = [e2e_prefill.prompt(args.tokens // 2, 7), e2e_prefill.prompt(args.tokens // 2 - 77, 8)]
    for name in ("off", "on"):
        switch(engine, name == "on")
        result[name]["answers"] = e2e_prefill.answers(engine, args)  # also warms up
        result[name]["pair"] = tokens_of(engine.generate(pair))
    if args.tensor_parallel == 1:  # with more the kernel runs in worker processes
        watch = Watch(backend.current)
        backend.current = watch
        switch(engine, True)
        engine.prefill_seconds(args.tokens, 0)
        backend.current = watch.kernel
        result["compared"] = summary(watch.rows)
    for run in range(args.runs):
        for name in (("off", "on"), ("on", "off"))[run % 2]:
            switch(engine, name == "on")
            result[name]["seconds"].append(engine.prefill_seconds(args.tokens, run))
    result["counters"] = counters.snapshot("litetopk")
    return result


def rows(args: argparse.Namespace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the results schema."""
    import torch

    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    common = {
        "runs": args.runs,
        "commit": args.commit,
        "driver": subprocess.run(smi, capture_output=True, text=True).stdout.split("\n")[0].strip(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "layers": args.layers,
    }
    off, on = result["off"], result["on"]
    a, b = statistics.median(off["seconds"]), statistics.median(on["seconds"])
    same, equal, worst = e2e_prefill.compare(off["answers"], on["answers"])
    pair = float(off["pair"] == on["pair"])
    case = f"e2e heads={args.heads} index={args.index_heads} S={args.tokens} dist=seeded"
    if args.dispatch != "measured":
        case += f" dispatch={args.dispatch} min_keys={args.min_keys}"
    if args.tensor_parallel > 1:
        case += f" tp={args.tensor_parallel} shard_min_rows={args.shard_min_rows}"

    def row(
        metric: str, unit: str, baseline: float, ours: float, ratio: float, **more: Any
    ) -> dict[str, Any]:
        values = {"case": case, "metric": metric, "unit": unit, "baseline": baseline, "ours": ours}
        return values | {"ratio": ratio} | common | more

    found = [
        row(
            "prefill",
            "s",
            a,
            b,
            a / b,
            baseline_seconds=off["seconds"],
            ours_seconds=on["seconds"],
            counters=result["counters"],
        ),
        row("same first tokens", "1", 1.0, float(same), float(same), equal=equal, largest_difference=worst),
        row("same tokens of two concurrent requests", "1", 1.0, pair, pair),
    ]
    seen = result.get("compared", {"chunks": 0})
    if seen["chunks"]:
        recall = 1 - seen["differ"] / seen["members"]
        found.append(row("recall", "1", 1.0, recall, recall, compared=seen))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--runs", type=int, default=5, help="timed prefills of each setting")
    parser.add_argument("--dispatch", choices=("measured", "always"), default="measured")
    parser.add_argument("--min-keys", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step (max_num_batched_tokens)")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--shard-min-rows", type=int, default=65536)
    parser.add_argument("--hf-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.hf_config = rope(args.tokens) | args.hf_config
    args.llm = {"max_num_batched_tokens": args.chunk} | args.llm
    if args.tensor_parallel > 1:
        args.llm = {
            "tensor_parallel_size": args.tensor_parallel,
            "attention_config": {"indexer_tp_shard_min_rows": args.shard_min_rows},
        } | args.llm
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "fork")  # workers get the seeded loader
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of set_in_worker, to workers of our own
    result = measure(args)
    found = rows(args, result)
    for row in found:
        print(json.dumps(row))
    if args.out:
        e2e_prefill.append(args.out, "litetopk", args.line, found)
    # Different prompts with the same best log-probabilities mean a model whose layers do nothing.
    if len({json.dumps(answer["logprobs"]) for answer in result["off"]["answers"]}) < 2:
        print("error: the answers do not depend on the prompt", file=sys.stderr)
        return 1
    return 0 if all(row["ratio"] == 1 for row in found if row["metric"].startswith("same")) else 1


if __name__ == "__main__":
    sys.exit(main())
