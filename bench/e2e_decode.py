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
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compiled_controls
import results_file

MODES = ("off", "wk", "full", "native", "auto")
#: Context of --long-batch, tokens of a cache block, and (batch, context) of the points of a check.
LONG = 131072
BLOCK = 64
CHECKS = [(1, 700), (4, 3000), (16, 3000), (64, 900), (3, 20), (2, 20000)]
#: Those of them at which a branch is held up (``--late``).
LATE_CHECKS = [(1, 700), (16, 3000), (3, 20)]
#: Those at which it runs with a top-k whose result is determined (``--exact-topk``).
EXACT_CHECKS = [(16, 3000), (2, 20000)]


class Variant(NamedTuple):
    """Something that an engine start runs.

    Attributes:
        name: is in that of the raw results.
        mode: one of `MODES`.
        late: which branch is held up, see `decode_modes.LATE`.
        exact: whether the top-k is exact_topk's.
        again: off for the n-th time after the first: what differs there is not the overlap's doing.
    """

    name: str
    mode: str
    late: str = ""
    exact: bool = False
    again: int = 0


def points(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Batch and context of every point, in the order in which they are measured."""
    if args.what == "check":
        return CHECKS
    found = [(batch, context) for context in args.context for batch in args.batch]
    return found + [(batch, LONG) for batch in args.long_batch]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `decode_engine.Engine` needs to know."""
    wanted = points(args)
    per_step = 1 + args.mtp
    room = (args.check_steps if args.what == "check" else args.steps + args.profile + 64) * per_step
    blocks = max(batch * (-(-(context + room) // BLOCK)) for batch, context in wanted)
    hf = dict(args.hf_config)
    if args.index_topk_freq != 1:
        hf["index_topk_freq"] = args.index_topk_freq
    # Only the blocks that are used, in case of two cache groups: filling all of a card's memory takes long.
    llm = {"num_gpu_blocks_override": 2 * blocks + 64} | args.llm
    if args.mtp:
        hf["num_nextn_predict_layers"] = 1
        llm["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.mtp}
    return {
        "heads": args.heads,
        "index_heads": args.index_heads,
        "layers": args.layers,
        "max_len": max(context for _, context in wanted) + room + 64,
        "per_step": per_step,
        "batches": sorted({batch for batch, _ in wanted}),
        "graph": args.graph,
        "inductor": args.inductor,
        "hf": hf,
        "llm": llm,
    }


def environment(mode: str) -> dict[str, str]:
    return {"VLLM_INDEXER_OVERLAP": mode}


def variants(args: argparse.Namespace) -> list[Variant]:
    """Everything that is run, in turn."""
    found = [Variant(mode, mode) for mode in args.modes]
    if args.what == "check" and args.in_process:
        for number in range(1, args.off_passes + 1):
            found.append(Variant(f"off+again{number if number > 1 else ''}", "off", again=number))
        found += [Variant(f"{args.modes[-1]}+{where}", args.modes[-1], where) for where in args.late]
        if args.exact_topk:
            found += [Variant(f"{mode}+exact", mode, exact=True) for mode in args.modes]
            found.append(Variant("off+again+exact", "off", exact=True, again=1))
    return found


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


def case(args: argparse.Namespace, mode: str, phase: str, point: str) -> str:
    """The case of a row; its order is fixed for this feature."""
    head = f"mode={mode} phase={phase} heads={args.heads} index={args.index_heads} graph={args.graph}"
    extra = f" freq={args.index_topk_freq}" if args.index_topk_freq != 1 else ""
    extra += f" mtp={args.mtp}" if args.mtp else ""
    return f"{head} {point}{extra}{args.tag.replace('-', ' ')}"


def starts(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What was measured, by mode, in the order of the rounds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in [variant.name for variant in variants(args)]:
        files = [raw_file(args, name, number) for number in range(args.rounds)]
        found[name] = [json.loads(file.read_text()) for file in files if file.is_file()]
    return found


def ratio_row(
    where: str, metric: str, unit: str, a: list[float], b: list[float], runs: int
) -> dict[str, Any]:
    """A row of medians over engine starts; ``ratio`` > 1: ours is better."""
    baseline, ours = statistics.median(a), statistics.median(b)
    return {
        "case": where,
        "metric": metric,
        "unit": unit,
        "baseline": baseline,
        "ours": ours,
        "ratio": baseline / ours if ours else None,
        "runs": runs,
        "baseline_starts": a,
        "ours_starts": b,
    }


def time_rows(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of every mode against off, and of off's starts against each other (``mode=off``: the noise)."""

    def values(mode: str, point: str, what: str) -> list[float]:
        runs = [start["points"].get(point, {}) for start in found.get(mode, [])]
        # Eager steps have no graph, traces of the compiled line no blocks.
        kept = [run[what] for run in runs if run.get(what, []) != []]
        return [statistics.median(value) if isinstance(value, list) else value for value in kept]

    rows = []
    for batch, context in points(args):
        point = f"B={batch} ctx={context}"
        for mode in args.modes:
            where = case(args, mode, "decode", point)
            for what, metric, unit in (
                ("graph_us", "graph", "us"),
                ("step_us", "step", "us"),
                ("block_us", "attention block", "us"),
            ):
                off, ours = values("off", point, what), values(mode, point, what)
                if mode == "off":
                    off, ours = off[0::2], off[1::2]
                if off and ours:
                    rows.append(ratio_row(where, metric, unit, off, ours, args.steps * len(ours)))
            if mode == "off" or not args.profile:
                continue
            off, ours = values("off", point, "together"), values(mode, point, "together")
            if off and ours:
                row = ratio_row(where, "overlap fraction", "1", off, ours, args.profile)
                rows.append(row | {"ratio": None, "streams": values(mode, point, "streams")})
    rows += prefill_rows(args, found)
    for mode in args.modes:
        off = [sum(start["graph_MiB"]) for start in found.get("off", [])]
        ours = [sum(start["graph_MiB"]) for start in found.get(mode, [])]
        if mode != "off" and off and ours:
            rows.append(
                ratio_row(case(args, mode, "decode", "B=all ctx=all"), "graph_MiB", "MiB", off, ours, 1)
            )
    return rows


def prefill_rows(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of one prompt's prefill: medians of each start, by the clock; off against itself too."""

    def values(mode: str, context: int) -> list[float]:
        runs = [start.get("prefill_ms", {}).get(str(context)) for start in found.get(mode, [])]
        return [statistics.median(run) for run in runs if run]

    rows = []
    for context in args.context:
        for mode in args.modes:
            off, ours = values("off", context), values(mode, context)
            if mode == "off":
                off, ours = off[0::2], off[1::2]
            if off and ours:
                where = case(args, mode, "prefill", f"B=1 ctx={context}")
                rows.append(ratio_row(where, "prefill", "ms", off, ours, args.prefill * len(ours)))
    return rows


def check_rows(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Two rows per mode and point: share of steps with the bits of off's logits; whether all tokens agree.

    Off may run several times, as a control. A mode is compared with all of its passes and the best one
    counts, the same for both rows; ``off_passes`` has the shares. Off's own rows say how far its passes agree
    with the first. ``forked`` is how many passes of a layer forked, in capture and when run. Passes whose
    top-k is determined (``topk=exact``) are compared among themselves.
    """
    rows = []
    ran = [variant for variant in variants(args) if found.get(variant.name)]
    for name, mode, late, exact, again in ran:
        passes = [v.name for v in ran if v.mode == "off" and v.exact is exact and (v.again == 0 or not again)]
        if name in passes:
            continue
        for point, ours in found[name][0]["points"].items():
            offs = [found[off][0]["points"].get(point) for off in passes]
            against = [agreement(off, ours) for off in offs if off is not None]
            if not against:
                continue
            share, tokens = max(against)
            more = {"off_passes": [pair[0] for pair in against]} if len(against) > 1 else {}
            if "forks" in found[name][0]:
                forks = found[name][0]["forks"]
                more["forked"] = sum(row["count"] for row in forks if row["outcome"] == "forked")
            more |= {"ties": ours["ties"]} if "ties" in ours else {}
            if not args.in_process and offs[0] is not None:
                more |= compiled_controls.differences(offs[0], ours)
            where = case(args, mode, "check", point) + (f" late={late}" if late else "")
            where += " topk=exact" if exact else ""
            where += f" pass={again}" if again > 1 else ""
            for metric, value in (("equal logits", share), ("equal tokens", tokens)):
                rows.append(
                    {
                        "case": where,
                        "metric": metric,
                        "unit": "1",
                        "baseline": 1.0,
                        "ours": value,
                        "ratio": value,
                        "runs": len(ours["logits"]),
                    }
                    | more
                )
    own = {mode: found.get(mode, []) for mode in args.modes}
    return rows + compiled_controls.rows(own, lambda mode, point: case(args, mode, "check", point), agreement)


def agreement(off: dict[str, Any], ours: dict[str, Any]) -> tuple[float, float]:
    """Share of steps whose logits have the same bits, and 1.0 if all tokens are equal, else 0.0."""
    same = sum(a == b for a, b in zip(off["logits"], ours["logits"], strict=False))
    steps = max(len(off["logits"]), len(ours["logits"]))
    return same / steps, float(off["tokens"] == ours["tokens"])


def varied(start: dict[str, Any]) -> bool:
    """Whether the model of a check does anything: logits differ from step to step and within a step."""
    rows = [row.split() for point in start["points"].values() for row in point["logits"]]
    return len({row[0] for row in rows}) > len(rows) // 2 and all(float(row[1]) > 0 for row in rows)


def about(args: argparse.Namespace, start: dict[str, Any]) -> dict[str, Any]:
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True).stdout.split("\n")[0]
    except FileNotFoundError:
        driver = "unknown"
    return {
        "commit": args.commit,
        "driver": driver,
        "torch": start.get("torch", "unknown"),
        "date": datetime.date.today().isoformat(),
        "layers": args.layers,
    } | ({"in_process": True} if args.in_process else {})


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


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
        help="with check --in-process: also hold up a branch of the last mode (decode_modes.LATE)",
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
