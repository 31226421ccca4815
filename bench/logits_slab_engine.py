# SPDX-License-Identifier: Apache-2.0
"""Reserved memory over one long prefill in the vLLM engine, with VLLM_INDEXER_LOGITS_SLAB off and on.

    python bench/logits_slab_engine.py --line 0.33.0 [--tokens 262144] [--out FILE] [--plot FILE.png]

Each setting starts an engine of its own on the seeded model of ``e2e_model``, answers a prompt of two
steps, sends one long prompt, steps the engine by hand and notes the reserved bytes after each step. So
what grows grows with the length, not with the first use of a layer. The allocator's cache is emptied
before; what it holds around the long prompt is printed (``HELD``). Then a shorter prompt is answered
twice. The first tokens of both settings must agree, or the best log-probabilities be as close as those of
the baseline to itself: they are not equal, for the order in which a top-k writes its ids is free. Nothing
is timed, so ``--together`` may run both engines at once (then ``--llm`` must leave memory for both). Needs
what ``logits_slab.py`` needs. ``--layers`` and ``--hf-config`` change the model, ``--llm`` the engine.

With ``--bits`` one engine with the buffer also calls upstream's function for each chunk, and compares all
logits bit by bit: whether the buffer changes what is selected, which first tokens cannot say.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_model
import e2e_prefill
import logits_slab
import results_file
import run_info

#: Tokens of the prompt that is answered twice.
SHORT = 32768


def start(args: argparse.Namespace) -> Any:
    """Start the engine in this process."""
    overrides = e2e_model.rope(args.tokens + 64) | args.hf_config
    options = {"max_num_batched_tokens": args.steps, "enable_chunked_prefill": True} | args.llm
    release_after_profile()
    return e2e_model.make_engine(
        args.heads, args.index_heads, args.layers, args.tokens + 64, overrides, options
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One engine: reserved bytes after each step of the long prompt, all answers, what the feature did."""
    llm = start(args)
    import torch
    from vllm.dsa import counters

    totals = compare_each_chunk() if args.bits else {}
    torch.cuda.empty_cache()
    steps(llm.llm_engine, min(2 * args.steps, args.tokens), 3)
    before = held()
    reserved, answer = steps(llm.llm_engine, args.tokens, 1)
    print("HELD " + json.dumps({"before": before, "after": held()}), flush=True)
    short = min(SHORT, args.tokens)
    answers = [answer, *(steps(llm.llm_engine, short, 2)[1] for _ in range(2))]
    did = counters.snapshot("logits_slab")
    return {"reserved": reserved, "answers": answers, "did": did, "compared": totals}


def release_after_profile() -> None:
    """Let the profile run end as it does without ``kv_cache_memory_bytes``: its memory goes back.

    With that option, which engines that share a card need, upstream skips it. Then a part of the KV cache can
    get the block that the dummy logits of the profile run left, and what is left of the block takes logits.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before vllm is imported
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    upstream = Worker.determine_available_memory
    limited = "_scoped_allocator_max_split" in inspect.getsource(upstream)

    @functools.wraps(upstream)
    def determine_available_memory(self: Any) -> int:
        if limited:
            with self._scoped_allocator_max_split(max_split_size_mb=20):
                found = upstream(self)
        else:
            found = upstream(self)
        gc.collect()
        torch.cuda.empty_cache()
        return int(found)

    Worker.determine_available_memory = determine_available_memory


def compare_each_chunk() -> dict[str, int]:
    """Let each chunk be scored by upstream's function too; return the counts, which grow with each chunk."""
    import torch
    from vllm.dsa.logits_slab import slab
    from vllm.utils import deep_gemm

    totals = {"chunks": 0, "logits": 0, "differ": 0}
    into_the_buffer = slab.Logits.__call__

    def both(self: Any, q: Any, kv: Any, weights: Any, ks: Any, ke: Any, *args: Any, **kwargs: Any) -> Any:
        got = into_the_buffer(self, q, kv, weights, ks, ke, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return got
        own = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, ks, ke, *args, **kwargs)
        first, last = (torch.zeros_like(ks), ke - ks) if slab.COMPRESSED else (ks, ke)
        column = torch.arange(got.shape[1], device=got.device)
        for start in range(0, got.shape[0], 512):  # rows at a time, for the memory of the masks
            rows = slice(start, start + 512)
            valid = (column >= first[rows, None]) & (column < last[rows, None])
            other = got[rows].view(torch.int32) != own[rows].view(torch.int32)
            totals["logits"] += int(valid.sum())
            totals["differ"] += int((valid & other).sum())
        totals["chunks"] += 1
        return got

    slab.Logits.__call__ = both
    return totals


def held() -> dict[str, Any]:
    """What the allocator holds, in MiB: size, used and largest free block of each segment from 64 MiB on."""
    import torch

    segments = []
    for segment in torch.cuda.memory_snapshot():
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        sizes = (segment["total_size"], segment["allocated_size"], max(free, default=0))
        if sizes[0] >= 64 << 20:
            segments.append([size >> 20 for size in sizes])
    stats = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.current", "allocated_bytes.all.current", "allocated_bytes.all.peak")
    return {name: stats[name] >> 20 for name in names} | {"segments": sorted(segments, reverse=True)}


def steps(engine: Any, tokens: int, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Answer one prompt: reserved bytes after each step, and the first token with its rivals."""
    import torch
    from vllm import SamplingParams

    best = e2e_prefill.TOP_LOGPROBS
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, logprobs=best)
    engine.add_request(f"prompt {time.monotonic_ns()}", e2e_prefill.prompt(tokens, seed), params)
    reserved, answer = [], {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (said,) = output.outputs
                rivals = {str(key): float(value.logprob) for key, value in said.logprobs[0].items()}
                answer = {"token": said.token_ids[0], "logprobs": rivals}
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.current"])
    return reserved, answer


def started(switch: str) -> subprocess.Popen[str]:
    env = os.environ | {"VLLM_INDEXER_LOGITS_SLAB": switch}
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--child"], stdout=subprocess.PIPE, text=True, env=env
    )


def result_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for an engine, show what it printed, and return its result."""
    out, _ = child.communicate()
    sys.stderr.write(out)
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if child.returncode or not lines:
        raise SystemExit(f"an engine ended with {child.returncode} and no result:\n{out[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def results(settings: dict[str, str], together: bool) -> dict[str, dict[str, Any]]:
    """Run an engine for each setting, in turn or at once; if one fails, the others are ended."""
    if not together:
        return {way: result_of(started(switch)) for way, switch in settings.items()}
    children = {way: started(switch) for way, switch in settings.items()}
    with ThreadPoolExecutor(len(children)) as pool:
        waiting = {pool.submit(result_of, child): way for way, child in children.items()}
        try:
            return {waiting[done]: done.result() for done in as_completed(waiting)}
        finally:
            for child in children.values():
                child.kill()


def judged(own: dict[str, Any], slab: dict[str, Any]) -> dict[str, Any]:
    """Return whether the first tokens are the same and the differences, to be stored.

    Raises:
        SystemExit: the buffer was not used, or was where it is off.
    """
    if {row["outcome"] for row in slab["did"]} != {"active"} or own["did"]:
        raise SystemExit(f"the buffer was not used as it should: {own['did']} {slab['did']}")
    same, _, apart = e2e_prefill.compare(own["answers"], slab["answers"])
    _, _, noise = e2e_prefill.compare(own["answers"][1:2], own["answers"][2:])
    return {
        "same_first_tokens": same,
        "largest_difference": apart,
        "largest_difference_of_baseline_with_itself": noise,
    }


def bits_row(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of ``--bits``.

    Raises:
        SystemExit: a logit differs, or none was compared.
    """
    totals = found["compared"]
    if not totals["logits"] or totals["differ"]:
        raise SystemExit(f"other logits, or none: {totals} {found['did']}")
    return {
        "case": f"slab bits heads={args.heads} index={args.index_heads} S={args.tokens} step={args.steps}",
        "metric": "equal logits",
        "unit": "1",
        "baseline": 1.0,
        "ours": 1.0,
        "ratio": 1.0,
        "compared": totals,
        "runs": 1,
    } | run_info.facts(args.commit)


def parser_for(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every measurement in an engine has."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    return parser


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--together", action="store_true", help="run both engines at once")
    parser.add_argument("--bits", action="store_true", help="compare the logits of each chunk instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(run(args)), flush=True)
        return
    if args.bits:
        row = bits_row(result_of(started("on")), args)
        print(json.dumps(row))
        if args.out:
            results_file.add(args.out, "deepgemm", args.line, [row], replace=True)
        return
    found = results({"own": "off", "slab": "on"}, args.together)
    series = {way: value["reserved"] for way, value in found.items()}
    print(json.dumps({"reserved_MiB": {way: [v >> 20 for v in values] for way, values in series.items()}}))
    differences = judged(found["own"], found["slab"])
    rows = logits_slab.rows_of(series, args)
    for row in rows:
        row["case"] = (
            f"slab e2e heads={args.heads} index={args.index_heads} S={args.tokens} step={args.steps}"
        )
        row |= differences
        print(json.dumps(row))
    if args.out:
        results_file.add(args.out, "deepgemm", args.line, rows, replace=True)
    if args.plot:
        logits_slab.plot(series, args)
    noise = differences["largest_difference_of_baseline_with_itself"]
    if not differences["same_first_tokens"] and differences["largest_difference"] > noise:
        tokens = [[answer["token"] for answer in found[way]["answers"]] for way in ("own", "slab")]
        raise SystemExit(f"other first tokens: {tokens[0]} and {tokens[1]}")


if __name__ == "__main__":
    main()
