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
SCRATCH = Path("tests/rebase/scratch")
BEGIN, END = "<!-- begin: series rebase --table -->", "<!-- end: series rebase --table -->"


def measure(ws: Workspace, releases: Sequence[str] = RELEASES) -> dict[str, Any]:
    """Carry the oldest line forwards and the newest backwards, release by release and in one jump.

    The scratch patches of the tests go forwards as well: they hook what upstream moves, renames and removes.
    """
    oldest, newest = releases[0], releases[-1]
    runs: list[tuple[str, list[str], list[Step]]] = [
        (f"Line {oldest}, forwards", list(releases), trial.steps_of(ws, oldest)),
        (f"Line {newest}, backwards", list(reversed(releases)), trial.steps_of(ws, newest)),
    ]
    if (ws.root / SCRATCH / "series").is_file():
        steps = trial.steps_in(ws, oldest, ws.root / SCRATCH)
        runs.append((f"Scratch patches on {oldest}, forwards", list(releases), steps))
    chains = []
    for title, order, steps in runs:
        chains.append({"title": title, "pairs": chain(ws, order, steps), "jump": jump(ws, order, steps)})
        say(f"{title}: done")
    git = Git(ws.root).out("--version").split(" ")[2]
    return {"schema": 1, "machine": platform.machine(), "git": git, "chains": chains}


def chain(ws: Workspace, order: Sequence[str], steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Go from release to release; a patch that needs an edit ends where it does, the others go on."""
    rows = []
    for one, other in itertools.pairwise(order):
        done = trial.run(ws, steps, upstream.of_version(ws, one), upstream.of_version(ws, other))
        rows.append(_row(done.report))
        steps = done.steps
    return rows


def jump(ws: Workspace, order: Sequence[str], steps: Sequence[Step]) -> dict[str, Any]:
    done = trial.run(ws, steps, upstream.of_line(ws, order[0]), upstream.of_version(ws, order[-1]))
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
        rows += ["", f"{one['title']}:", ""]
        rows.append("| patch | " + " | ".join(f"{p['from']} -> {p['to']}" for p in pairs) + " |")
        rows.append("|---" * (len(pairs) + 1) + "|")
        for name in one["pairs"][0]["patches"]:
            cells = [p["patches"].get(name, {}).get("state", "-") for p in pairs]
            rows.append(f"| {name} | " + " | ".join(cells) + " |")
        rows.append("| seconds | " + " | ".join(f"{p['seconds']:.1f}" for p in pairs) + " |")
    return "\n".join(rows) + "\n\n"
