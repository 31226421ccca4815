# SPDX-License-Identifier: Apache-2.0
"""One engine start of bench/e2e_decode.py: what is measured in it and written to files of raw results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Gives the file of a variant and a round.
Files = Callable[[str, int], Path]


@dataclass(frozen=True)
class Plan:
    """What an engine start is to do.

    Attributes:
        settings: for `decode_engine.Engine`.
        points: (batch, context), in the order in which they are measured.
        late_points: those at which a branch is held up.
        exact_points: those with a top-k whose result is determined.
        check_steps: tokens that each request of a check generates.
        variants: `decode_plan.Variant` of everything that takes turns in one engine.
    """

    settings: dict[str, Any]
    points: list[tuple[int, int]]
    late_points: list[tuple[int, int]]
    exact_points: list[tuple[int, int]]
    check_steps: int
    variants: list[Any]


def run(args: argparse.Namespace, plan: Plan, files: Files) -> None:
    """Start an engine and measure: one mode, which the environment sets, or all of them in turn."""
    engine, about_engine = start_engine(args, plan)
    if not args.in_process:
        one_mode(args, plan, engine, about_engine)
        return
    from decode_modes import Modes

    in_turn = check_in_turn if args.what == "check" else time_in_turn
    in_turn(args, plan, files, engine, Modes(engine.runner), about_engine)


def start_engine(args: argparse.Namespace, plan: Plan) -> tuple[Any, dict[str, Any]]:
    """Start an engine; what is known of it goes into every file of raw results."""
    import torch
    from decode_engine import Engine

    if not args.in_process and os.environ.get("VLLM_INDEXER_OVERLAP") == "auto":
        let_auto_act(args.auto_up_to, args.auto_weights)
    if args.what == "check" and args.exact_topk:
        import exact_topk

        exact_topk.install()
    engine = Engine(plan.settings, filled=args.what == "time", ordered=args.what == "check")
    device = torch.cuda.get_device_properties(0)
    return engine, {
        "start_seconds": engine.start_seconds,
        "graph_MiB": [size / 2**20 for size in engine.graph_bytes],
        "caches": engine.caches,
        "card": device.name,
        "torch": torch.__version__,
        "points": {},
    }


def finish(result: dict[str, Any], file: Path) -> None:
    """Complete the raw results of one file."""
    import torch
    import vllm.dsa

    result["peak_MiB"] = torch.cuda.max_memory_allocated() / 2**20
    result["overlap"] = vllm.dsa.info()["features"]["overlap"]
    result["complete"] = True
    file.write_text(json.dumps(result))


def one_mode(args: argparse.Namespace, plan: Plan, engine: Any, result: dict[str, Any]) -> None:
    """The mode that the engine was started with; the file is written after every point."""
    for context in args.context if args.what == "time" and args.prefill else ():
        result.setdefault("prefill_ms", {})[str(context)] = engine.prefill(context, args.prefill)
        args.child.write_text(json.dumps(result))
    for batch, context in plan.points:
        if args.what == "time":
            found = engine.time(batch, context, args.steps)
            if profiled(args, batch):
                found |= engine.profile(batch, context, args.profile)
        else:
            found = engine.check(batch, context, plan.check_steps)
        result["points"][f"B={batch} ctx={context}"] = found
        args.child.write_text(json.dumps(result))
        print(f"{args.what} B={batch} ctx={context} done", flush=True)
    if args.what == "check":
        from vllm.dsa import counters

        result["forks"] = counters.snapshot("overlap")
    if args.controls:
        import compiled_controls

        compiled_controls.measure(args, engine, plan, result)
    finish(result, args.child)


def teach(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """Let ``auto`` of this process know the rows made of ``found``."""
    import decode_rows
    import overlap_table
    from vllm.dsa.overlap import auto, measured

    card = auto.card_slug(found["off"][0]["card"])
    rows = decode_rows.time_rows(args, found)
    made = overlap_table.entries(overlap_table.collect([(args.line, card, rows)]))
    let_auto_act()
    measured.MEASURED = tuple(auto.Entry(*key, tuple(points), weights) for (*key, weights), points in made)
    print(f"auto: {measured.MEASURED}", flush=True)


def let_auto_act(up_to: int = 0, weights: str = "") -> None:
    """Let ``auto`` of this process do what was measured, checked or not: here it is what is looked at.

    Args:
        up_to: tokens up to which it does what it chose last, if that is more: also where it chose off.
        weights: with such weights (`vllm.dsa.overlap.auto.weights_kind`) it does as with unquantised ones.
    """
    from vllm.dsa import provenance
    from vllm.dsa.overlap import auto, measured

    auto.CHECKED_IN_ENGINE |= {provenance.read().line}
    entries = []
    for entry in measured.MEASURED:
        if weights:
            if entry.weights:
                continue
            entry = dataclasses.replace(entry, weights=weights)
        most = entry.chosen_up_to()
        if most and up_to > most:
            chosen = tuple(point for point in entry.points if point[0] <= most)
            entry = dataclasses.replace(entry, points=(*chosen, (up_to, chosen[-1][1])))
        entries.append(entry)
    measured.MEASURED = tuple(entries)


def profiled(args: argparse.Namespace, batch: int) -> bool:
    return bool(args.profile) and batch in (args.profile_batch or args.batch + args.long_batch)


def check_in_turn(
    args: argparse.Namespace, plan: Plan, files: Files, engine: Any, modes: Any, about_engine: dict[str, Any]
) -> None:
    """Every variant answers the same prompts; the mode itself is profiled once."""
    import exact_topk
    from vllm.dsa import counters

    if "auto" in args.modes:
        let_auto_act(args.auto_up_to, args.auto_weights)
    for name, mode, late, exact, _ in plan.variants:
        exact_topk.on = exact
        if exact:
            exact_topk.take()  # makes the counters, which no capture may do
        result = about_engine | {"points": {}}
        captured = modes.capture(name, mode, late)
        result |= {"graph_MiB": [captured["graph_MiB"]], "forks_of_capture": captured["forks"]}
        file = files(name, 0)
        for batch, context in plan.late_points if late else plan.exact_points if exact else plan.points:
            if exact:
                exact_topk.take()
            checked = engine.check(batch, context, plan.check_steps)
            if exact:
                checked["ties"] = exact_topk.take()
            result["points"][f"B={batch} ctx={context}"] = checked
            file.write_text(json.dumps(result))
        result["forks"] = counters.snapshot("overlap")
        if args.profile and not late and not exact:
            result["trace"] = engine.profile(16, 3000, args.profile)
        finish(result, file)
        print(f"check {name} done: {result['forks']}", flush=True)


def time_in_turn(
    args: argparse.Namespace, plan: Plan, files: Files, engine: Any, modes: Any, about_engine: dict[str, Any]
) -> None:
    """Every point is timed in all modes and rounds before the next one; the files are written after each."""
    fixed = [mode for mode in args.modes if mode != "auto" or args.known_auto]
    if args.known_auto:
        let_auto_act(args.auto_up_to, args.auto_weights)
    turns = [(mode, number) for number in range(args.rounds) for mode in fixed[:: 1 - 2 * (number % 2)]]
    results: dict[tuple[str, int], dict[str, Any]] = {}

    def capture(mode: str, number: int) -> None:
        captured = modes.capture(f"{mode} {number}", mode)
        own = {"points": {}, "graph_MiB": [captured["graph_MiB"]], "forks_of_capture": captured["forks"]}
        results[mode, number] = about_engine | own

    for mode, number in turns:
        capture(mode, number)

    def write() -> None:
        for (mode, number), result in results.items():
            files(mode, number).write_text(json.dumps(result))

    for batch, context in plan.points:
        point = f"B={batch} ctx={context}"
        for mode, number in turns:
            modes.use(f"{mode} {number}")
            results[mode, number]["points"][point] = engine.time(batch, context, args.steps)
        write()
        print(f"time {point} done", flush=True)
    if "auto" not in fixed and "auto" in args.modes:
        # It knows what was just measured, and then takes the place of every mode once more.
        teach(args, {mode: [results[mode, n] for n in range(args.rounds)] for mode in fixed})
        for number in range(args.rounds):
            capture("auto", number)
        for batch, context in plan.points:
            for number in range(args.rounds):
                modes.use(f"auto {number}")
                found = engine.time(batch, context, args.steps)
                results["auto", number]["points"][f"B={batch} ctx={context}"] = found
            write()
        print(f"time auto done: {results['auto', 0]['forks_of_capture']}", flush=True)
    # Only now, because a profiler that was once started slows the launches that follow.
    for batch, context in plan.points:
        if not profiled(args, batch):
            continue
        for mode in args.modes:
            modes.use(f"{mode} 0")
            found = engine.profile(batch, context, args.profile)
            results[mode, 0]["points"][f"B={batch} ctx={context}"] |= found
        write()
        print(f"profile B={batch} ctx={context} done", flush=True)
    for (mode, number), result in results.items():
        finish(result, files(mode, number))
