#!/usr/bin/env python3
"""Runs every feature's GPU tests and benchmarks (suites.toml) here and says in a table what happened.

Call it through `scripts/test.sh --gpu`, with the Python in which the wheel is installed (PYTHON=...). It
needs nothing but the standard library, torch, vLLM and pytest, and no network.

A feature that this card, this number of cards or this release does not have is reported as unsupported. A
test file of which nothing ran, a wheel without the kernels that a row needs, and a step that takes three
times its estimate count as failed.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import results_file
from catalog import ROOT, Machine, Step, SuiteError, commit, load, look, unsupported
from steps import FAILED, LEFT_OUT, OK, UNSUPPORTED, Row, run_step


def store(rows: list[Row], machine: Machine, out: Path) -> Path:
    """Write the rows to ``out/gpu-suite/<line>-<card>.json``; rows of other cases in the file stay."""
    path = out / "gpu-suite" / f"{machine.line}-{machine.card}.json"
    old = (results_file.read(path) or {"rows": []})["rows"]
    about = {
        "commit": commit(ROOT),
        "version": machine.version,
        "driver": machine.driver,
        "torch": machine.torch,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    fresh = [asdict(row) | about for row in rows if row.state != LEFT_OUT]
    kept = [row for row in old if row["case"] not in {one["case"] for one in fresh}]
    data = {
        "schema": 1,
        "kind": "suite",
        "feature": "gpu-suite",
        "line": machine.line,
        "card": machine.card,
        "rows": sorted(kept + fresh, key=lambda row: str(row["case"])),
        "notes": f"{machine.name}, {machine.cards} visible",
    }
    results_file.write(path, data)
    return path


def table(rows: list[Row]) -> str:
    """The rows as aligned text, and the totals."""
    lines = []
    width = max((len(row.case) for row in rows), default=0)
    for row in rows:
        counts = ", ".join(f"{number} {name}" for name, number in row.counts.items() if number)
        why = "; ".join(part for part in (counts, row.reason) if part)
        lines.append(f"{row.case:<{width}} {row.state:<11} {row.seconds:6.0f} s  {why}".rstrip())
    states = [row.state for row in rows]
    totals = ", ".join(
        f"{states.count(one)} {one}" for one in (OK, FAILED, UNSUPPORTED, LEFT_OUT) if one in states
    )
    return "\n".join([*lines, totals])


def listing(suites: dict[str, tuple[str, list[Step]]]) -> str:
    """What there is to run, for ``--list``."""
    lines = []
    for name, (title, steps) in suites.items():
        lines.append(f"{name}: {title}")
        for step in steps:
            cards = f", {step.gpus} GPUs" if step.gpus > 1 else ""
            where = f"capability {', '.join(step.capabilities)}{cards}, line {', '.join(step.lines)}"
            lines.append(f"  {step.name:<14} {step.seconds:4.0f} s  {where}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns 0 if nothing failed, 1 if something did, 2 if the suite cannot run here."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh --gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the suites; needs no card")
    parser.add_argument(
        "--select", action="append", default=[], metavar="NAME[:STEP]", help="only this; repeatable"
    )
    parser.add_argument(
        "--min-gpus", type=int, default=1, metavar="N", help="only what needs N cards or more"
    )
    parser.add_argument("--tests-only", action="store_true", help="leave the benchmarks out")
    parser.add_argument("--benches-only", action="store_true", help="leave the tests out")
    parser.add_argument(
        "--seconds", type=float, help="start no step whose estimate does not fit into what is left"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-results", help="folder for the JSON")
    args = parser.parse_args(argv)
    try:
        suites = load()
        if args.benches_only:
            suites = {n: (t, [s for s in steps if s.command]) for n, (t, steps) in suites.items()}
        if args.list:
            print(listing(suites))
            return 0
        steps = choose(suites, args.select, args.tests_only, args.min_gpus)
        machine = look()
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # `timeout`, a job's limit and Ctrl-C end the suite with these: the step's group must not outlive it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped from outside"))
    print(
        f"{machine.cards} x {machine.name}, vllm {machine.version}, torch {machine.torch}, "
        f"driver {machine.driver}"
    )
    out: Path = args.out.resolve()
    rows: list[Row] = []
    begun = time.monotonic()
    for step in steps:
        left = args.seconds - (time.monotonic() - begun) if args.seconds is not None else float("inf")
        if step.seconds > left and not unsupported(step, machine):
            rows.append(
                Row(
                    f"{step.suite} {step.name}",
                    LEFT_OUT,
                    f"{step.seconds:.0f} s do not fit into {max(left, 0):.0f} s",
                )
            )
            continue
        rows.append(run_step(step, machine, out, ROOT / "build/gpu-logs" / f"{step.suite}-{step.name}.log"))
        path = store(rows, machine, out)
    print("\n" + table(rows))
    if any(row.state != LEFT_OUT for row in rows):
        print(f"results: {path}")
    return int(any(row.state == FAILED for row in rows))


def choose(
    suites: dict[str, tuple[str, list[Step]]], select: list[str], tests_only: bool, min_gpus: int = 1
) -> list[Step]:
    """Return the steps that ``--select`` names (all without it).

    Raises:
        SuiteError: a name is unknown, or nothing is left to run.
    """
    every = [step for _, steps in suites.values() for step in steps]
    names = {step.suite for step in every} | {f"{step.suite}:{step.name}" for step in every}
    for name in select:
        if name not in names:
            raise SuiteError(f"there is no {name} in the GPU suite\n  fix: scripts/test.sh --gpu --list")
    chosen = [s for s in every if not select or s.suite in select or f"{s.suite}:{s.name}" in select]
    chosen = [step for step in chosen if (step.tests or not tests_only) and step.gpus >= min_gpus]
    if not chosen:
        raise SuiteError("no row fits all that was asked for\n  fix: scripts/test.sh --gpu --list")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
