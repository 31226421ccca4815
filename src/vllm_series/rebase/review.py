"""Shows what a change of patches does to the patched trees: the difference of results, not a diff of
diffs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series import importer, series, stack
from vllm_series.errors import UsageError
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.pins import load_pin
from vllm_series.series import Patch
from vllm_series.stack import Stack
from vllm_series.workspace import Workspace


@dataclass(frozen=True)
class LineChange:
    """What happened to one line. ``how`` is ``added``, ``removed``, ``rebased`` (other upstream) or
    ``changed``.

    ``patches`` is ``{patch: added | removed | rewritten | same effect | moved}``; ``stat`` and ``diff`` are
    git's between the two trees (for an added line: against its upstream).
    """

    line: str
    how: str
    patches: dict[str, str]
    stat: str = ""
    diff: str = ""


def review(ws: Workspace, span: str) -> list[LineChange]:
    """Return the changed lines between two commits of this repository (``BASE..HEAD``).

    Raises:
        UsageError: the range is not valid.
        CheckFailed: the patches of one side do not apply.
    """
    repo = Git(ws.root)
    base, head = _ends(repo, span)
    paths = repo.paths("diff", "-z", "--name-only", "--no-renames", base, head, "--", "patches", "pins")
    names = {
        path.split("/")[1].removesuffix(".toml")
        for path in paths
        if path.count("/") == (1 if path.startswith("pins") else 2)
    }
    with tempfile.TemporaryDirectory() as tmp:
        sides = [
            _checkout(repo, commit, Path(tmp) / side) for commit, side in ((base, "base"), (head, "head"))
        ]
        found = []
        for line in sorted(names):
            there = [
                (side.pins / f"{line}.toml").is_file() and series.series_path(side, line).is_file()
                for side in sides
            ]
            if any(there):
                found.append(
                    _compare(ws, line, sides[0] if there[0] else None, sides[1] if there[1] else None)
                )
        # LOCK, upstreamed.toml or a comment of the pin alone leave nothing to look at.
        return [one for one in found if one.how != "changed" or one.patches or one.diff]


def _ends(repo: Git, span: str) -> tuple[str, str]:
    base, dots, head = span.partition("..")
    if not dots or head.startswith("."):
        raise UsageError(f"{span!r} is not a range", fix="series review BASE..HEAD (HEAD may be left out)")
    ends = []
    for name in (base or "HEAD", head or "HEAD"):
        commit = repo.commit_of(name)
        if commit is None:
            raise UsageError(
                f"this repository has no commit {name!r}", fix="git fetch, or name another commit"
            )
        ends.append(commit)
    return ends[0], ends[1]


def _checkout(repo: Git, commit: str, folder: Path) -> Workspace:
    """Write ``pins`` and ``patches`` of a commit to a folder."""
    for path in repo.paths(
        "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, "--", "pins", "patches"
    ):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(repo.blob(commit, path) or b"")
    return Workspace(folder)


def _stack(ws: Workspace, side: Workspace, line: str) -> tuple[Stack, list[Patch]]:
    pin, patches = load_pin(side, line), series.load(side, line)
    base = importer.import_pin(ws, pin)
    with locked(ws.work / f"review-{line}.lock"):
        return stack.build(ws, pin, patches, {}, base=base, name=f"review-{line}", complete=False), patches


def _compare(ws: Workspace, line: str, base: Workspace | None, head: Workspace | None) -> LineChange:
    store = importer.odb(ws)
    if head is None:
        assert base is not None
        return LineChange(line, "removed", dict.fromkeys(series.names(base, line), "removed"))
    new, after = _stack(ws, head, line)
    if base is None:
        how = dict.fromkeys((patch.name for patch in after), "added")
        return LineChange(line, "added", how, *_diff(store, new.base, new.top))
    old, before = _stack(ws, base, line)
    how = _patches(before, after)
    if old.base != new.base:
        return LineChange(line, "rebased", how, *_diff(store, new.base, new.top))
    return LineChange(line, "changed", how, *_diff(store, old.top, new.top))


def _patches(before: Sequence[Patch], after: Sequence[Patch]) -> dict[str, str]:
    old, new = {patch.name: patch for patch in before}, {patch.name: patch for patch in after}
    order = [name for name in old if name in new]
    moved = order != [name for name in new if name in old]
    found: dict[str, str] = {}
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            found[name] = "removed"
        elif name not in old:
            found[name] = "added"
        elif old[name].data != new[name].data:
            found[name] = (
                "same effect"
                if series.effect(old[name].data) == series.effect(new[name].data)
                else "rewritten"
            )
        elif moved and order.index(name) != [n for n in new if n in old].index(name):
            found[name] = "moved"
    return found


def _diff(store: Git, old: str, new: str) -> tuple[str, str]:
    stat = store.out("diff", "--stat=100", "--no-renames", old, new)
    return stat, store.raw("diff", "--no-renames", "--full-index", old, new).decode("utf-8", "replace")


def markdown(changes: Sequence[LineChange], span: str) -> str:
    """Return the review for people."""
    if not changes:
        return f"{span}: no line's patches changed\n"
    rows = [f"# Patches in {span}"]
    for one in changes:
        rows += ["", f"## Line {one.line}: {one.how}", ""]
        rows += [f"- {name}: {how}" for name, how in one.patches.items()]
        if one.how == "removed":
            continue
        against = {"changed": "the tree before", "added": "upstream", "rebased": "its new upstream"}[one.how]
        if not one.diff:
            rows += ["", f"The patched tree is the same as {against}."]
        else:
            rows += [
                "",
                f"The patched tree against {against}:",
                "",
                "```",
                one.stat,
                "```",
                "",
                "```diff",
                one.diff.rstrip("\n"),
                "```",
            ]
    return "\n".join(rows) + "\n"


def as_json(changes: Sequence[LineChange], span: str) -> dict[str, Any]:
    return {"schema": 1, "range": span, "lines": [vars(one) for one in changes]}
