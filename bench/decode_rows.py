# SPDX-License-Identifier: Apache-2.0
"""From the raw results of bench/e2e_decode.py to rows of bench/results."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import compiled_controls
import run_info
from decode_plan import points, variants


def case(args: argparse.Namespace, mode: str, phase: str, point: str) -> str:
    """The case of a row; its order is fixed for this feature."""
    head = f"mode={mode} phase={phase} heads={args.heads} index={args.index_heads} graph={args.graph}"
    extra = f" freq={args.index_topk_freq}" if args.index_topk_freq != 1 else ""
    extra += f" mtp={args.mtp}" if args.mtp else ""
    return f"{head} {point}{extra}{args.tag.replace('-', ' ')}"


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
                # The compiled line counts its two forks apart: "wk forked", "indexer forked".
                more["forked"] = sum(row["count"] for row in forks if row["outcome"].endswith("forked"))
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
    more = {"layers": args.layers} | ({"in_process": True} if args.in_process else {})
    return run_info.facts(args.commit, start.get("torch", "unknown")) | more
