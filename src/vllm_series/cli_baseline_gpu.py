"""``series baseline gpu`` and ``gpu-kit``: upstream's GPU tests on a machine with a card."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from vllm_series import pins
from vllm_series.baseline import card as cards
from vllm_series.baseline import quarantine, render, store
from vllm_series.baseline.device_kit import make_kit
from vllm_series.baseline.diff import Diff
from vllm_series.baseline.diff import quarantine as mark
from vllm_series.baseline.gpu_plan import FILE_S, FLOOR, GpuPlan, card_name, gpu_plan, named
from vllm_series.baseline.modes import Mode
from vllm_series.baseline.outcome import Run
from vllm_series.baseline.plan import Plan, make_plan
from vllm_series.baseline.select import chosen, split_modes
from vllm_series.baseline.session import Options, Session, commit_of, confirmed, result_name
from vllm_series.errors import CheckFailed, TestRegression
from vllm_series.importer import odb
from vllm_series.ui import emit, json_option, say, workspace
from vllm_series.workspace import Workspace

MINUTES = 6.0
JOBS = 8

_modes = click.option(
    "--modes", default="off,on", show_default=True, help="Comma-separated modes beside upstream."
)
_files = click.option(
    "--select", "files", multiple=True, metavar="PATTERN", help="These tests instead of the plan's."
)
_also = click.option(
    "--also", multiple=True, metavar="PATTERN", help="These before the plan's, whatever they reach."
)
_minutes = click.option(
    "--minutes", type=float, default=MINUTES, show_default=True, help="Time on the card, for everything."
)
_jobs = click.option("--jobs", type=int, default=JOBS, show_default=True, help="Test files at a time.")
_file_s = click.option(
    "--file-seconds", type=float, default=FILE_S, show_default=True, help="Most that a file gets of one mode."
)
_kernels = click.option(
    "--kernels",
    type=click.Path(path_type=Path, exists=True, resolve_path=True),
    help="The compiled vllm/_dsa_C.so (default: the one of the installed wheel, if it has one).",
)
_card = click.option(
    "--card", default="h200", show_default=True, help="The card whose stored times are used."
)


def register(group: click.Group) -> None:
    """Add the commands to the group ``series baseline``."""
    group.add_command(kit_command)
    group.add_command(gpu_command)


def lease(
    ws: Workspace,
    plan: Plan,
    card: str,
    *,
    modes: int,
    minutes: float,
    jobs: int = JOBS,
    file_s: float = FILE_S,
    only: Sequence[str] | None = None,
    also: Sequence[str] = (),
    features: Sequence[Mode] = (),
) -> GpuPlan:
    """Plan a lease of a card: ``also`` and the files of the plan, or ``only`` these.

    A mode of ``features`` runs all of ``only``, but of a plan those tests alone that import what the
    feature's patches touch.
    """
    on_card, on_cpu = store.read(ws, plan.line, card), store.read(ws, plan.line)
    if only is not None:
        return named(plan, only, on_card, on_cpu, file_s, {mode.name: None for mode in features})
    touched = {mode.name: plan.features.get(mode.feature, frozenset()) for mode in features}
    return gpu_plan(
        plan,
        on_card,
        on_cpu,
        budget_s=60 * minutes,
        modes=modes,
        jobs=jobs,
        file_s=file_s,
        also=also,
        features=touched,
    )


def print_lease(plan: Plan, found: GpuPlan) -> None:
    """Show what a lease would run, in its order, and what does not fit."""
    reaches = {one.path: " ".join(one.reaches) for one in plan.tests}
    print(f"# {plan.line}: relevance, expected seconds a mode, limit, test < touched files that it imports")
    for one in found.files:
        whole = one.expected <= one.seconds
        limit = f"{one.seconds:.0f} s" if whole else f"{one.seconds:.0f} s and {one.sample} tests"
        also = "".join(f" +{mode}" for mode in one.features)
        print(
            f"{one.weight:6.3f} {one.expected:6.0f} s  {limit:19} {one.path}{also}"
            f"  < {reaches.get(one.path, '')}"
        )
    telling = [one for one in found.dropped if one.weight >= FLOOR]
    for one in telling:
        print(f"# does not fit into the time: {one.path} ({one.weight:.3f}, {one.expected:.0f} s)")
    if len(found.dropped) > len(telling):
        print(f"# nor do {len(found.dropped) - len(telling)} files of less relevance than {FLOOR}")


@click.command("gpu-kit")
@click.argument("line")
@_modes
@_files
@_also
@_kernels
@_minutes
@_jobs
@_file_s
@_card
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/gpu-baseline"), show_default=True)
@click.pass_context
def kit_command(
    ctx: click.Context,
    line: str,
    modes: str,
    files: tuple[str, ...],
    also: tuple[str, ...],
    kernels: Path | None,
    minutes: float,
    jobs: int,
    file_seconds: float,
    card: str,
    out: Path,
) -> None:
    """Make a folder that runs upstream's GPU tests on a machine without network, where LINE's vLLM is."""
    ws = workspace(ctx)
    with Session(ws, line, Options(1, "fresh")) as session:
        place = ws.root / out
        plan, found, names = _kit(
            session, modes, files, also, kernels, minutes, jobs, file_seconds, card, place
        )
    print_lease(plan, found)
    print(f"{place}: {len(found.files)} test files. On the GPU machine, with {line} on PYTHONPATH:")
    print(
        "  PYTHONPATH=KIT/packages:$PYTHONPATH python -m vllm_series.baseline.device --kit KIT --out OUT "
        f"--budget {60 * minutes:.0f} --jobs {jobs}"
    )
    print(f"then here: series baseline diff {line} --saved --results OUT --modes {','.join(names)}")


def _kit(
    session: Session,
    modes: str,
    files: Sequence[str],
    also: Sequence[str],
    kernels: Path | None,
    minutes: float,
    jobs: int,
    file_s: float,
    card: str,
    out: Path,
) -> tuple[Plan, GpuPlan, list[str]]:
    """Make the kit; returns the line's plan, what of it is in the kit, and its modes beside upstream."""
    ws, line = session.ws, session.line
    sites = session.site(patched=False), session.site(patched=True)
    plan = make_plan(ws, line, sites[0])
    names = session.modes(split_modes(modes))
    only = chosen(plan, "gpu", files, 0, sites[0].path) if files else None
    first = chosen(plan, "gpu", also, 0, sites[0].path) if also else ()
    wanted = [session.mode(one) for one in names]
    special = [mode for mode in wanted if mode.feature]
    found = lease(
        ws,
        plan,
        card,
        modes=1 + len(wanted) - len(special),
        minutes=minutes,
        jobs=jobs,
        file_s=file_s,
        only=only,
        also=first,
        features=special,
    )
    make_kit(ws, line, odb(ws), sites, found.files, wanted, kernels, out)
    return plan, found, names


@click.command("gpu")
@click.argument("lines", nargs=-1)
@_modes
@_files
@_also
@_kernels
@_minutes
@_jobs
@_file_s
@click.option("--python", help="The interpreter that has LINE's vLLM (default: PYTHON, or python3 on PATH).")
@click.option("--isolation", type=click.Choice(["auto", "fork", "fresh"]), default="auto", show_default=True)
@click.option("--store", "keep", is_flag=True, help="Keep the result in bench/results.")
@click.option("--verbose", is_flag=True, help="Also list what is broken upstream.")
@json_option
@click.pass_context
def gpu_command(
    ctx: click.Context,
    lines: tuple[str, ...],
    modes: str,
    files: tuple[str, ...],
    also: tuple[str, ...],
    kernels: Path | None,
    minutes: float,
    jobs: int,
    file_seconds: float,
    python: str | None,
    isolation: str,
    keep: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run upstream's GPU tests of LINE on this machine's card, on both trees, and compare node by node.

    Needs an interpreter in which vLLM of LINE is installed, upstream's or ours; it is not changed. Without
    LINE: the line of that vLLM.
    """
    ws = workspace(ctx)
    for line in lines:
        pins.load_pin(ws, line)
    interpreter = cards.find_python(python)
    names = list(dict.fromkeys(lines)) or [cards.line_of(interpreter, pins.lines(ws))]
    entries = quarantine.load(ws.root / "quarantine.toml", pins.lines(ws))
    machines = {line: cards.require(interpreter, line) for line in names}
    console, found = Console(stderr=as_json), list[tuple[Diff, tuple[Run, Run]]]()
    for line, machine in machines.items():
        card = card_name({"name": machine.gpu})
        say(f"{line}: {machine.gpu}, vLLM {machine.vllm} of {machine.python}")
        with Session(ws, line, Options(jobs, "fresh")) as session:
            out, place = session.root / "gpu", session.root / "gpu-kit"
            _, _, wanted = _kit(
                session, modes, files, also, kernels, minutes, jobs, file_seconds, card, place
            )
            _device(machine.python, place, out, session.root / "gpu-work", minutes, jobs, isolation)
            upstream, rows = Run.load(out / "upstream.json"), {}
            for mode in wanted:
                patched = Run.load(out / result_name(mode))
                again = confirmed(out / "confirmed.json", mode)
                diff = session.compare(upstream, patched, again=again, planned=list(patched.files))
                if not diff.exact:
                    mark(diff, entries)
                render.show(diff, console, broken=verbose)
                render.write_all(diff, (upstream, patched), ws.root / "build" / "baseline" / "reports")
                rows[mode] = store.diff_row(diff, patched, "gpu", commit_of(ws))
                found.append((diff, (upstream, patched)))
            if keep:
                say(f"stored: {store.write(ws, upstream, rows, card_name(upstream.fingerprint.get('gpu')))}")
    failing = [diff for diff, _ in found if diff.failing()]
    if as_json:
        emit({"ok": not failing, "diffs": [render.as_json(diff, runs) for diff, runs in found]}, as_json=True)
    quarantine.check_expired(entries, datetime.datetime.now(datetime.UTC).date())
    if failing:
        raise TestRegression(
            "; ".join(f"{diff.line} {diff.mode}: {len(diff.failing())} tests differ" for diff in failing),
            fix="read build/baseline/reports/*.md",
        )


def _device(
    python: Path, kit: Path, out: Path, work: Path, minutes: float, jobs: int, isolation: str
) -> None:
    (out / "confirmed.json").unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(kit / "packages"), os.environ.get("PYTHONPATH", ""))))
    argv = [str(python), "-m", "vllm_series.baseline.device", "--kit", str(kit), "--out", str(out)]
    argv += [
        "--work",
        str(work),
        "--budget",
        f"{60 * minutes:g}",
        "--jobs",
        str(jobs),
        "--isolation",
        isolation,
    ]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, check=False, cwd="/")
    if done.returncode:
        raise CheckFailed(
            f"the runner on the GPU ended with exit code {done.returncode}", fix="read what it printed above"
        )
