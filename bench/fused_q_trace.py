# SPDX-License-Identifier: Apache-2.0
"""Whether VLLM_DSA_FUSED_Q changes a bit inside the vLLM engine, and where prefills part that do differ.

    python bench/fused_q_trace.py --shape 16/64 --shape 8/32 --out trace.json           # 0.33.0
    python bench/fused_q_trace.py --line 0.28.0 --shape 16/64 --start off --keep off.pt  # 0.28.0: the graph
    python bench/fused_q_trace.py --line 0.28.0 --shape 16/64 --start on --keep off.pt   # is made at start

For each shape one engine on the seeded model of ``e2e_model``:

1. Live: at every call of the query packing both kernels run on the same tensors of the engine, and every byte
   of their results is compared. On 0.28.0 upstream's is the one that Inductor makes of the call.
2. ``--runs`` prefills of each of three prompts with off and with on in turn, with checksums of the packed
   query, the keys, the logits and the selections of every layer (``prefill_trace``), compared with the first
   of off.
3. The same ``--settled`` times with equally good keys decided by their ids.

Line 0.28.0 has one setting per engine; with ``--keep`` the engine with off stores the checksums of its first
prefills, and the one with on compares its own with those.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import decode_engine
import e2e_prefill
import fused_q_engine
import results_file
import run_info
from fused_q_live import Live, use


def prompts(args: Any) -> list[tuple[int, int]]:
    """Length and seed, as in ``e2e_prefill``."""
    return [(length, 1000 + i) for i, length in enumerate((args.tokens, 5000, 4096))]


def live(engine: Any, args: Any) -> dict[str, int]:
    use("on")
    check = Live()
    for length, seed in prompts(args):
        engine.answer(min(length, args.live_tokens), seed)
    return check.finish()


def record(engine: Any, args: Any, settled: bool, runs: int, settings: list[str]) -> list[dict[str, Any]]:
    """Prefills of all prompts with each setting in turn: setting, prompt, answer, checksums per layer."""
    from prefill_trace import Recorder

    recorder = Recorder(settled)
    found = []
    for _ in range(runs):
        for setting in settings:
            use(setting)
            for length, seed in prompts(args):
                recorder.start()
                answer = engine.answer(length, seed)
                made = {"setting": setting, "length": length, "answer": answer, "layers": recorder.take()}
                found.append(compact(made))
    recorder.close()
    return found


def compact(made: dict[str, Any]) -> dict[str, Any]:
    made["open"] = [int(layer["open"].sum()) for layer in made["layers"]]
    made["inexact"] = sum(int((~layer["exact"]).sum()) for layer in made["layers"])
    return made


def compare(found: list[dict[str, Any]], first: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Per prompt length: how the prefills of each setting compare with the first of off."""
    from prefill_trace import difference

    result: dict[int, dict[str, Any]] = {}
    for made in found:
        base = first[made["length"]]
        if made is base:
            continue
        if "layers" not in made:
            raise ValueError("the checksums of a prefill are gone")
        parted = difference(base["layers"], made.pop("layers"))
        of = result.setdefault(made["length"], {}).setdefault(made["setting"], [])
        logprobs = base["answer"]["logprobs"], made["answer"]["logprobs"]
        both = [abs(logprobs[0][t] - logprobs[1][t]) for t in logprobs[0] if t in logprobs[1]]
        of.append(
            parted
            | {
                "same_logprobs": logprobs[0] == logprobs[1],
                "largest_difference": max(both, default=float("inf")),
                "same_token": base["answer"]["token"] == made["answer"]["token"],
                "open": made["open"],
                "inexact": made["inexact"],
            }
        )
    return result


def rows_of(
    args: Any, counts: dict[str, int] | None, runs: dict[str, dict[int, Any]]
) -> list[dict[str, Any]]:
    """Rows (results schema): how many prefills of off (baseline) and on (ours) part from the first of off."""
    common = run_info.facts(args.commit) | {"layers": args.layers}
    shape = f"heads={args.heads} index={args.index_heads}"
    shape += f" engine={args.start}" if args.keep else ""
    rows: list[dict[str, Any]] = []
    if counts is not None:
        row = {
            "case": f"live {shape}",
            "metric": "bytes that differ on the engine's own tensors",
            "unit": "B",
        }
        rows.append(row | {"baseline": 0, "ours": counts["differ"], "ratio": 1.0, "counts": counts} | common)
    for kind, by_length in runs.items():
        for length, by_setting in by_length.items():
            parted = {s: [r for r in of if r["first"] is not None] for s, of in by_setting.items()}
            number = {s: len(of) for s, of in parted.items()}
            total = {s: len(of) for s, of in by_setting.items()}
            row = {
                "case": f"trace {shape} S={length} ties={kind}",
                "metric": "prefills that part from the first",
                "unit": "1",
                "baseline": number.get("off", 0),
                "ours": number.get("on", 0),
                "ratio": 1.0,
                "compared": total,
                "first": {s: dict(collections.Counter(r["first"] for r in of)) for s, of in parted.items()},
                "unlike_logprobs": {
                    s: sum(not r["same_logprobs"] for r in of) for s, of in by_setting.items()
                },
                "unlike_tokens": {s: sum(not r["same_token"] for r in of) for s, of in by_setting.items()},
                "largest_difference": {
                    s: max(r["largest_difference"] for r in of) for s, of in by_setting.items()
                },
                "unforced_rows_and_open": {s: [r["unforced"] for r in of] for s, of in by_setting.items()},
                "open_rows_per_layer": next(iter(by_setting.values()))[0]["open"],
                "selections_that_are_no_top_k": sum(r["inexact"] for of in by_setting.values() for r in of),
                "one_of_each": {s: of[0]["rows"] for s, of in parted.items() if of},
            }
            rows.append(row | common)
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", default="0.33.0", choices=["0.28.0", "0.33.0"])
    parser.add_argument(
        "--shape", type=fused_q_engine.shape, action="append", required=True, metavar="HEADS/INDEXER_HEADS"
    )
    parser.add_argument("--tokens", type=int, default=131072, help="length of the longest prompt")
    parser.add_argument("--live-tokens", type=int, default=131072, help="most tokens of a prompt in part 1")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--settled", type=int, default=3)
    parser.add_argument("--start", choices=["off", "on"], default="on", help="0.28.0: the engine's setting")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="0.28.0: checksums of the first engine")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for FILE")
    parser.add_argument("--memory", type=float, default=0.28, help="share of the card for each engine")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def trace(engine: Any, args: Any) -> list[dict[str, Any]]:
    """All parts for one shape."""
    import torch

    start = time.perf_counter()
    one_setting = decode_engine.compiled_line()
    settings = [args.start] if one_setting else ["off", "on"]
    counts = None if one_setting and args.start == "off" else live(engine, args)
    print(f"live: {counts} after {time.perf_counter() - start:.0f} s", flush=True)
    kept: dict[str, Any] = {}
    if args.keep and args.start == "on":  # the engine with off may be started at the same time
        kept = torch.load(waited_for(args.keep, args.wait), weights_only=False)
    runs = {}
    for kind, settled, number in (("free", False, args.runs), ("settled", True, args.settled)):
        found = record(engine, args, settled, number, settings)
        first = kept.get(kind) or {made["length"]: made for made in reversed(found)}
        if args.keep and kind not in kept:
            kept[kind] = first
        runs[kind] = compare(found, first)
        rows = rows_of(args, counts, runs)
        print(f"ties {kind}: after {time.perf_counter() - start:.0f} s", flush=True)
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            results_file.add(args.out, "fused_q", args.line, rows, replace=True)
    if args.keep and args.start == "off":
        torch.save(kept, args.keep.with_suffix(".part"))
        args.keep.with_suffix(".part").replace(args.keep)
    return rows


def waited_for(path: Path, seconds: float) -> Path:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit(f"error: {path} is not there; run the engine with --start off --keep first")
        time.sleep(0.5)
    return path


def main() -> int:
    args = parse()
    os.environ.update(fused_q_engine.ALONE)
    failed = 0
    for heads, index_heads in args.shape:
        of = SimpleNamespace(**vars(args) | {"heads": heads, "index_heads": index_heads, "hf_config": {}})
        of.llm = {"gpu_memory_utilization": args.memory, "max_num_seqs": 8, "max_num_batched_tokens": 16384}
        of.llm |= args.llm
        use(args.start)
        engine = e2e_prefill.Engine(of)
        for row in trace(engine, of):
            print(json.dumps(row), flush=True)
            failed |= row["case"].startswith("live ") and (row["ours"] or not row["counts"]["launches"])
            failed |= "ties=settled" in row["case"] and (row["baseline"] or row["ours"])
        fused_q_engine.stop(engine)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
