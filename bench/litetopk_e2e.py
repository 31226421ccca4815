# SPDX-License-Identifier: Apache-2.0
"""Times prefill in the vLLM engine with LiteTopK off and on, in turn in one engine, and compares the results.

    python bench/litetopk_e2e.py --line 0.33.0 --heads 16 --index-heads 64 --tokens 131072:0 524288 --out FILE

One engine is started with VLLM_LITETOPK=1 (so that the start-up check runs and its workspace is set aside);
then the switch changes between requests: it is read when a step is planned and when the op runs. Weights are
seeded (bench/e2e_model.py), so hidden states, scores and tokens vary. Beside the times it stores, for each
length of the prompt,

- whether the first tokens are the same off and on, for single prompts and for two concurrent long requests
  (up to ``--pairs-up-to``), with ``--prefix-hits`` also for a prompt of which most is in the prefix cache;
- how many of the top-k members differ from upstream's own kernels on the same inputs, and how far below
  upstream's cut-off the lowest of them scores, in sampled rows of each fused chunk;
- the distribution of the scores, without which a time of a top-k says little;
- how many requests were fused, and how many declined with which reason.

A length alone takes the sizes of the engine's table; ``LENGTH:KEYS`` fuses every request from so many keys
on, to measure sizes that the table does not hold (yet). Under ``torchrun --nproc-per-node 2`` the ranks are
tensor-parallel, each in its own process and with collectives on NCCL alone (overlap_tp.py); with
``--shard-min-rows 1024`` upstream's row sharding is on (0.33.0) and each rank compares its own rows; rank 0's
are stored, and all ranks must end with exit code 0. ``--mtp 1`` adds a draft layer with an
indexer of its own. Exit code 1: something differed that should not, or a length from which requests should be
fused had none.
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
import e2e_model
import e2e_prefill
import litetopk_compare
import overlap_tp
import results_file
import run_info

SWITCH = "VLLM_LITETOPK"
SHORT = 5000  # tokens of the longest short prompt among `e2e_prefill.answers`


class Engine(e2e_prefill.Engine):
    """An engine whose requests find no cached prefix but that of a request with the same salt."""

    salt = ""
    calls = 0

    def generate(self, prompts: list[dict], **sampling: Any) -> list[Any]:
        """See `e2e_prefill.Engine.generate`. Without a salt each call has its own."""
        self.calls += 1
        salt = self.salt or f"call {self.calls}"
        return super().generate([prompt | {"cache_salt": salt} for prompt in prompts], **sampling)


def set_in_worker(_worker: Any, setting: dict[str, str]) -> None:
    """What `switch` does, in a worker process."""
    os.environ.update(setting)
    envs = sys.modules["vllm.envs"]
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def length(text: str) -> tuple[int, int | None]:
    """Read ``LENGTH`` or ``LENGTH:KEYS``."""
    tokens, _, keys = text.partition(":")
    return int(tokens), int(keys) if keys else None


def switch(engine: Engine, on: bool, min_keys: int | None) -> None:
    """Set LiteTopK off or on for the requests that follow, in all processes of the engine.

    From ``min_keys`` keys on, or at the sizes of the table.
    """
    setting = {
        SWITCH: str(int(on)),
        f"{SWITCH}_DISPATCH": "measured" if min_keys is None else "always",
        f"{SWITCH}_MIN_KEYS": str(min_keys or 0),
    }
    e2e_prefill.apply(setting)
    engine.llm.collective_rpc(set_in_worker, args=(setting,))


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def start(args: argparse.Namespace) -> Engine:
    """Start the engine with LiteTopK on, for prompts up to the longest."""
    e2e_prefill.apply({SWITCH: "1"})
    longest = max(tokens for tokens, _ in args.tokens)
    return Engine(argparse.Namespace(**vars(args) | {"tokens": longest}))


def after_prefix(engine: Engine, tokens: int) -> list[Any]:
    """First token of a prompt of ``tokens`` whose beginning is cached, and how many tokens were."""
    whole = e2e_prefill.prompt(tokens, 9)
    engine.salt = f"prefix {engine.calls}"
    engine.generate([{"prompt_token_ids": whole["prompt_token_ids"][: tokens * 5 // 8]}])
    (output,) = engine.generate([whole])
    engine.salt = ""
    return [*tokens_of([output]), output.num_cached_tokens]


def counted() -> dict[tuple[str, str], int]:
    """The counters of LiteTopK in this process, by outcome and reason."""
    from vllm.dsa import counters

    return {(str(r["outcome"]), str(r["reason"])): int(r["count"]) for r in counters.snapshot("litetopk")}


def measure(engine: Engine, tokens: int, min_keys: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return times, answers, comparisons and counters of one length of the prompt."""
    from vllm.dsa.litetopk import backend

    sizes = argparse.Namespace(tokens=tokens)
    before = counted()
    result: dict[str, Any] = {"off": {"seconds": []}, "on": {"seconds": []}}
    pair = [e2e_prefill.prompt(tokens // 2, 7), e2e_prefill.prompt(tokens // 2 - 77, 8)]
    for name in ("off", "on"):
        switch(engine, name == "on", min_keys)
        watch = litetopk_compare.Watch(backend.current)
        backend.current = watch
        result[name]["answers"] = e2e_prefill.answers(engine, sizes)  # also warms up
        backend.current = watch.kernel
        result["compared"] = litetopk_compare.summary([row for row in watch.rows if row["keys"] > SHORT])
        if tokens <= args.pairs_up_to:
            result[name]["pair"] = tokens_of(engine.generate(pair))
        if args.prefix_hits:
            result[name]["prefix"] = after_prefix(engine, tokens)
    begun = time.monotonic()
    for run in range(args.runs):
        # Ranks must make the same number of runs, whatever their clocks say.
        if run and args.tensor_parallel == 1 and time.monotonic() - begun > args.seconds:
            break
        for name in (("off", "on"), ("on", "off"))[run % 2]:
            switch(engine, name == "on", min_keys)
            result[name]["seconds"].append(engine.prefill_seconds(tokens, run))
    result["counters"] = [
        {"outcome": outcome, "reason": reason, "count": count - before.get((outcome, reason), 0)}
        for (outcome, reason), count in counted().items()
        if count > before.get((outcome, reason), 0)
    ]
    return result


def rows(
    args: argparse.Namespace, tokens: int, min_keys: int | None, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the results schema."""
    common = {
        "runs": len(result["on"]["seconds"]),
        "layers": args.layers,
    } | run_info.facts(args.commit)
    off, on = result["off"], result["on"]
    a, b = statistics.median(off["seconds"]), statistics.median(on["seconds"])
    same, equal, worst = e2e_prefill.compare(off["answers"], on["answers"])
    case = f"e2e heads={args.heads} index={args.index_heads} S={tokens} dist=seeded"
    if min_keys is not None:
        case += f" dispatch=always min_keys={min_keys}"
    if args.tensor_parallel > 1:
        common["exchanges"] = args.exchanges[0]  # of top-k rows between the ranks, off and on, until now
        case += f" tp={args.tensor_parallel} shard_min_rows={args.shard_min_rows}"
    if args.mtp:
        case += f" mtp={args.mtp}"

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
    ]
    if "pair" in on:
        pair = float(off["pair"] == on["pair"])
        found.append(row("same tokens of two concurrent requests", "1", 1.0, pair, pair))
    if args.prefix_hits:
        cached = on["prefix"][1]
        prefix = float(off["prefix"] == on["prefix"] and cached > 0)
        found.append(row("same token after a prefix hit", "1", 1.0, prefix, prefix, cached_tokens=cached))
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
    parser.add_argument("--tokens", type=length, nargs="+", default=[(131072, 0)], metavar="LENGTH[:KEYS]")
    parser.add_argument("--runs", type=int, default=5, help="timed prefills of each setting")
    parser.add_argument("--seconds", type=float, default=60, help="of a length; no timed run begins later")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step (max_num_batched_tokens)")
    parser.add_argument("--shard-min-rows", type=int, default=65536)
    parser.add_argument("--pairs-up-to", type=int, default=1 << 20, metavar="TOKENS", help="of both together")
    parser.add_argument("--prefix-hits", action="store_true", help="also a prompt with a cached prefix")
    parser.add_argument("--mtp", type=int, default=0, help="draft tokens of a step, from one draft layer")
    parser.add_argument("--hf-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.hf_config = e2e_model.rope(max(tokens for tokens, _ in args.tokens)) | args.hf_config
    args.llm = {"max_num_batched_tokens": args.chunk, "enable_prefix_caching": args.prefix_hits} | args.llm
    if args.mtp:
        args.hf_config = {"num_nextn_predict_layers": 1} | args.hf_config
        args.llm = {"speculative_config": {"method": "mtp", "num_speculative_tokens": args.mtp}} | args.llm
    args.tensor_parallel = int(os.environ.get("WORLD_SIZE", "1"))
    if args.tensor_parallel > 1:
        overlap_tp.nccl_alone()
        args.exchanges = overlap_tp.count_exchanges()
        args.llm = {
            "tensor_parallel_size": args.tensor_parallel,
            "attention_config": {"indexer_tp_shard_min_rows": args.shard_min_rows},
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,
            "seed": 0,
        } | args.llm
        args.out = args.out if os.environ["RANK"] == "0" else None
    engine = start(args)
    failed = False
    for tokens, min_keys in args.tokens:
        result = measure(engine, tokens, min_keys, args)
        found = rows(args, tokens, min_keys, result)
        for row in found:
            print(json.dumps(row), flush=True)
        if args.out:
            results_file.add(args.out, "litetopk", args.line, found, replace=True)
        # Different prompts with the same best log-probabilities mean a model whose layers do nothing.
        if len({json.dumps(answer["logprobs"]) for answer in result["off"]["answers"]}) < 2:
            print("error: the answers do not depend on the prompt", file=sys.stderr)
            failed = True
        expected = min_keys is not None and min_keys <= tokens
        if expected and not result["compared"]["chunks"]:
            print(f"error: no chunk of a prompt of {tokens} tokens was fused", file=sys.stderr)
            failed = True
        failed = failed or any(row["ratio"] != 1 for row in found if row["metric"].startswith("same"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
