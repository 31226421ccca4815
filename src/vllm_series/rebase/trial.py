"""Tries a whole series on another release in a throw-away tree: the report, the table and the canary are
made of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_series import export, importer, scratch, series, stack
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.pins import load_pin
from vllm_series.rebase import checks
from vllm_series.rebase.classify import Step, reset, try_patch
from vllm_series.rebase.model import Need, Outcome, Report, settle
from vllm_series.rebase.moves import History, Moves
from vllm_series.rebase.upstream import Upstream
from vllm_series.workspace import Workspace


@dataclass(frozen=True)
class Trial:
    """Report and, for the patches that got through, the steps to go on from on the new release."""

    report: Report
    steps: tuple[Step, ...]


def steps_of(ws: Workspace, line: str) -> list[Step]:
    """Return the line's patches with their commits; makes sure that all their blobs are in the object
    store."""
    made = stack.current(ws, load_pin(ws, line))
    return _steps(made, series.load(ws, line))


def steps_in(ws: Workspace, line: str, folder: Path) -> list[Step]:
    """Return patches that do not belong to the line, from a folder with a ``series`` file, on its upstream.

    Raises:
        CheckFailed: one does not apply.
    """
    rows = [row.strip() for row in (folder / "series").read_text(encoding="utf-8").splitlines()]
    names = [row for row in rows if row and not row.startswith("#")]
    patches = [series.parse(name, (folder / name).read_bytes()) for name in names]
    made = stack.build(ws, load_pin(ws, line), patches, {}, name=f"steps-{line}", complete=False)
    return _steps(made, patches)


def _steps(made: stack.Stack, patches: Sequence[series.Patch]) -> list[Step]:
    found, before = [], made.base
    for patch, (_, commit) in zip(patches, made.commits, strict=True):
        found.append(Step(patch, before, commit))
        before = commit
    return found


def sparse_paths(steps: Sequence[Step], moves: Moves) -> list[str]:
    """Return the files that a trial can touch."""
    found: set[str] = set()
    for path in {path for step in steps for path in step.patch.paths}:
        found.update(name for name in (path, moves.target(path).now) if name)
    return sorted(found)


def run(
    ws: Workspace,
    steps: Sequence[Step],
    old: Upstream,
    new: Upstream,
    *,
    history: History | None = None,
    accept: Iterable[str] = (),
    drop: Iterable[str] = (),
) -> Trial:
    """Try every step on ``new``, going on after those that a person would have to look at.

    Patches that only need a look are taken along, so that the later ones meet them; the others are left out,
    and a later patch that fails on a file of theirs says so.
    """
    begin = time.monotonic()
    moves = Moves(importer.odb(ws), old.base, new.base, new.version, history)
    outcomes: list[Outcome] = []
    kept: list[Step] = []
    absent: dict[str, str] = {}  # path -> patch that should have changed it
    name = f"trial-{new.line}"
    with (
        locked(ws.work / f"{name}.lock"),
        scratch.work_tree(importer.odb(ws), ws, new.base, name, sparse_paths(steps, moves)) as tree,
    ):
        head = new.base
        for step in steps:
            outcome = settle(try_patch(tree, head, step, moves), accept, drop)
            failed = outcome.need is Need.PERSON
            blame = sorted({absent[path] for path in step.patch.paths if path in absent})
            if failed and blame:
                note = f"may fail only because {', '.join(blame)} is not applied before it"
                outcome = replace(outcome, notes=(*outcome.notes, note))
            if outcome.commit:
                kept.append(Step(fresh(tree, step, outcome), head, outcome.commit))
                head = outcome.commit
            else:
                reset(tree, head)
            if failed:
                absent.update(dict.fromkeys(step.patch.paths, step.patch.name))
            outcomes.append(outcome)
    report = Report(
        old.as_json(), new.as_json(), tuple(outcomes), seconds=time.monotonic() - begin,
        unproven=tuple(checks.unproven(ws, old.line, importer.odb(ws), new.base)),
    )  # fmt: skip
    return Trial(report, tuple(kept))


def fresh(tree: Git, step: Step, outcome: Outcome) -> series.Patch:
    """Return the patch of the new release: the old message's bytes if it is the same, and the new diff."""
    made = series.parse(step.patch.name, tree.raw(*export.FORMAT, outcome.commit))
    old = step.patch
    if (made.subject, made.body, made.author) != (old.subject, old.body, old.author):
        return made
    start = old.data.find(b"\ndiff --git ") + 1
    return series.parse(old.name, old.data[:start] + series.diff_of(made.data))
