"""``series baseline``: upstream's own tests on the pristine and on the patched tree."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vllm_series import cli_baseline_gpu, envs, pins
from vllm_series.baseline import quarantine, render, store
from vllm_series.baseline.diff import Diff
from vllm_series.baseline.engine import Limits
from vllm_series.baseline.gpu_plan import card_name
from vllm_series.baseline.outcome import BAD, Run
from vllm_series.baseline.plan import Plan, make_plan
from vllm_series.baseline.progress import Shares
from vllm_series.baseline.select import SETS, chosen, split_modes
from vllm_series.baseline.session import Options, Session, commit_of, confirmed, result_name, sdist_of
from vllm_series.errors import CheckFailed, TestRegression, UsageError
from vllm_series.git import Git
from vllm_series.runtime import pristine_site
from vllm_series.ui import emit, json_option, say, workspace
from vllm_series.workspace import Workspace

SHORT_BUDGET_S = 75.0  # with two lines and three modes each: within the 13 minutes that test.sh gives it

_set = click.option(
    "--set", "which", type=click.Choice(SETS), default="short", show_default=True, help="Which files."
)
_files = click.option(
    "--select",
    "files",
    multiple=True,
    metavar="PATTERN",
    help="These instead: a test file, or a folder, wildcard or part of a name among the planned files.",
)
_resume = click.option(
    "--resume", is_flag=True, help="Take over what the saved runs of the same trees and settings have."
)
_minutes = click.option(
    "--minutes", type=float, help="Time for everything: what is most telling runs first, the rest is named."
)
_budget = click.option(
    "--budget",
    type=float,
    default=SHORT_BUDGET_S,
    show_default=True,
    help="Seconds of test time of the short set.",
)
_jobs = click.option(
    "--jobs", type=int, default=min(2, os.cpu_count() or 1), show_default=True, help="Files at a time."
)
_test_s = click.option(
    "--test-seconds", type=float, default=120, show_default=True, help="Limit of one test."
)
_file_s = click.option(
    "--file-seconds", type=float, default=300, show_default=True, help="Limit of one file."
)
_isolation = click.option(
    "--isolation", type=click.Choice(["fork", "fresh"]), default="fork", show_default=True,
    help="Fork each file from a process that has vLLM imported, or start an interpreter.",
)  # fmt: skip


@click.group("baseline")
def baseline() -> None:
    """Run upstream's own tests on the pristine and on the patched tree, and show what differs."""


def register(group: click.Group) -> None:
    """Add the commands of this area to the tool's group."""
    group.add_command(baseline)
    cli_baseline_gpu.register(baseline)


def _lines(ws: Workspace, given: tuple[str, ...]) -> list[str]:
    for line in given:
        pins.load_pin(ws, line)
    return list(dict.fromkeys(given)) or pins.lines(ws)


@baseline.command("plan")
@click.argument("line")
@click.option(
    "--all", "everything", is_flag=True, help="Also tests that only one of upstream's CI jobs names."
)
@click.option("--gpu", is_flag=True, help="What a lease of a Hopper card is spent on: files, time, samples.")
@click.option("--card", default="h200", show_default=True, help="Whose stored times --gpu uses.")
@_minutes
@_budget
@json_option
@click.pass_context
def plan_command(
    ctx: click.Context,
    line: str,
    everything: bool,
    gpu: bool,
    card: str,
    minutes: float | None,
    budget: float,
    as_json: bool,
) -> None:
    """Show which of upstream's tests concern what the patches of LINE touch, and what they need."""
    ws = workspace(ctx)
    pins.load_pin(ws, line)
    plan = make_plan(ws, line, pristine_site(ws, line))
    short = plan.short(budget)
    data: dict[str, Any] = {
        "line": line,
        "touched": plan.touched,
        "short": short,
        "steps": [asdict(step) for step in plan.steps],
        "tests": [
            {**asdict(one), "others": sorted(one.others)} for one in plan.tests if everything or one.distance
        ],
    }
    if gpu:
        lease = cli_baseline_gpu.lease(ws, plan, card, modes=3, minutes=minutes or cli_baseline_gpu.MINUTES)
        data["gpu"] = {
            "files": [asdict(one) for one in lease.files],
            "dropped": [asdict(one) for one in lease.dropped],
        }
        if not as_json:
            cli_baseline_gpu.print_lease(plan, lease)
            return
    if as_json:
        emit(data, as_json=True)
        return
    _print_plan(plan, short, everything)


def _print_plan(plan: Plan, short: list[str], everything: bool) -> None:
    console = Console()
    console.print(f"{plan.line}: the patches touch {len(plan.touched)} upstream files")
    for name in plan.touched:
        console.print(f"  {name}", highlight=False)
    table = Table(title="upstream's CI jobs that this change would start", title_justify="left")
    for heading in ("area", "job", "device", "GPUs", "tests"):
        table.add_column(heading)
    for step in plan.steps:
        table.add_row(step.area, step.label, step.device, str(step.gpus), " ".join(step.tests[:3]))
    console.print(table)
    table = Table(title="tests, the nearest first; * is in the short set", title_justify="left")
    for heading in ("", "needs", "distance", "test", "passed", "s", "evidence"):
        table.add_column(heading)
    chosen = set(short)
    for one in plan.tests:
        if one.distance or everything:
            seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
            star, away = "*" if one.path in chosen else "", str(one.distance or "CI")
            table.add_row(
                star, one.need.kind, away, one.path, str(one.passed or ""), seconds, one.need.evidence
            )
    console.print(table)


@baseline.command("env")
@click.argument("line")
@click.option("--relock", metavar="DATE", help="Resolve the versions anew, as packages stood on this day.")
@click.pass_context
def env_command(ctx: click.Context, line: str, relock: str | None) -> None:
    """Make the torch environment of LINE and print its Python."""
    ws = workspace(ctx)
    pins.load_pin(ws, line)
    if relock:
        print(envs.relock(ws, line, sdist_of(ws, line), relock))
    else:
        print(envs.torch_env(ws, line))


@baseline.command("run")
@click.argument("line")
@click.option(
    "--mode", default="upstream", show_default=True, help="upstream, off, on or a feature: <id>[=value]."
)
@_set
@_files
@_budget
@_jobs
@_test_s
@_file_s
@_isolation
@_resume
@_minutes
@click.option(
    "--store", "keep", is_flag=True, help="Keep the result in bench/results (mode upstream, --set full)."
)
@json_option
@click.pass_context
def run_command(
    ctx: click.Context,
    line: str,
    mode: str,
    which: str,
    files: tuple[str, ...],
    budget: float,
    jobs: int,
    test_seconds: float,
    file_seconds: float,
    isolation: str,
    resume: bool,
    minutes: float | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Run upstream's tests of LINE in one mode and save the result."""
    ws = workspace(ctx)
    if keep and (mode != "upstream" or which != "full" or files):
        raise UsageError("--store keeps full runs of the pristine tree", fix="use --mode upstream --set full")
    options = Options(jobs, isolation, Limits(test_seconds, file_seconds), gpu=which == "gpu")
    with Session(ws, line, options) as session:
        tree = session.site(patched=False)
        names = session.modes([mode]) or ["upstream"]
        if len(names) != 1:
            raise UsageError(f"{mode} is {len(names)} modes", fix=f"take one of: {', '.join(names)}")
        name = names[0]
        wanted = chosen(make_plan(ws, line, tree), which, files, budget, tree.path)
        run = session.run(name, wanted, resume=resume, seconds=None if minutes is None else 60 * minutes)
        path = session.result_path(name)
        if keep:
            path = store.write(ws, run, {})
    data = {
        "line": line,
        "mode": name,
        "files": len(run.files),
        "planned": len(wanted),
        "counts": run.counts(),
        "result": str(path),
    }
    reached = f"{len(run.files)} of {len(wanted)} files"
    emit(data, as_json=as_json, text=f"{line} {name}: {reached}, {json.dumps(run.counts())} -> {path}")


@baseline.command("try")
@click.argument("line")
@click.argument("nodes", nargs=-1, required=True)
@click.option("--mode", default="on", show_default=True, help="off, on or feature:<id>[=value].")
@click.option("--commit", help="A commit of the object store (default: the tree that `series bisect` laid).")
@_test_s
@_isolation
@click.pass_context
def try_command(
    ctx: click.Context,
    line: str,
    nodes: tuple[str, ...],
    mode: str,
    commit: str | None,
    test_seconds: float,
    isolation: str,
) -> None:
    """Run upstream's test NODES on one tree of LINE; exit code 7 if one fails. For bisection:

    series bisect LINE -- series baseline try LINE NODE
    """
    ws = workspace(ctx)
    tree = os.environ.get("SERIES_BISECT_TREE")
    only: dict[str, list[str]] = {}
    for node in nodes:
        only.setdefault(node.partition("::")[0], []).extend([node] if "::" in node else [])
    with Session(ws, line, Options(1, isolation, Limits(test_seconds))) as session:
        if commit or tree:
            session.use_commit(commit or Git(Path(str(tree))).out("rev-parse", "HEAD"))
        found = session.again(mode)(only) or {}
    lost = [node for node in nodes if node not in found and "::" in node]
    bad = [f"{name}: {one.outcome} {one.reason}" for name, one in found.items() if one.outcome in BAD]
    for name, one in found.items():
        print(f"{one.outcome:8} {name}")
    if bad or lost or not found:
        raise TestRegression(
            "; ".join([*bad, *(f"{node}: not collected" for node in lost)]) or "no test was collected",
            fix=f"series bisect {line} -- series baseline try {line} {nodes[0]!r} finds the patch",
        )


@baseline.command("diff")
@click.argument("lines", nargs=-1)
@click.option(
    "--modes",
    default="off,on",
    show_default=True,
    help="Comma-separated: off, on, a feature as <id>[=value], `features` for one of each.",
)
@_set
@_files
@_budget
@_jobs
@_test_s
@_file_s
@_isolation
@_resume
@_minutes
@click.option("--saved", is_flag=True, help="Compare the saved runs, run nothing but what differs.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of saved runs (of another machine).",
)
@click.option("--no-confirm", is_flag=True, help="Do not run differing tests again.")
@click.option("--force", is_flag=True, help="Compare runs of different machines or settings.")
@click.option("--store", "keep", is_flag=True, help="Keep the result in bench/results (--set full).")
@click.option("--verbose", is_flag=True, help="Also list what is broken upstream.")
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context,
    lines: tuple[str, ...],
    modes: str,
    which: str,
    files: tuple[str, ...],
    budget: float,
    jobs: int,
    test_seconds: float,
    file_seconds: float,
    isolation: str,
    resume: bool,
    minutes: float | None,
    saved: bool,
    results: Path | None,
    no_confirm: bool,
    force: bool,
    keep: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run upstream's tests on both trees of LINES (default: all) and compare node by node.

    Exit code 7: a test that holds on the pristine tree does not hold on the patched one.
    """
    ws = workspace(ctx)
    names = _lines(ws, lines)
    entries = quarantine.load(ws.root / "quarantine.toml", pins.lines(ws))
    if not [one for one in split_modes(modes) if one != "upstream"]:
        raise UsageError("no mode to compare with upstream", fix="pass --modes off,on")
    # Runs that came from a machine with a card are compared here without one.
    on_card = which == "gpu" and results is None
    options = Options(jobs, isolation, Limits(test_seconds, file_seconds), gpu=on_card)
    if results is not None and (not saved or len(names) != 1):
        raise UsageError("--results compares saved runs of one line", fix="add --saved and name the line")
    console, found = Console(stderr=as_json), list[tuple[Diff, tuple[Run, Run]]]()
    shares, commit = Shares(minutes, len(names)), commit_of(ws)
    for line in names:
        with Session(ws, line, options) as session:
            wanted = session.modes(split_modes(modes))
            shares.modes(1 + len(wanted))
            files_of: list[str] = []
            if not saved:
                tree = session.site(patched=False)
                files_of = chosen(make_plan(ws, line, tree), which, files, budget, tree.path)
            place = results if results is not None else session.root

            def run(mode: str, names: Sequence[str], session: Session = session) -> Run:
                return session.run(mode, names, resume=resume, seconds=shares.next())

            upstream = Run.load(place / "upstream.json") if saved else run("upstream", files_of)
            if render.missing_line(upstream):
                say(f"{line}: {render.missing_line(upstream)}")
            rows: dict[str, dict[str, Any]] = {}
            for mode in wanted:
                # What upstream's run did not reach cannot be compared.
                patched = Run.load(place / result_name(mode)) if saved else run(mode, list(upstream.files))
                again = confirmed(results / "confirmed.json", mode) if results is not None else None
                planned = None if saved else files_of
                if results is not None:  # there a mode of one feature runs some of the files
                    planned = list(patched.files)
                diff = session.compare(
                    upstream,
                    patched,
                    confirm=not no_confirm,
                    force=force,
                    again=again,
                    planned=planned,
                )
                quarantine_rows(diff, entries)
                render.show(diff, console, broken=verbose)
                render.write_all(diff, (upstream, patched), ws.root / "build" / "baseline" / "reports")
                rows[mode] = store.diff_row(diff, patched, store.SELECTED if files else which, commit)
                found.append((diff, (upstream, patched)))
                if keep:  # after each mode: a long run that is cut off has stored what it knows
                    also = None if saved else Run.load(session.result_path("upstream"))
                    store.write(ws, upstream, rows, card_name(upstream.fingerprint.get("gpu")), also)
    failing = [diff for diff, _ in found if diff.failing()]
    if as_json:
        emit({"ok": not failing, "diffs": [render.as_json(diff, runs) for diff, runs in found]}, as_json=True)
    quarantine.check_expired(entries, datetime.datetime.now(datetime.UTC).date())
    if failing:
        raise TestRegression(
            "; ".join(f"{diff.line} {diff.mode}: {len(diff.failing())} tests differ" for diff in failing),
            fix=f"read build/baseline/reports/*.md; the patch: {_bisect_command(failing[0])}",
        )
    if not any(diff.rows for diff, _ in found):
        raise CheckFailed("no test ran", fix="series baseline plan LINE shows what there is to run")


def _bisect_command(diff: Diff) -> str:
    node = diff.failing()[0].node
    return f"series bisect {diff.line} -- series baseline try {diff.line} --mode {diff.mode} {node!r}"


def quarantine_rows(diff: Diff, entries: list[quarantine.Entry]) -> None:
    """Apply quarantine.toml, except to the exact mode: there a difference is a difference."""
    from vllm_series.baseline.diff import quarantine as mark

    if not diff.exact:
        mark(diff, entries)
