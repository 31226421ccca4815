"""Reports of a comparison: a table for the terminal, Markdown, JSON and JUnit files for CI."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_series.baseline.diff import Diff, Kind, Row
from vllm_series.baseline.outcome import Node, Run

SHOWN = (
    Kind.REGRESSION,
    Kind.MISSING,
    Kind.SKIP_CHANGED,
    Kind.FIXED,
    Kind.NEW,
    Kind.FLAKY,
    Kind.QUARANTINED,
    Kind.NOT_COMPARED,
    Kind.BROKEN_UPSTREAM,
)
ROWS = 40  # per kind in the table and the Markdown; the JSON holds all
_STYLE = {Kind.REGRESSION: "bold red", Kind.MISSING: "red", Kind.FLAKY: "yellow", Kind.FIXED: "green"}


def _says(node: Node | None) -> str:
    return "absent" if node is None else node.outcome + (f": {node.reason[:90]}" if node.reason else "")


def _again(row: Row) -> str:
    return ", ".join(f"{one}/{two}" for one, two in row.again)


def verdict(diff: Diff) -> str:
    """One line: what was compared and what came out."""
    failing = len(diff.failing())
    counts = diff.counts()
    bits = [f"{counts[kind]} {kind}" for kind in Kind if counts[kind]]
    want = "must equal upstream exactly" if diff.exact else "no regression allowed"
    state = f"FAILED ({failing} {'differs' if failing == 1 else 'differ'})" if failing else "ok"
    short = f"; {len(diff.unreached)} planned files were not reached" if diff.unreached else ""
    return f"{diff.line} {diff.mode}: {state}; {', '.join(bits) or 'nothing ran'}; {want}{short}"


def coverage(diff: Diff, ran: int) -> list[str]:
    """Say what of the plan did not run: one line each, none if everything did."""
    lines = []
    if diff.unreached:
        names = ", ".join(f"`{name}`" for name in diff.unreached[:ROWS])
        more = f" and {len(diff.unreached) - ROWS} more" if len(diff.unreached) > ROWS else ""
        lines.append(f"Not reached in the time that was given ({len(diff.unreached)} of "
                     f"{ran + len(diff.unreached)} planned files): {names}{more}.")  # fmt: skip
    for name, (number, every) in sorted(diff.samples().items()):
        lines.append(f"SAMPLED: `{name}`, {number} of {every} tests, the same ones on both trees.")
    return lines


#: How tests say that a package is not there.
_WANTED = re.compile(
    r"No module named '(?P<a>[\w.]+)'|could not import '(?P<b>[\w.]+)'"
    r"|\b(?P<c>[A-Za-z][\w-]+) is not installed"
)


def missing_packages(run: Run) -> dict[str, int]:
    """``{package: number of tests and files that wanted it}``: named once here, not once per test."""
    found: dict[str, int] = {}
    for node in run.nodes().values():
        said = _WANTED.search(node.reason)
        if said:
            name = (said["a"] or said["b"] or said["c"].lower()).split(".")[0]
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda row: (-row[1], row[0])))


def missing_line(run: Run) -> str:
    """One sentence that names them; empty if none is missing."""
    wanted = ", ".join(f"{name} ({number})" for name, number in missing_packages(run).items())
    return f"Packages that upstream's tests wanted and that are not installed: {wanted}." if wanted else ""


def show(diff: Diff, console: Console, *, broken: bool = False) -> None:
    """Print the table of what differs; what is broken upstream too only if asked."""
    table = Table(title=f"{diff.line}: {diff.mode} against upstream", title_justify="left", expand=False)
    for heading in ("kind", "test", "upstream", diff.mode, "re-runs (upstream/patched)"):
        table.add_column(heading, overflow="fold")
    for kind in SHOWN:
        if kind in (Kind.BROKEN_UPSTREAM, Kind.NOT_COMPARED) and not broken:
            continue
        rows = diff.of(kind)
        for row in rows[:ROWS]:
            cells = [Text(text) for text in (row.node, _says(row.before), _says(row.after), _again(row))]
            table.add_row(Text(kind.value, style=_STYLE.get(kind, "")), *cells)
        if len(rows) > ROWS:
            table.add_row(kind.value, Text(f"... and {len(rows) - ROWS} more (see the JSON)"), "", "", "")
    if table.row_count:
        console.print(table)
    console.print(Text(verdict(diff)))


def markdown(diff: Diff, runs: tuple[Run, Run]) -> str:
    """The report as Markdown."""
    before, after = runs
    lines = [f"## {diff.line}: `{diff.mode}` against upstream", "", verdict(diff), ""]
    if diff.forced:
        lines += ["**Forced although these differ:** " + "; ".join(diff.forced), ""]
    seconds = [round(sum(one.seconds for one in run.files.values())) for run in runs]
    machine = before.fingerprint
    lines += [
        f"{len(before.files)} files, {len(diff.rows)} tests; {seconds[0]} s upstream, "
        f"{seconds[1]} s {diff.mode}; "
        f"{machine.get('cpu')}, {machine.get('cores')} cores, torch {machine.get('torch')}, "
        f"Python {machine.get('python')}; trees {before.tree[:12]} and {after.tree[:12]}.",
        "",
        "| kind | tests | meaning |",
        "|---|---|---|",
    ]
    counts = diff.counts()
    lines += [f"| {kind} | {counts[kind]} | {MEANING[kind]} |" for kind in Kind]
    for kind in SHOWN:
        rows = diff.of(kind)
        if not rows:
            continue
        lines += ["", f"### {kind}", "", f"| test | upstream | {diff.mode} | re-runs |", "|---|---|---|---|"]
        for row in rows[:ROWS]:
            cells = [
                f"`{row.node}`",
                _says(row.before),
                _says(row.after),
                _again(row) + (f" {row.note}" if row.note else ""),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if len(rows) > ROWS:
            lines.append(f"| ... and {len(rows) - ROWS} more | | | |")
    for text in coverage(diff, len(after.files)):
        lines += ["", text]
    if missing_line(before):
        lines += ["", missing_line(before)]
    return "\n".join(lines) + "\n"


MEANING = {
    Kind.SAME: "same outcome, same skip reason",
    Kind.BROKEN_UPSTREAM: "fails on the pristine tree too: not ours",
    Kind.REGRESSION: "held upstream, fails patched, each time",
    Kind.FIXED: "fails upstream, passes patched",
    Kind.MISSING: "collected upstream only",
    Kind.NEW: "collected on the patched tree only",
    Kind.SKIP_CHANGED: "skipped on one side, or for another reason",
    Kind.NOT_COMPARED: "the file's time limit came first on one side",
    Kind.SAMPLED: "not in the sample of its file, on either side",
    Kind.FLAKY: "differed once, not in every re-run",
    Kind.QUARANTINED: "named in quarantine.toml",
}


def as_json(diff: Diff, runs: tuple[Run, Run]) -> dict[str, Any]:
    """The whole comparison as one JSON object; equal passes are counted, not listed."""
    before, after = runs
    return {
        "schema": 1,
        "line": diff.line,
        "mode": diff.mode,
        "exact": diff.exact,
        "ok": not diff.failing(),
        "forced": diff.forced,
        "fingerprint": before.fingerprint,
        "trees": {"upstream": before.tree, diff.mode: after.tree},
        "counts": diff.counts(),
        "failing": [row.node for row in diff.failing()],
        "missing_packages": missing_packages(before),
        "unreached": diff.unreached,
        "samples": {name: list(pair) for name, pair in diff.samples().items()},
        "rows": [
            {**asdict(row), "kind": row.kind.value, "first": row.first.value if row.first else None}
            for row in diff.rows
            if row.kind not in (Kind.SAME, Kind.SAMPLED)
        ],
    }


def junit(diff: Diff) -> bytes:
    """JUnit XML: a test case per node; what makes the comparison fail is a failure, the rest passes or is
    skipped."""
    bad = {id(row) for row in diff.failing()}
    suite = xml.Element("testsuite", name=f"{diff.line} {diff.mode}")
    skipped = 0
    for row in diff.rows:
        name = row.node.removeprefix(f"{row.file}::")
        seconds = f"{row.after.seconds if row.after else 0:.3f}"
        case = xml.SubElement(suite, "testcase", classname=row.file, name=name, time=seconds)
        text = (
            f"upstream {_says(row.before)}; {diff.mode} {_says(row.after)}; re-runs {_again(row) or 'none'}"
        )
        if id(row) in bad:
            xml.SubElement(case, "failure", type=row.kind.value, message=_xml_text(f"{row.kind}: {text}"))
        elif row.kind is not Kind.SAME or (row.after is not None and row.after.outcome == "skipped"):
            skipped += 1
            xml.SubElement(case, "skipped", message=_xml_text(f"{row.kind}: {text}"))
    suite.set("tests", str(len(diff.rows)))
    suite.set("failures", str(len(bad)))
    suite.set("skipped", str(skipped))
    found: bytes = xml.tostring(suite, encoding="utf-8", xml_declaration=True)
    return found


def _xml_text(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold."""
    return "".join(char if char >= " " or char in "\t\n" else "?" for char in text)


def write_all(diff: Diff, runs: tuple[Run, Run], folder: Path) -> list[Path]:
    """Write ``<line>-<mode>.{md,json,xml}`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{diff.line}-{diff.mode.replace(':', '-').replace('=', '-')}"
    paths = [folder / f"{stem}.{kind}" for kind in ("md", "json", "xml")]
    paths[0].write_text(markdown(diff, runs), encoding="utf-8")
    paths[1].write_text(json.dumps(as_json(diff, runs), indent=1) + "\n", encoding="utf-8")
    paths[2].write_bytes(junit(diff))
    return paths
