"""Runs the series over many pairs of releases and keeps states and seconds: the table in docs/rebase.md."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed
from vllm_series.files import write_atomic
from vllm_series.git import Git
from vllm_series.rebase import trial, upstream
from vllm_series.rebase.classify import Step
from vllm_series.rebase.model import Need, Report
from vllm_series.ui import say
from vllm_series.workspace import Workspace

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
RESULTS = Path("bench/results/rebase/pairs.json")
PAGE = Path("docs/rebase.md")
BEGIN, END = "<!-- begin: series rebase --table -->", "<!-- end: series rebase --table -->"


def measure(ws: Workspace, releases: Sequence[str] = RELEASES) -> dict[str, Any]:
    """Carry the oldest line forwards and the newest backwards, release by release and in one jump."""
    first, last = releases[0], releases[-1]
    chains = []
    for way, order in (("forwards", list(releases)), ("backwards", list(reversed(releases)))):
        line = order[0]
        chains.append(
            {"line": line, "way": way, "pairs": chain(ws, order), "jump": jump(ws, line, order[-1])}
        )
        say(f"line {line} {way}: done")
    git = Git(ws.root).out("--version").split(" ")[2]
    return {
        "schema": 1,
        "releases": [first, last],
        "machine": platform.machine(),
        "git": git,
        "chains": chains,
    }


def chain(ws: Workspace, order: Sequence[str]) -> list[dict[str, Any]]:
    """Go from release to release; a patch that needs an edit ends where it does, the others go on."""
    steps: Sequence[Step] = trial.steps_of(ws, order[0])
    rows = []
    for one, other in itertools.pairwise(order):
        done = trial.run(ws, steps, upstream.of_version(ws, one), upstream.of_version(ws, other))
        rows.append(_row(done.report))
        steps = done.steps
    return rows


def jump(ws: Workspace, line: str, to: str) -> dict[str, Any]:
    done = trial.run(ws, trial.steps_of(ws, line), upstream.of_line(ws, line), upstream.of_version(ws, to))
    return _row(done.report)


def _row(report: Report) -> dict[str, Any]:
    patches = {
        one.patch: {
            "state": one.state.value, "how": one.how, "detail": one.detail, "notes": list(one.notes),
            "ends": one.need is Need.PERSON,
        }
        for one in report.outcomes
    }  # fmt: skip
    return {
        "from": report.old["version"], "to": report.new["version"],
        "seconds": round(report.seconds, 1), "patches": patches,
    }  # fmt: skip


def save(ws: Workspace, data: dict[str, Any]) -> None:
    """Write the results and bring the page's table up to date."""
    write_atomic(ws.root / RESULTS, json.dumps(data, indent=1) + "\n")
    page = ws.root / PAGE
    write_atomic(page, with_table(page.read_text(encoding="utf-8"), data))


def load(ws: Workspace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ws.root / RESULTS).read_text(encoding="utf-8"))
    return found


def with_table(page: str, data: dict[str, Any]) -> str:
    """Return the page with the table between its two marks.

    Raises:
        CheckFailed: the marks are missing.
    """
    start, end = page.find(BEGIN), page.find(END)
    if start < 0 or end < start:
        raise CheckFailed(
            f"{PAGE} has lost the marks of its table", fix=f"put {BEGIN} and {END} back where it belongs"
        )
    return page[: start + len(BEGIN)] + "\n" + markdown(data) + page[end:]


def markdown(data: dict[str, Any]) -> str:
    """Return one table per chain: a row per patch, a column per pair, the seconds last."""
    rows = []
    for one in data["chains"]:
        pairs = [*one["pairs"], one["jump"]]
        rows += ["", f"Line {one['line']}, {one['way']}:", ""]
        rows.append("| patch | " + " | ".join(f"{p['from']} -> {p['to']}" for p in pairs) + " |")
        rows.append("|---" * (len(pairs) + 1) + "|")
        for name in one["pairs"][0]["patches"]:
            cells = [p["patches"].get(name, {}).get("state", "-") for p in pairs]
            rows.append(f"| {name} | " + " | ".join(cells) + " |")
        rows.append("| seconds | " + " | ".join(f"{p['seconds']:.1f}" for p in pairs) + " |")
    return "\n".join(rows) + "\n\n"
