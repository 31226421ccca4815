"""Anchors: every line that a patch adds must lie inside a place that its ``Anchor`` trailers name.

"It applied" is not "it applied in the right place": a strict patch can still land in a neighbouring function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_series.git import Git
from vllm_series.series import Patch
from vllm_series.trees import Tree

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
MODULE = "<module>"


@dataclass(frozen=True)
class Anchor:
    """``file::Qual.name``; name is ``<module>`` for lines outside of all top-level functions and classes."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}::{'' if self.name == MODULE else self.name}"


def parse(text: str) -> Anchor | None:
    """Read a trailer value; None if it is malformed."""
    file, mark, name = text.partition("::")
    if not mark or not file or file.startswith("/") or ".." in file.split("/") or " " in file:
        return None
    name = name or MODULE
    if name != MODULE and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        return None
    return Anchor(file, name)


@dataclass(frozen=True)
class Hunk:
    """Line numbers that a change removes from the old file and adds to the new one."""

    removed: range
    added: range


def hunks(git: Git, old: str, new: str) -> dict[str, list[Hunk]]:
    """Return the changes between two commits by file, without context lines."""
    text = git.out(
        "diff-tree", "-p", "-U0", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", old, new
    )
    found: dict[str, list[Hunk]] = {}
    file, left = "", 0
    for row in text.split("\n"):
        if left > 0 and row[:1] in {"+", "-", "\\"}:
            left -= row[:1] != "\\"
        elif row.startswith("diff --git "):
            file = row.rsplit(" b/", 1)[-1]
            found[file] = []
        elif match := _HUNK.match(row):
            removed, added = int(match[2] or 1), int(match[4] or 1)
            left = removed + added
            first, second = int(match[1]), int(match[3])
            found[file].append(Hunk(range(first, first + removed), range(second, second + added)))
    return found


def check(git: Git, old: str, new: str, anchors: Sequence[Anchor]) -> list[str]:
    """Return what is wrong with the placement of a patch's change; empty if nothing is."""
    before, after = Tree(git, old), Tree(git, new)
    problems: list[str] = []
    used: set[Anchor] = set()
    changes = hunks(git, old, new)
    for file, rows in changes.items():
        mine = [anchor for anchor in anchors if anchor.file == file]
        added = [line for hunk in rows for line in hunk.added]
        problems += _check_file(after, before, file, mine, added, used)
    for anchor in anchors:
        if anchor.file not in changes:
            problems.append(f"Anchor {anchor}: the patch does not touch {anchor.file}")
        elif anchor not in used and not _removes_in(before, anchor, changes[anchor.file]):
            problems.append(f"Anchor {anchor}: the patch changes nothing there")
    return problems


def _check_file(
    after: Tree, before: Tree, file: str, mine: list[Anchor], added: list[int], used: set[Anchor]
) -> list[str]:
    if not mine:
        return [f"{file} is changed but no Anchor names it"]
    if not added:
        used.update(anchor for anchor in mine if anchor.name == MODULE)
        return []
    whole = [anchor for anchor in mine if anchor.name == MODULE]
    if not file.endswith(".py") or file not in before.paths:
        used.update(whole)
        named = [anchor for anchor in mine if anchor.name != MODULE and not file.endswith(".py")]
        return [
            f"Anchor {anchor}: {file} is not Python, only `{file}::` can be named" for anchor in named
        ] or ([] if whole else [f"{file} is new: its Anchor must be `{file}::`"])
    try:
        source = after.source(file)
    except SyntaxError as err:
        return [f"{file}:{err.lineno} is not Python: {err.msg}"]
    assert source is not None
    spans = {anchor: source.spans(anchor.name) for anchor in mine if anchor.name != MODULE}
    problems = [
        f"Anchor {anchor}: {file} has no {anchor.name}" for anchor, found in spans.items() if not found
    ]
    for line in added:
        holders = [anchor for anchor, found in spans.items() if any(a <= line <= b for a, b in found)]
        if not holders and whole and not source.inside_definition(line):
            holders = whole
        used.update(holders)
        if not holders and not source.is_blank(line):
            text = source.lines[line - 1].strip()
            names = ", ".join(map(str, mine))
            problems.append(f"{file}:{line} ({text[:60]!r}) lies in {source.owner(line)}, outside of {names}")
    return problems


def _removes_in(before: Tree, anchor: Anchor, rows: list[Hunk]) -> bool:
    """Say whether a patch that adds nothing at an anchor removes lines there."""
    removed = [line for hunk in rows for line in hunk.removed]
    try:
        source = before.source(anchor.file) if anchor.file.endswith(".py") else None
    except SyntaxError:
        return False
    if source is None or anchor.name == MODULE:
        return anchor.name == MODULE and any(
            not source or not source.inside_definition(line) for line in removed
        )
    return any(first <= line <= last for line in removed for first, last in source.spans(anchor.name))


def check_patch(git: Git, old: str, new: str, patch: Patch) -> list[str]:
    """Check one patch of a stack; malformed anchors are lint's business and are left out here."""
    named = [anchor for value in patch.get("Anchor") if (anchor := parse(value))]
    return check(git, old, new, named)
