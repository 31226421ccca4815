# SPDX-License-Identifier: Apache-2.0
"""Reserved memory over one long prefill in the vLLM engine, with VLLM_INDEXER_LOGITS_SLAB off and on.

    python bench/logits_slab_engine.py --line 0.33.0 [--tokens 262144] [--out FILE] [--plot FILE.png]

Each setting starts an engine of its own on the seeded model of ``e2e_model``, sends one prompt, steps the
engine by hand and notes the reserved bytes after each step. The first token of both must agree; the
largest difference of the best log-probabilities is stored (the order in which a top-k writes its ids is free,
so it need not be 0). The allocator's cache is emptied before the first step, as upstream does it after its
profile run. Needs what ``logits_slab.py`` needs. ``--layers`` and ``--hf-config`` change the model, ``--llm``
the engine's options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_model
import e2e_prefill
import logits_slab
import results_file


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One engine: reserved bytes after each step, the first token, its rivals, and what the feature did."""
    import torch

    overrides = {"max_position_embeddings": args.tokens + 64} | args.hf_config
    options = {"max_num_batched_tokens": args.steps, "enable_chunked_prefill": True} | args.llm
    llm = e2e_model.make_engine(
        args.heads, args.index_heads, args.layers, args.tokens + 64, overrides, options
    )
    from vllm import SamplingParams
    from vllm.dsa import counters

    engine = llm.llm_engine
    engine.add_request(
        "long",
        e2e_prefill.prompt(args.tokens, 1),
        SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=e2e_prefill.TOP_LOGPROBS,
        ),
    )
    torch.cuda.empty_cache()
    reserved, token, best = [], None, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (answer,) = output.outputs
                token = answer.token_ids[0]
                best = {str(key): float(value.logprob) for key, value in answer.logprobs[0].items()}
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.current"])
    return {
        "reserved": reserved,
        "token": token,
        "logprobs": best,
        "did": counters.snapshot("logits_slab"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--steps", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hf-config", type=json.loads, default={})
    parser.add_argument("--llm", type=json.loads, default={})
    parser.add_argument("--commit", default="", help="of the checkout, where git cannot tell it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(run(args)), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    for way, switch in (("own", "off"), ("slab", "on")):
        env = os.environ | {"VLLM_INDEXER_LOGITS_SLAB": switch}
        argv = [sys.executable, __file__, *sys.argv[1:], "--child"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=env)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found[way] = json.loads(line.removeprefix("RESULT "))
    outcomes = {row["outcome"] for row in found["slab"]["did"]}
    if outcomes != {"active"} or found["own"]["did"]:
        raise SystemExit(
            f"the buffer was not used as it should: {found['own']['did']} {found['slab']['did']}"
        )
    if found["own"]["token"] != found["slab"]["token"]:
        raise SystemExit(f"other first tokens: {found['own']['token']} and {found['slab']['token']}")
    series = {way: value["reserved"] for way, value in found.items()}
    rows = logits_slab.rows_of(series, args)
    _, _, apart = e2e_prefill.compare([found["own"]], [found["slab"]])
    for row in rows:
        row["largest_logprob_difference"] = apart
        row["case"] = (
            f"slab e2e heads={args.heads} index={args.index_heads} S={args.tokens} step={args.steps}"
        )
        print(json.dumps(row))
    if args.out:
        results_file.add(args.out, "deepgemm", args.line, rows, replace=True)
    if args.plot:
        logits_slab.plot(series, args)


if __name__ == "__main__":
    main()
