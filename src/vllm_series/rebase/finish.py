"""Writes the new line: pin, patches, series, upstreamed.toml, LOCK. Killed at any point it can simply be
repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_series import export_files, importer, lock, pin_add, stack
from vllm_series.errors import IntegrityError
from vllm_series.files import write_atomic
from vllm_series.git import Git
from vllm_series.pins import load_pin
from vllm_series.rebase import checks, record, render, saved, trial
from vllm_series.rebase.classify import Step
from vllm_series.rebase.model import Decision, Report
from vllm_series.rebase.saved import Saved
from vllm_series.rebase.upstream import Upstream
from vllm_series.ui import say
from vllm_series.workspace import Workspace


def write(
    ws: Workspace, now: Saved, new: Upstream, steps: Sequence[Step], tree: Git, report: Report
) -> Report:
    """Write the result of a rebase whose patches are all settled; return the report with what is left to
    mend.

    For a commit of a clone, which has no release to pin, patches and series go to ``build/<name>.patches``.

    Raises:
        IntegrityError: the written patches do not give the tree that was rebased.
    """
    by_name = {step.patch.name: step for step in steps}
    patches = [trial.fresh(tree, by_name[one.patch], one) for one in now.outcomes if one.commit]
    taken = [one for one in now.outcomes if one.decision is Decision.RECORDED]
    folder = ws.root / "build" / f"{now.new}.patches" if new.clone else ws.patches(now.new)
    if not new.clone and not (ws.pins / f"{now.new}.toml").is_file():
        pin_add.add(ws, now.new)
    for leftover in (*folder.glob(".*.tmp"), *ws.pins.glob(f".{now.new}.toml.*.tmp")):
        leftover.unlink(missing_ok=True)  # of a run that was killed while it wrote
    for patch in patches:
        write_atomic(folder / patch.name, patch.data)
    names = [patch.name for patch in patches]
    write_atomic(
        folder / "series",
        export_files.series_text(ws, now.old, names).replace(f"line {now.old}", f"line {now.new}"),
    )
    if text := record.text(ws, now.old, new, tree, taken, by_name):
        write_atomic(folder / record.NAME, text)
    unproven = record.without_proof(tree, new, taken, by_name)
    if new.clone:
        unproven += checks.unproven(ws, now.old, tree, new.base)
    else:
        unproven += checks.unproven(ws, now.new, tree, new.base)
        _lock(ws, now)
    report = replace(report, unproven=tuple(unproven))
    _write_report(saved.folder(ws) / f"{now.new}-report", report)
    say(
        f"wrote {folder.relative_to(ws.root)} ({len(patches)} patches)"
        + ("" if new.clone else f" and pins/{now.new}.toml")
    )
    return report


def _lock(ws: Workspace, now: Saved) -> None:
    made = stack.current(ws, load_pin(ws, now.new))
    store = importer.odb(ws)
    if store.tree_of(made.top) != store.tree_of(now.head):
        raise IntegrityError(
            f"the patches written to patches/{now.new} give another tree than the one that was rebased",
            fix=f"report this with your git version; the tree is in build/{now.new}.rebase",
        )
    lock.write(ws, lock.lock_of(ws, made))


def _write_report(stem: Path, report: Report) -> None:
    write_atomic(stem.with_name(stem.name + ".md"), render.markdown(report))
    write_atomic(stem.with_name(stem.name + ".json"), json.dumps(report.as_json(), indent=1) + "\n")
