# SPDX-License-Identifier: Apache-2.0
"""Times prefill in the vLLM engine with two settings of the switches, in turn, and compares what comes out.

    python bench/e2e_prefill.py --feature fused_q --heads 16 --index-heads 64 --tokens 131072 \\
        --set A:VLLM_DSA_FUSED_Q=off --set B:VLLM_DSA_FUSED_Q=auto --in-process --out rows.json

A is the baseline. A setting is any number of ``NAME=VALUE`` separated by commas. With ``--in-process`` both
settings share one engine and the switches change between requests: right for what is read at each prefill,
wrong for what is fixed when the engine starts or a graph is captured. Without it each round starts a fresh
engine for A and one for B. Prints one JSON row per metric and appends them to ``--out`` (results schema).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_model
import results_file
import run_info

TOP_LOGPROBS = 20


def parse_set(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.partition(":")
    if name not in ("A", "B") or not all("=" in part for part in rest.split(",") if part):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:NAME=VALUE[,NAME=VALUE...] or B:...")
    return name, dict(part.split("=", 1) for part in rest.split(",") if part)


def prompt(tokens: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(2, e2e_model.WIDTHS["vocab_size"]) for _ in range(tokens)]}


class Engine:
    """One engine and the requests that are made of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        start = time.perf_counter()
        self.llm = e2e_model.make_engine(
            args.heads, args.index_heads, args.layers, args.tokens + 64, args.hf_config, args.llm
        )
        print(f"engine started in {time.perf_counter() - start:.0f} s", flush=True)

    def generate(self, prompts: list[dict], **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, **sampling)
        return self.llm.generate(prompts, params, use_tqdm=False)

    def prefill_seconds(self, tokens: int, seed: int) -> float:
        import torch

        request = [prompt(tokens, seed)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.generate(request)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def answer(self, tokens: int, seed: int) -> dict[str, Any]:
        """The first token and the log-probabilities of the best ones."""
        completion = self.generate([prompt(tokens, seed)], logprobs=TOP_LOGPROBS)[0].outputs[0]
        best = {str(token): float(value.logprob) for token, value in completion.logprobs[0].items()}
        return {"token": completion.token_ids[0], "logprobs": best}

    def kernels(self, tokens: int, seed: int) -> list[tuple[str, int, float]]:
        """Kernels of one prefill: name, launches, milliseconds; longest first."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            self.generate([prompt(tokens, seed)])
        events = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
        return [(e.key, e.count, e.self_device_time_total / 1e3) for e in events if e.self_device_time_total]


def apply(setting: dict[str, str]) -> None:
    """Set the environment; vLLM caches its reading of it once the engine runs."""
    os.environ.update(setting)
    envs = sys.modules.get("vllm.envs")
    if envs is not None and hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def answers(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [engine.answer(n, 1000 + i) for i, n in enumerate((args.tokens, 5000, 4096))]


def measure_in_process(args: argparse.Namespace, engine: Engine | None = None) -> dict[str, Any]:
    apply(args.sets["A"])
    engine = engine or Engine(args)
    result: dict[str, Any] = {"A": {"seconds": []}, "B": {"seconds": []}}
    for name in "AB":
        apply(args.sets[name])
        result[name]["answers"] = answers(engine, args)  # also warms up
    apply(args.sets["A"])
    result["A"]["again"] = answers(engine, args)
    for run in range(args.runs):
        for name in ("AB", "BA")[run % 2]:
            apply(args.sets[name])
            result[name]["seconds"].append(engine.prefill_seconds(args.tokens, run))
    if args.profile:
        for name in "AB":
            apply(args.sets[name])
            result[name]["kernels"] = engine.kernels(args.tokens, 0)
    return result


def child(args: argparse.Namespace) -> None:
    """One engine with one setting; the environment is already set."""
    engine = Engine(args)
    result: dict[str, Any] = {"answers": answers(engine, args), "again": answers(engine, args)}
    result["seconds"] = [engine.prefill_seconds(args.tokens, run) for run in range(args.runs)]
    if args.profile:
        result["kernels"] = engine.kernels(args.tokens, 0)
    print("CHILD " + json.dumps(result), flush=True)


def measure_by_starts(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"A": {"seconds": []}, "B": {"seconds": []}}
    for _ in range(args.rounds):
        for name in "AB":
            command = [sys.executable, __file__, *sys.argv[1:], "--child"]
            env = os.environ | args.sets[name]
            out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
            found = json.loads(
                next(r for r in out.splitlines() if r.startswith("CHILD ")).removeprefix("CHILD ")
            )
            result[name]["seconds"] += found.pop("seconds")
            result[name] |= found
    return result


def compare(a: list[dict], b: list[dict]) -> tuple[bool, float, float]:
    """Same tokens; share of equal log-probabilities; largest difference (of tokens that both list)."""
    pairs = [
        (x["logprobs"][t], y["logprobs"].get(t)) for x, y in zip(a, b, strict=True) for t in x["logprobs"]
    ]
    both = [(x, y) for x, y in pairs if y is not None]
    same = sum(x == y for x, y in both) / len(pairs)
    tokens = all(x["token"] == y["token"] for x, y in zip(a, b, strict=True))
    return tokens, same, max((abs(x - y) for x, y in both), default=float("inf"))


def rows(args: argparse.Namespace, result: dict[str, Any]) -> list[dict[str, Any]]:
    common = {
        "runs": len(result["A"]["seconds"]),
        "settings": args.sets,
        "layers": args.layers,
    } | run_info.facts(args.commit)
    case = f"e2e heads={args.heads} index={args.index_heads} S={args.tokens}{args.case_suffix}"
    a, b = (statistics.median(result[name]["seconds"]) for name in "AB")
    tokens, same, worst = compare(result["A"]["answers"], result["B"]["answers"])
    # The order in which a top-k writes its ids is free and attention adds in that order, so A may differ from
    # itself: only a larger difference than that says something about B.
    _, self_same, self_worst = compare(result["A"]["answers"], result["A"]["again"])
    seconds = {"baseline_seconds": result["A"]["seconds"], "ours_seconds": result["B"]["seconds"]}

    def row(metric: str, unit: str, baseline: float, ours: float, ratio: float) -> dict[str, Any]:
        return {
            "case": case,
            "metric": metric,
            "unit": unit,
            "baseline": baseline,
            "ours": ours,
            "ratio": ratio,
        }

    return [
        row("prefill", "s", a, b, a / b) | common | seconds,
        row("same first tokens", "1", 1.0, float(tokens), float(tokens)) | common,
        row("equal logprobs", "1", self_same, same, same / self_same if self_same else 1.0)
        | common
        | {"largest_difference": worst, "largest_difference_of_baseline_with_itself": self_worst},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", type=parse_set, action="append", required=True, metavar="A|B:NAME=VALUE,...")
    parser.add_argument("--feature", default="fused_q")
    parser.add_argument("--line", default="0.33.0")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--runs", type=int, default=9, help="timed prefills per setting (and engine)")
    parser.add_argument("--rounds", type=int, default=2, help="engine starts per setting")
    parser.add_argument("--in-process", action="store_true", help="one engine, switches change per request")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one prefill each")
    parser.add_argument("--hf-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--case-suffix", default="", help="appended to the case, such as ' dist=seeded'")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sets = dict(args.set)
    if set(args.sets) != {"A", "B"}:
        parser.error("--set A:... and --set B:... are both needed (a setting may be empty: --set A:)")
    if args.child:
        child(args)
        return 0
    result = measure_in_process(args) if args.in_process else measure_by_starts(args)
    found = rows(args, result)
    for name in "AB":
        tokens = [answer["token"] for answer in result[name]["answers"]]
        print(f"{name}: {[round(s, 4) for s in result[name]['seconds']]} first tokens {tokens}")
        for key, count, ms in result[name].get("kernels", [])[:20]:
            print(f"  {ms:9.2f} ms x{count:5d} {key[:100]}")
    for row in found:
        print(json.dumps(row))
    if args.out:
        results_file.add(args.out, args.feature, args.line, found, replace=False)
    # Different prompts with the same best log-probabilities mean a model whose layers do nothing.
    if len({json.dumps(answer["logprobs"]) for answer in result["A"]["answers"]}) < 2:
        print("error: the answers do not depend on the prompt", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
