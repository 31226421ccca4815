"""The last full result of a line, kept small in ``bench/results/upstream-tests``: it feeds the next plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_series.baseline.diff import DOUBTFUL, Diff, Kind
from vllm_series.baseline.outcome import BAD, NOT_RUN, Node, Run
from vllm_series.errors import CheckFailed
from vllm_series.workspace import Workspace

SCHEMA = 1
REASONS_PER_FILE = 4
SELECTED = "selected"  # by the user's patterns: a row of it names its files
PARTIAL = ("short", "features", SELECTED)  # sets whose comparisons are kept beside those of the full one


@dataclass
class Recorded:
    """One file in the last full run: seconds on an otherwise idle core, outcomes, and why tests did not
    pass."""

    seconds: float
    counts: dict[str, int]
    reasons: dict[str, int] = field(default_factory=dict)


def store_path(ws: Workspace, line: str, card: str = "cpu") -> Path:
    """Where the last full result of a line lies."""
    return ws.root / "bench" / "results" / "upstream-tests" / f"{line}-{card}.json"


def summarise(run: Run) -> dict[str, Recorded]:
    """Reduce a run to counts and the most frequent reasons of each file."""
    found = {}
    for name, one in sorted(run.files.items()):
        counts: dict[str, int] = {}
        reasons: dict[str, int] = {}
        for node in one.nodes.values():
            counts[node.outcome] = counts.get(node.outcome, 0) + 1
            if node.outcome in BAD or node.outcome == "skipped":
                text = f"{node.outcome}: {node.reason}"[:160]
                reasons[text] = reasons.get(text, 0) + 1
        top = sorted(reasons.items(), key=lambda row: (-row[1], row[0]))[:REASONS_PER_FILE]
        seconds = max(
            one.cpu, one.seconds / run.busy()
        )  # a test that sleeps takes its time on an idle machine too
        found[name] = Recorded(round(seconds, 1), dict(sorted(counts.items())), dict(top))
    return found


def diff_row(diff: Diff, patched: Run, which: str, commit: str) -> dict[str, Any]:
    """What is kept of a comparison: what ran, how much of the plan that is, and everything that differs."""
    counts = {kind: number for kind, number in diff.counts().items() if number}
    left = sum(counts.get(kind, 0) for kind in ("NOT_COMPARED", "SAMPLED"))
    late = [
        name
        for name, one in patched.files.items()
        if one.nodes and all(node.outcome == NOT_RUN for node in one.nodes.values())
    ]
    reached, unreached = len(patched.files) - len(late), [*late, *diff.unreached]
    odd = {
        row.node: f"{row.kind}: {_brief(row.before)} / {_brief(row.after)}"
        for row in diff.rows
        if row.kind in (*DOUBTFUL, Kind.FLAKY, Kind.QUARANTINED)
    }
    return {
        "set": which,
        "commit": commit,
        "tree": patched.tree,
        "date": patched.date,
        "ok": not diff.failing(),
        "files": f"{reached} of {reached + len(unreached)}",
        "compared": len(diff.rows) - left,
        "counts": counts,
        **({"differs": odd} if odd else {}),
        **({"unreached": unreached} if unreached else {}),
        **({"names": list(patched.files)} if which == SELECTED else {}),
    }


def _brief(node: Node | None) -> str:
    return "absent" if node is None else f"{node.outcome} {node.reason[:60]}".strip()


def write(
    ws: Workspace, run: Run, diffs: dict[str, dict[str, Any]], card: str = "cpu", also: Run | None = None
) -> Path:
    """Store a full upstream run and, by mode, what each patched run differed in.

    Files of the stored result that this run does not hold stay, marked with where they are ``from``: the
    plan needs their seconds and needs when a patch reaches them again. So do modes that did not run now.
    Of a set that is a part of the full one the comparisons alone are kept, as ``<mode> of <set>``.

    Args:
        ws: the checkout.
        run: upstream's run of the set.
        diffs: by mode, from `diff_row`.
        card: ``cpu``, or the GPU's name.
        also: the saved run of the same tree with further files, of other sets: their rows are stored too.
    """
    path = store_path(ws, run.line, card)
    path.parent.mkdir(parents=True, exist_ok=True)
    old: dict[str, Any] = _load(ws, path) if path.is_file() else {"files": {}, "diffs": {}, "date": ""}
    rows = {
        name: {"s": one.seconds, "n": one.counts, **({"why": one.reasons} if one.reasons else {})}
        for name, one in (summarise(also) | summarise(run) if also else summarise(run)).items()
    }
    kept = {name: {"from": old["date"][:10], **row} for name, row in old["files"].items() if name not in rows}
    rows = dict(sorted({**kept, **rows}.items()))
    partial = [f"{mode} of {row['set']}" for mode, row in diffs.items() if row.get("set") in PARTIAL]
    if partial and old["files"]:
        head = {name: value for name, value in old.items() if name != "files"}
        head["diffs"] = old["diffs"] | dict(zip(partial, diffs.values(), strict=True))
        return _save(path, head, old["files"])
    diffs = {**old["diffs"], **diffs}
    head = {
        "schema": SCHEMA,
        "line": run.line,
        "card": card,
        "date": run.date,
        "tree": run.tree,
        "fingerprint": run.fingerprint,
        "totals": run.counts(),
        "diffs": diffs,
    }
    return _save(path, head, rows)


def _save(path: Path, head: dict[str, Any], rows: dict[str, Any]) -> Path:
    text = json.dumps(head, indent=1)[:-2] + ',\n "files": {\n'
    text += ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n }\n}\n"
    json.loads(text)
    path.write_text(text, encoding="utf-8")
    return path


def read(ws: Workspace, line: str, card: str = "cpu") -> dict[str, Recorded]:
    """Return the last full result by file; empty when the line was never run in full.

    Raises:
        CheckFailed: the file is damaged.
    """
    path = store_path(ws, line, card)
    if not path.is_file():
        return {}
    rows: dict[str, Any] = _load(ws, path)["files"]
    return {name: Recorded(row["s"], row["n"], row.get("why", {})) for name, row in rows.items()}


def _load(ws: Workspace, path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        for row in data["files"].values():
            row["s"], row["n"]
        data["diffs"], data["date"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckFailed(
            f"{path.relative_to(ws.root)} is not a stored result: {error}",
            fix=f"git checkout -- {path.relative_to(ws.root)}, or "
            f"remove it and `series baseline run LINE --set full --store`",
        ) from error
    return data
