# SPDX-License-Identifier: Apache-2.0
"""Prefill in the vLLM engine with VLLM_DSA_FUSED_Q off and on: shapes in one process, with a control.

    python bench/fused_q_engine.py --shape 16/64 --shape 8/32 --shape 128/64 --out rows.json

For each shape (heads / indexer heads) one engine on the seeded model of ``e2e_model`` runs, in turn,

- A (off), B (on) and A again as a control: ``--runs`` prefills each, paired by prompt;
- the same prompts with the ids of every top-k in order, so that equal selections give equal bits: the
  log-probabilities of A, B and A again;
- ``--profiles`` prefills of A and of B under the profiler: time by kind of kernel, and every kernel's name.

The other features of vllm.dsa are off. On line 0.28.0 every setting runs the op that ``on`` puts into the
graph; it calls either kernel. The card's clock, power and what holds the clock down are sampled during the
timed prefills, which follow each other at once or after ``--pause`` seconds of rest. Rows (results
schema) are appended to ``--out`` after each shape; a shape that has rows there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import decode_engine
import e2e_prefill
import results_file
from gpu_clock import ClockLog

ALONE = {
    "VLLM_INDEXER_OVERLAP": "off",
    "VLLM_LITETOPK": "0",
    "VLLM_LITEDSA": "0",
    "VLLM_INDEXER_LOGITS_SLAB": "off",
}
SETTINGS = {"A": "off", "B": "on", "C": "off"}  # C is the control

#: Kinds of kernels by their names; the first that matches counts.
KINDS = (
    ("query packing", r"_fused_q_kernel|fused_q_block_kernel|index(er)?_q_rope_quant"),
    ("norm, rotation, cache", r"norm_rope|rms_?norm|layer_?norm|rotary|concat_and_cache|indexer_k_quant"),
    ("MQA logits", r"mqa_logits"),
    ("top-k", r"top_?k|radix|FilteredTopK"),
    ("attention", r"flash|fmha|sparse_attn|mla|attention"),
    ("matrix products", r"gemm|nvjet|cublas|splitK"),
    ("copies", r"copy|CatArray|Memcpy DtoD"),
)


def kind(name: str) -> str:
    """What a kernel is for; "other" if its name does not tell."""
    return next((label for label, found in KINDS if re.search(found, name, re.IGNORECASE)), "other")


def by_kind(kernels: list[tuple[str, int, float]]) -> dict[str, float]:
    """Milliseconds of each kind, and of all together."""
    found = {"all": 0.0}
    for name, _, milliseconds in kernels:
        found[kind(name)] = found.get(kind(name), 0.0) + milliseconds
        found["all"] += milliseconds
    return found


def shape(text: str) -> tuple[int, int]:
    heads, _, index_heads = text.partition("/")
    if not (heads.isdecimal() and index_heads.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEADS/INDEXER_HEADS")
    return int(heads), int(index_heads)


def use(setting: str) -> None:
    e2e_prefill.apply({"VLLM_DSA_FUSED_Q": SETTINGS[setting]})


@contextlib.contextmanager
def ids_in_order() -> Iterator[None]:
    """Let every top-k be in order of ids; as it was afterwards."""
    if decode_engine.compiled_line():
        from vllm.dsa.overlap.compiled import runner
        from vllm.model_executor.layers import sparse_attn_indexer as module

        replaced: list[tuple[Any, str]] = [(runner, "run"), (module, "dsa_runner")]
    else:
        from vllm.models.deepseek_v32 import attention

        replaced = [(attention, "sparse_attn_indexer")]
    before = [getattr(owner, name) for owner, name in replaced]
    decode_engine.sort_ids()
    try:
        yield
    finally:
        for (owner, name), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def measure(engine: Any, args: Any) -> dict[str, Any]:
    """All of one shape; ``engine`` is a started `e2e_prefill.Engine`."""
    result: dict[str, Any] = {name: {"seconds": [], "spans": []} for name in SETTINGS}
    with ids_in_order():  # also warms up
        for name in "ABC":
            use(name)
            result[name]["answers"] = e2e_prefill.answers(engine, args)
    for name in "AB":
        use(name)
        engine.prefill_seconds(args.tokens, 2000)
    with ClockLog() as clock:
        for run in range(args.runs):
            for name in ("ABC", "CBA")[run % 2]:
                use(name)
                time.sleep(args.pause)
                start = time.time()
                result[name]["seconds"].append(engine.prefill_seconds(args.tokens, run))
                result[name]["spans"].append((start, time.time()))
    for name in SETTINGS:
        result[name]["clock"] = clock.within(result[name].pop("spans"))
    for name in "AB":
        result[name]["profiles"] = []
    for run in range(args.profiles):
        for name in ("AB", "BA")[run % 2]:
            use(name)
            result[name]["profiles"].append(engine.kernels(args.tokens, run))
    return result


def control_of(result: dict[str, Any]) -> dict[str, Any]:
    """A against A again, in the form of a comparison of A and B."""
    a, again = result["A"], result["C"]
    return {"A": a | {"again": again["answers"]}, "B": again}


def extra_rows(like: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of what `e2e_prefill.rows` does not know: pairs, clock, power and kernels."""
    common = {k: v for k, v in like.items() if k not in ("baseline_seconds", "ours_seconds")}

    def row(
        metric: str, unit: str, baseline: float, ours: float, ratio: float, **more: Any
    ) -> dict[str, Any]:
        values = {"metric": metric, "unit": unit, "baseline": baseline, "ours": ours, "ratio": ratio}
        return common | values | more

    rows = []
    pairs = [a / b for a, b in zip(result["A"]["seconds"], result["B"]["seconds"], strict=True)]
    rows.append(
        row("prefill, median of pairs", "1", 1.0, 1 / statistics.median(pairs), statistics.median(pairs))
        | {"least": min(pairs), "most": max(pairs)}
    )
    clocks = result["A"].get("clock"), result["B"].get("clock")
    if all(clocks):
        kinds = (("SM clock", "MHz", "clock"), ("power", "W", "power"))
        kinds += (("held by the power cap", "1", "power cap"), ("held by temperature", "1", "temperature"))
        for metric, unit, key in kinds:
            a, b = clocks[0][key], clocks[1][key]
            rows.append(row(metric, unit, a, b, b / a if a else 1.0, samples=[c["samples"] for c in clocks]))
    profiles = [result[name].get("profiles") or [] for name in "AB"]
    if not all(profiles):
        return rows
    times = [[by_kind(kernels) for kernels in of] for of in profiles]
    for label in sorted({label for of in times for found in of for label in found}):
        a, b = (statistics.median(found.get(label, 0.0) for found in of) for of in times)
        more = {"runs": len(times[0])}
        if label == "all":
            more |= {"baseline_kernels": profiles[0][0], "ours_kernels": profiles[1][0]}
        rows.append(row(f"kernels: {label}", "ms", a, b, a / b if b else 0.0, **more))
    return rows


def pause_suffix(args: Any) -> str:
    return f" pause={args.pause:g}s" if args.pause else ""


def rows_of(args: Any, result: dict[str, Any]) -> list[dict[str, Any]]:
    args.sets = {name: {"VLLM_DSA_FUSED_Q": SETTINGS[name]} | ALONE for name in "AB"}
    args.case_suffix = pause_suffix(args)
    compared = {"A": result["A"] | {"again": result["C"]["answers"]}, "B": result["B"]}
    rows = e2e_prefill.rows(args, compared)
    rows += extra_rows(rows[0], result)
    args.sets = dict.fromkeys("AB", args.sets["A"])  # anew: the rows above hold the other
    args.case_suffix = pause_suffix(args) + " control=off-against-off"
    control = control_of(result)
    rows += e2e_prefill.rows(args, control)
    return rows + extra_rows(rows[-3], control)


def stop(engine: Any) -> None:
    """Give the engine's memory back. What stays is small: each engine takes its share of the card alone."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with contextlib.suppress(Exception):
        engine.llm.llm_engine.engine_core.shutdown()
    engine.llm = None
    gc.collect()
    cleanup_dist_env_and_memory()


def done(out: Path | None, heads: int, index_heads: int, args: Any) -> bool:
    case = f"e2e heads={heads} index={index_heads} S={args.tokens}{pause_suffix(args)}"
    if out is None or not out.exists():
        return False
    return any(r["case"] == case and r["metric"] == "prefill" for r in json.loads(out.read_text())["rows"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", default="0.33.0", choices=["0.28.0", "0.33.0"])
    parser.add_argument("--shape", type=shape, action="append", required=True, metavar="HEADS/INDEXER_HEADS")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each timed prefill")
    parser.add_argument("--profiles", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.28, help="share of the card for each engine")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    os.environ.update(ALONE)
    failed = 0
    for heads, index_heads in args.shape:
        if done(args.out, heads, index_heads, args):
            print(f"{heads}/{index_heads}: has rows in {args.out}", flush=True)
            continue
        of = SimpleNamespace(**vars(args) | {"heads": heads, "index_heads": index_heads, "hf_config": {}})
        of.llm = {"gpu_memory_utilization": args.memory, "max_num_seqs": 8, "max_num_batched_tokens": 16384}
        of.llm |= args.llm
        use("B")  # the compiled line decides when layers are built whether the switch is looked at
        engine = e2e_prefill.Engine(of)
        start = time.perf_counter()
        result = measure(engine, of)
        print(f"{heads}/{index_heads}: measured in {time.perf_counter() - start:.0f} s", flush=True)
        rows = rows_of(of, result)
        for row in rows:
            shown = {k: v for k, v in row.items() if not k.endswith("_kernels")}
            print(json.dumps(shown), flush=True)
        if args.out:
            results_file.add(args.out, "fused_q", args.line, rows, replace=False)
        answers = result["A"]["answers"]
        # Different prompts with the same best log-probabilities mean a model whose layers do nothing.
        if len({json.dumps(answer["logprobs"]) for answer in answers}) < 2:
            print("error: the answers do not depend on the prompt", file=sys.stderr)
            failed = 1
        stop(engine)
    return failed


if __name__ == "__main__":
    sys.exit(main())
