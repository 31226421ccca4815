"""Writes upstreamed.toml of the new line: the old entries, and one with a proof for each patch that upstream
has now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit

from vllm_series import anchors, probes
from vllm_series.git import Git
from vllm_series.rebase import effects
from vllm_series.rebase.classify import Step
from vllm_series.rebase.model import Outcome
from vllm_series.rebase.upstream import Upstream
from vllm_series.series import Patch
from vllm_series.trees import Tree
from vllm_series.workspace import Workspace

NAME = "upstreamed.toml"


def text(
    ws: Workspace, old_line: str, new: Upstream, git: Git, taken: Iterable[Outcome], steps: Mapping[str, Step]
) -> str:
    """Return the file for the new line, '' if it has no entry; comments of the old line's file are kept."""
    path = ws.patches(old_line) / NAME
    taken = list(taken)
    if not path.is_file() and not taken:
        return ""
    document = tomlkit.parse(
        path.read_text(encoding="utf-8").replace(f"line {old_line}", f"line {new.line}")
        if path.is_file()
        else ""
    )
    entries = document.get("upstreamed")
    if entries is None:
        entries = tomlkit.aot()
        document.append("upstreamed", entries)
    known = {str(row["id"]) for row in entries}
    for outcome in taken:
        patch_id = outcome.patch.removesuffix(".patch")
        step = steps[outcome.patch]
        if patch_id not in known and proofs(git, new.base, step.patch, step):
            entries.append(_table(_entry(git, new, outcome, step, patch_id)))
    return tomlkit.dumps(document)


def without_proof(git: Git, new: Upstream, taken: Iterable[Outcome], steps: Mapping[str, Step]) -> list[str]:
    """Return, in words, the patches that upstream has but for which no probe could be found."""
    return [
        f"{one.patch}: upstream has it ({one.detail}), but no text proves it; add an entry to {NAME} by hand"
        for one in taken
        if not proofs(git, new.base, steps[one.patch].patch, steps[one.patch])
    ]


def _entry(git: Git, new: Upstream, outcome: Outcome, step: Step, name: str) -> dict[str, Any]:
    patch = step.patch
    return {
        "id": name,
        "feature": outcome.feature or "core",
        "origin": (patch.get("Origin") or ["none"])[0],
        "since": new.version,
        "proves": f"{patch.subject}: {outcome.detail}",
        "probe": list(proofs(git, new.base, patch, step)),
    }


def proofs(git: Git, base: str, patch: Patch, step: Step) -> list[dict[str, str]]:
    """Return probes that hold on ``base`` and did not before the patch: its added lines, or that its removed
    ones are gone."""
    tree, old = Tree(git, base), Tree(git, step.before)
    found: list[dict[str, str]] = []
    for value in patch.get("Drop-When"):
        if value.startswith(("symbol:", "text:")) and probes.ask(tree, value).ok:
            found.append(_from_trailer(value))
    if found:
        return found
    change = effects.of_commit(git, step.before, step.after)
    for path in sorted(change.paths):
        rows = [(sign, line) for file, sign, line in change.lines if file == path and line.strip()]
        rows.sort(key=lambda row: (row[0] != "+", -len(row[1].strip()), row[1]))
        for sign, line in rows:
            plain = re.escape(line.strip()).replace("\\ ", " ")
            regex = plain if sign == "+" else rf"(?s)\A(?!.*{plain})"
            name = _place(tree, patch, path, regex)
            if (
                probes.find_text(tree, path, name, regex).ok
                and not probes.find_text(old, path, name, regex).ok
            ):
                found.append(
                    {"kind": "text", "file": path, **({"name": name} if name else {}), "regex": regex}
                )
                break
    return found


def _place(tree: Tree, patch: Patch, path: str, regex: str) -> str:
    """Return the anchor in which the text is found, '' for the whole file."""
    for value in patch.get("Anchor"):
        anchor = anchors.parse(value)
        if anchor is None or anchor.file != path or anchor.name == anchors.MODULE:
            continue
        if probes.find_text(tree, path, anchor.name, regex).ok:
            return anchor.name
    return ""


def _from_trailer(value: str) -> dict[str, str]:
    kind, _, rest = value.partition(":")
    place, _, regex = rest.partition("=") if kind == "text" else (rest, "", "")
    file, _, name = place.partition("::")
    row = {"kind": kind, "file": file}
    return row | ({"name": name} if name else {}) | ({"regex": regex} if regex else {})


def _table(entry: Mapping[str, Any]) -> Any:
    table = tomlkit.table()
    for key, value in entry.items():
        if key != "probe":
            table.add(key, value)
    rows = tomlkit.aot()
    for probe in entry["probe"]:
        row = tomlkit.table()
        for key, value in probe.items():
            row.add(key, tomlkit.string(value, literal="'" not in value and "\n" not in value))
        rows.append(row)
    table.add("probe", rows)
    return table
