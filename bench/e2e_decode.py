# SPDX-License-Identifier: Apache-2.0
"""Decode in the vLLM engine under several modes of the indexer's overlap: time, overlap, and equal results.

    python bench/e2e_decode.py time  --heads 16 --index-heads 64 --out bench/results/overlap/0.33.0-h200.json
    python bench/e2e_decode.py check --heads 16 --index-heads 64 --out bench/results/overlap/0.33.0-h200.json

A mode is fixed when a graph is captured, so each round starts one engine per mode, in turn (off, wk, full,
off, wk, full). One start measures all points. With ``--in-process`` (line 0.33.0) one engine captures the
graphs of every mode, as often as there are rounds, and they take turns at each point on the same prompts and
caches. What a start measured is kept in ``--raw`` and not measured again: a run that was cut off goes on
where it stopped, and rows are made of what is there. ``check`` prefills for real, sorts the ids of every
top-k and compares the hashes of all logits and all tokens with off.
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
import compiled_controls
import results_file
from decode_plan import EXACT_CHECKS, LATE_CHECKS, LONG, MODES, points, settings, variants
from decode_rows import about, check_rows, time_rows, varied


def environment(mode: str) -> dict[str, str]:
    return {"VLLM_INDEXER_OVERLAP": mode}


def raw_file(args: argparse.Namespace, mode: str, number: int) -> Path:
    name = (
        f"{args.what}-{args.line}-{args.heads}-{args.index_heads}-{args.graph}{args.tag}-{mode}-{number}.json"
    )
    return Path(args.raw, name)


def run_starts(args: argparse.Namespace) -> int:
    """Start the engines that are still missing, in turn. Returns how many failed."""
    failed = 0
    rounds = 1 if args.what == "check" else args.rounds
    Path(args.raw).mkdir(parents=True, exist_ok=True)
    if args.in_process:
        files = [raw_file(args, made.name, number) for made in variants(args) for number in range(rounds)]
        if all(file.is_file() and json.loads(file.read_text()).get("complete") for file in files):
            return 0
        command = [sys.executable, __file__, *sys.argv[1:], "--child", str(files[0])]
        return int(subprocess.run(command, env=os.environ | environment("off")).returncode != 0)
    for number in range(rounds):
        for mode in args.modes:
            file = raw_file(args, mode, number)
            if file.is_file() and json.loads(file.read_text()).get("complete"):
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--child", str(file)]
            print(f"start {mode} {number}", flush=True)
            failed += subprocess.run(command, env=os.environ | environment(mode)).returncode != 0
    return failed


def starts(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What was measured, by mode, in the order of the rounds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in [variant.name for variant in variants(args)]:
        files = [raw_file(args, name, number) for number in range(args.rounds)]
        found[name] = [json.loads(file.read_text()) for file in files if file.is_file()]
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def pairs(text: str) -> list[tuple[int, int]]:
    """``256x900,512x300`` as (batch, context)."""
    found = [part.split("x") for part in text.split(",") if part]
    return [(int(batch), int(context)) for batch, context in found]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "what", choices=["time", "check", "rows"], help="rows: make --out from --raw, start nothing"
    )
    made.add_argument("--of", choices=["time", "check"], default="time", help="with rows: of which of them")
    made.add_argument("--modes", type=lambda text: text.split(","), default=["off", "wk", "full"])
    made.add_argument("--line", default="0.33.0")
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--index-heads", type=int, default=64)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--index-topk-freq", type=int, default=1, help="every n-th layer has an indexer")
    made.add_argument("--mtp", type=int, default=0, metavar="N", help="speculate N tokens with an MTP layer")
    made.add_argument(
        "--graph", default="FULL", help="cudagraph_mode: FULL, FULL_AND_PIECEWISE, PIECEWISE, NONE"
    )
    made.add_argument("--batch", type=numbers, default=[1, 4, 16, 32, 64])
    made.add_argument("--context", type=numbers, default=[4096, 8192, 32768])
    made.add_argument("--long-batch", type=numbers, default=[1, 4], help=f"batches at {LONG} tokens")
    made.add_argument("--also", type=pairs, default=[], help="more points, of a check too: 256x900,512x300")
    made.add_argument("--steps", type=int, default=300, help="timed steps per point")
    made.add_argument("--profile", type=int, default=10, help="profiled steps per point after the timed ones")
    made.add_argument("--prefill", type=int, default=0, help="also time this many prefills per context")
    made.add_argument("--profile-batch", type=numbers, default=[], help="profile these batches only")
    made.add_argument("--rounds", type=int, default=2, help="engine starts per mode")
    made.add_argument("--in-process", action="store_true", help="all modes in one engine start")
    made.add_argument(
        "--late",
        type=lambda text: text.split(","),
        default=[],
        help="with check --in-process: also hold up a branch of the last mode (late_lane.LATE)",
    )
    made.add_argument(
        "--controls",
        type=lambda text: text.split(","),
        default=[],
        help=f"check on 0.28.0: compare each engine with itself too ({','.join(compiled_controls.NAMES)})",
    )
    made.add_argument(
        "--inductor", type=json.loads, default={}, metavar="JSON", help="Inductor's options, line 0.28.0"
    )
    made.add_argument("--check-steps", type=int, default=16, help="tokens of each request of a check")
    made.add_argument(
        "--off-passes", type=int, default=1, help="with check --in-process: how often off runs once more"
    )
    made.add_argument(
        "--exact-topk",
        action="store_true",
        help="with check --in-process: also with a top-k whose result is determined (exact_topk.py)",
    )
    made.add_argument(
        "--known-auto",
        action="store_true",
        help="with time --in-process: auto knows what is stored and takes turns with the others",
    )
    made.add_argument(
        "--auto-up-to",
        type=int,
        default=0,
        metavar="TOKENS",
        help="auto does up to so many tokens what it does at the most that were measured",
    )
    made.add_argument(
        "--auto-weights", default="", metavar="fp8", help="auto does with these what it does with unquantised"
    )
    made.add_argument("--hf-config", type=json.loads, default={}, metavar="JSON")
    made.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    made.add_argument("--raw", default="build/overlap-raw", help="folder of what each start measured")
    made.add_argument("--tag", default="", help="appended to the case, such as -mlp=256")
    made.add_argument("--commit", default="unknown")
    made.add_argument("--out", type=Path)
    made.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return made


def main(argv: list[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown or "off" not in args.modes:
        made.error(f"--modes is a list of {', '.join(MODES)} with off in it, not {','.join(args.modes)}")
    only_rows = args.what == "rows"
    args.what = args.of if only_rows else args.what
    if not args.in_process and (args.late or args.exact_topk or args.known_auto):
        made.error("--late, --exact-topk and --known-auto need --in-process")
    unknown = sorted(set(args.controls) - set(compiled_controls.NAMES))
    if unknown:
        made.error(f"--controls is a list of {', '.join(compiled_controls.NAMES)}, not {','.join(unknown)}")
    if args.child:
        import decode_child

        plan = decode_child.Plan(
            settings(args), points(args), LATE_CHECKS, EXACT_CHECKS, args.check_steps, variants(args)
        )
        decode_child.run(args, plan, lambda name, number: raw_file(args, name, number))
        return 0
    failed = 0 if only_rows else run_starts(args)
    found = starts(args)
    if not any(found.values()):
        print(f"error: {args.raw} holds nothing of this configuration", file=sys.stderr)
        return 1
    first = next(start for made_of in found.values() for start in made_of)
    made_rows = time_rows(args, found) if args.what == "time" else check_rows(args, found)
    rows = [row | about(args, first) for row in made_rows]
    for row in rows:
        print(json.dumps(row))
    if args.out:
        results_file.add(args.out, "overlap", args.line, rows, replace=False)
    if failed:
        print(f"error: {failed} engine starts failed; the same command repeats only those", file=sys.stderr)
        return 1
    if args.what == "check":
        if not varied(first):
            print("error: the logits do not vary: the model does nothing", file=sys.stderr)
            return 1
        # Where off differs from itself, a row of off says so; that is not the overlap's doing.
        return 0 if all(row["ours"] == 1.0 for row in rows if "mode=off " not in row["case"]) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
