"""Reads pytest-reportlog's JSONL into one outcome per node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_series.baseline.outcome import Node

#: Things that differ between two runs of the same test and say nothing.
_NOISE = (
    (re.compile(r"0x[0-9a-fA-F]{4,}"), "0x"),
    (re.compile(r"/tmp/[^\s'\",)]+"), "<tmp>"),
    (re.compile(r"(?i)\b(pid[ =]+)\d+"), r"\1N"),
    (re.compile(r"\b(port[ =]+)\d+", re.I), r"\1N"),
    (re.compile(r"\b\d+\.\d+ ?s(econds)?\b"), "Ns"),
)
REASON_CHARS = 300


def tidy(text: str, site: Path) -> str:
    """One line without the site's path, addresses, process ids and temporary names."""
    text = text.replace(str(site), "<site>")
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    return " ".join(text.split())[:REASON_CHARS]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file; the last one may be cut when the writer died."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as handle:
        for line in handle:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def _message(longrepr: Any) -> str:
    """The line that says why, out of any of the forms in which pytest serialises a failure."""
    if isinstance(longrepr, list | tuple):  # skip: [file, line, reason]
        return str(longrepr[-1])
    if isinstance(longrepr, dict):
        crash = longrepr.get("reprcrash") or {}
        if crash.get("message"):
            return str(crash["message"]).splitlines()[0]
        return str(longrepr.get("longrepr") or "")
    text = str(longrepr or "")
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[-1] if errors else text.strip().rpartition("\n")[2]


def _merge(old: Node | None, report: dict[str, Any], site: Path) -> Node:
    """Fold one phase (setup, call, teardown) of a test into its outcome."""
    phase, outcome = report.get("when"), report.get("outcome")
    seconds = (old.seconds if old else 0.0) + float(report.get("duration") or 0.0)
    reason = ""
    if "wasxfail" in report and outcome in ("skipped", "passed"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed"
        reason = tidy(str(report["wasxfail"]), site)
    elif outcome == "failed":
        reason = tidy(_message(report.get("longrepr")), site)
        outcome = "failed" if phase == "call" else "error"
        if "Timeout (>" in reason:  # pytest-timeout interrupted it
            outcome = "timeout"
    elif outcome == "skipped":
        reason = tidy(_message(report.get("longrepr")), site)
    if old is None:
        return Node(str(outcome), reason, round(seconds, 3))
    if outcome in ("error", "failed", "timeout") or (phase == "call" and old.outcome == "passed"):
        return Node(str(outcome), reason, round(seconds, 3))
    return Node(old.outcome, old.reason, round(seconds, 3))


def outcomes(reports: Iterable[dict[str, Any]], site: Path) -> tuple[dict[str, Node], dict[str, Node]]:
    """Return ``(tests, collectors)`` by node id; collectors are only those that failed or were skipped
    whole."""
    tests: dict[str, Node] = {}
    collectors: dict[str, Node] = {}
    for report in reports:
        kind, name = report.get("$report_type"), str(report.get("nodeid", ""))
        if kind == "TestReport":
            tests[name] = _merge(tests.get(name), report, site)
        elif kind == "CollectReport" and report.get("outcome") in ("failed", "skipped"):
            bad = report["outcome"] == "failed"
            reason = tidy(_message(report.get("longrepr")), site)
            collectors[name] = Node("error" if bad else "skipped", reason)
    return tests, collectors
