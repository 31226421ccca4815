"""patches/<line>/upstreamed.toml: what a line no longer needs because upstream has it, each with a proof."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

from vllm_series import probes
from vllm_series.errors import CheckFailed
from vllm_series.trees import Tree
from vllm_series.workspace import Workspace


@dataclass(frozen=True)
class Probe:
    """``symbol``: the name must exist in the file. ``text``: the regex must be found, within ``name`` if
    given."""

    kind: str
    file: str
    name: str
    regex: str

    def ask(self, tree: Tree) -> probes.Answer:
        if self.kind == "symbol":
            return probes.ask(tree, f"symbol:{self.file}::{self.name}")
        return probes.find_text(tree, self.file, self.name, self.regex)


@dataclass(frozen=True)
class Upstreamed:
    """One thing that upstream does itself on this line; ``proves`` says in words what the probes show."""

    id: str
    feature: str
    origin: str
    since: str
    proves: str
    probes: tuple[Probe, ...]


def load(ws: Workspace, line: str) -> list[Upstreamed]:
    """Read a line's entries; a line without the file has none.

    Raises:
        CheckFailed: the file is not valid.
    """
    path = ws.patches(line) / "upstreamed.toml"
    if not path.is_file():
        return []
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("upstreamed", [])
        found = [_entry(row) for row in rows]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, re.error) as err:
        raise CheckFailed(
            f"patches/{line}/upstreamed.toml is not valid: {err}", fix="see docs/patches.md for its fields"
        ) from err
    ids = [entry.id for entry in found]
    if len(set(ids)) != len(ids):
        raise CheckFailed(f"patches/{line}/upstreamed.toml has an id twice", fix="give each entry its own id")
    return found


def _entry(row: dict[str, Any]) -> Upstreamed:
    texts = {key: str(row[key]) for key in ("id", "feature", "origin", "since", "proves")}
    empty = [key for key, value in texts.items() if not value.strip()]
    made = tuple(_probe(one) for one in row["probe"])
    if empty or not made:
        raise ValueError(f"entry {texts['id']!r} lacks {', '.join(empty) or 'a probe'}")
    return Upstreamed(**texts, probes=made)


def _probe(row: dict[str, Any]) -> Probe:
    probe = Probe(str(row["kind"]), str(row["file"]), str(row.get("name", "")), str(row.get("regex", "")))
    if probe.kind not in {"symbol", "text"}:
        raise ValueError(f"kind {probe.kind!r} is neither symbol nor text")
    if not (probe.name if probe.kind == "symbol" else probe.regex):
        raise ValueError(f"a {probe.kind} probe needs {'name' if probe.kind == 'symbol' else 'regex'}")
    re.compile(probe.regex)
    return probe


def check(ws: Workspace, line: str, tree: Tree) -> list[str]:
    """Return which entries no longer hold on a pristine tree, in words."""
    problems = []
    for entry in load(ws, line):
        for probe in entry.probes:
            answer = probe.ask(tree)
            if not answer.ok:
                problems.append(f"{entry.id}: {answer.detail} (it proved: {entry.proves})")
    return problems
