"""In which state the tree ``build/<line>`` is, computed from git facts and the stamp that apply leaves in it.

The stamp is a blob under ``refs/series/stamp`` of the tree's own repository: the stack that was laid out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_series import importer, overlay, series, stack
from vllm_series.errors import SeriesError, UsageError, WouldLoseWork
from vllm_series.git import Git
from vllm_series.pins import Pin
from vllm_series.stack import Stack
from vllm_series.workspace import Workspace

STAMP = "refs/series/stamp"
NEXT = "refs/series/next"
PREVIOUS = "refs/series/previous"
EXPORTING = "refs/series/exporting"


class State(enum.StrEnum):
    """States of a tree. Every command says which of them it accepts."""

    ABSENT = "ABSENT"  # there is no tree
    PRISTINE = "PRISTINE"  # the imported upstream commit, nothing on top
    APPLIED = "APPLIED"  # exactly what patches/ and overlay/ on disk give
    STALE = "STALE"  # applied and untouched, but patches, overlay or pin changed on disk since then
    PARTIAL = "PARTIAL"  # only the first patches, or a git operation or an apply that did not end
    AHEAD = "AHEAD"  # has commits that are not exported
    DIRTY = "DIRTY"  # has changes that are not committed
    FOREIGN = "FOREIGN"  # not a tree of this tool


@dataclass(frozen=True)
class TreeState:
    """What ``inspect`` found. ``interrupted`` is the stack that a killed apply was about to lay out."""

    state: State
    path: Path
    head: str | None = None
    stamp: Stack | None = None
    dirty: tuple[str, ...] = ()
    unexported: tuple[str, ...] = ()  # "<commit> <subject>", oldest first
    stale: tuple[str, ...] = ()
    detail: str = ""
    interrupted: Stack | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "path": str(self.path),
            "head": self.head,
            "dirty": list(self.dirty),
            "unexported": list(self.unexported),
            "stale": list(self.stale),
            "detail": self.detail,
        }


def tree_git(ws: Workspace, line: str) -> Git:
    return Git(ws.build(line))


def inspect(ws: Workspace, pin: Pin) -> TreeState:
    """Compute the state of ``build/<line>``; changes nothing."""
    path = ws.build(pin.line)
    if not path.is_symlink() and (not path.exists() or (path.is_dir() and not any(path.iterdir()))):
        return TreeState(State.ABSENT, path)
    if not (path / ".git").is_dir():
        return TreeState(State.FOREIGN, path, detail="it is not a git work tree of this tool")
    git = Git(path)
    head, stamp = git.commit_of("HEAD"), stack.read_ref(git, STAMP)
    base = stamp.base if stamp else importer.expected_commit(pin)
    if head is None or base is None or not git.ok("merge-base", "--is-ancestor", base, head):
        detail = "its HEAD does not descend from the imported upstream commit"
        return TreeState(State.FOREIGN, path, head, stamp, detail=detail)
    interrupted = stack.read_ref(git, NEXT)
    if interrupted:
        return TreeState(
            State.PARTIAL,
            path,
            head,
            stamp,
            detail="an apply or export was interrupted",
            interrupted=interrupted,
        )
    operation = _operation(path)
    dirty = tuple(dirty_paths(git))
    ahead = _unexported(git, base, head, stamp)
    stale = tuple(_stale(ws, pin, stamp))
    if operation:
        state = State.PARTIAL
    elif dirty:
        state = State.DIRTY
    elif ahead:
        state = State.AHEAD
    elif head == base and (stamp is None or stamp.head != base or not stamp.complete):
        state = State.PRISTINE
    elif stamp is None or not stamp.complete or head != stamp.head:
        state = State.PARTIAL
        operation = "only the first patches are applied"
    else:
        state = State.STALE if stale else State.APPLIED
    return TreeState(state, path, head, stamp, dirty, ahead, stale, detail=operation)


def dirty_paths(git: Git) -> list[str]:
    """Return the paths with uncommitted changes; ignored files and by-products do not count."""
    fields = git.paths(
        "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=none"
    )
    return [row[3:] for row in fields if not (row.startswith("??") and overlay.is_junk(row[3:]))]


def _operation(path: Path) -> str:
    for name, what in (
        ("rebase-merge", "a git rebase"),
        ("rebase-apply", "a git am or rebase"),
        ("MERGE_HEAD", "a git merge"),
        ("CHERRY_PICK_HEAD", "a git cherry-pick"),
        ("REVERT_HEAD", "a git revert"),
        ("BISECT_LOG", "a git bisect"),
    ):
        if (path / ".git" / name).exists():
            return f"{what} is in progress"
    return ""


def _unexported(git: Git, base: str, head: str, stamp: Stack | None) -> tuple[str, ...]:
    """Commits of HEAD that the stamp does not have; also commits of the stamp that HEAD lost, marked with
    '-'."""
    known = stamp.head if stamp else base
    if head in {known, base}:
        return ()
    added = git.lines("log", "--reverse", "--format=%h %s", f"{known}..{head}")
    lost = git.lines("log", "--reverse", "--format=- %h %s", f"{head}..{known}")
    if not added and stamp and head in {stamp.base, *(c for _, c in stamp.commits)}:
        return ()  # the user moved back to a state that is on record: nothing of his is at stake
    return (*added, *lost)


def _stale(ws: Workspace, pin: Pin, stamp: Stack | None) -> list[str]:
    """Say what on disk differs from what the stamp laid out."""
    if stamp is None:
        return []
    found = []
    expected = importer.expected_commit(pin)
    git = tree_git(ws, pin.line)
    if expected and stamp.base != expected and git.commit_of(stamp.base) and _is_import(git, stamp.base):
        found.append("the pin names another upstream source")
    try:
        now = {patch.name: patch.sha256 for patch in series.load(ws, pin.line)}
        laid = {path: " ".join(row) for path, row in overlay.entries(ws).items()}
    except SeriesError as err:
        return [*found, err.message]
    found += [
        f"patches/{pin.line}/{name} changed" for name, sha in now.items() if stamp.patches.get(name) != sha
    ]
    found += [f"patches/{pin.line}/{name} is gone" for name in stamp.patches if name not in now]
    if not found and list(now) != list(stamp.patches):
        found.append(f"patches/{pin.line}/series has another order")
    keys = {*laid, *stamp.overlay}
    found += [f"overlay/{path} changed" for path in sorted(keys) if laid.get(path) != stamp.overlay.get(path)]
    return found


def _is_import(git: Git, commit: str) -> bool:
    """Say whether a commit is an import of an sdist (and not a commit of a clone)."""
    return "\nSha256: " in git.out("log", "-1", "--format=%B", commit)


def require(found: TreeState, line: str, accepted: Iterable[State]) -> None:
    """Refuse a state that a command does not accept.

    Raises:
        UsageError: there is no tree.
        WouldLoseWork: with what would be lost and the command that mends it.
    """
    if found.state in set(accepted):
        return
    if found.state is State.ABSENT:
        raise UsageError(f"build/{line} is ABSENT: there is no tree yet", fix=f"series apply {line}")
    shown = found.path.as_posix()
    if found.state is State.DIRTY:
        first = ", ".join(found.dirty[:5]) + (" ..." if len(found.dirty) > 5 else "")
        many = "1 uncommitted change" if len(found.dirty) == 1 else f"{len(found.dirty)} uncommitted changes"
        raise WouldLoseWork(
            f"build/{line} is DIRTY: {many} ({first})",
            fix=f"git -C {shown} add -A && git -C {shown} commit (a new patch; with --fixup COMMIT a change "
            f"of that patch), then: series export {line}; or drop them (kept under refs/series/saved): "
            f"series apply {line} --discard",
        )
    if found.state is State.AHEAD:
        rows = "\n    ".join(row[:90] for row in found.unexported[:5])
        raise WouldLoseWork(
            f"build/{line} is AHEAD: commits differ from what was applied and are not exported:\n    {rows}",
            fix=f"series export {line}, or drop them (kept under refs/series/saved): "
            f"series apply {line} --discard",
        )
    if found.state is State.FOREIGN:
        raise WouldLoseWork(
            f"build/{line} is FOREIGN: {found.detail}",
            fix=f"move it away: mv {shown} {shown}.old, then: series apply {line}",
        )
    if found.state is State.PARTIAL:
        if found.interrupted:
            raise WouldLoseWork(
                f"build/{line} is PARTIAL: {found.detail}", fix=f"series apply {line} ends it"
            )
        raise WouldLoseWork(
            f"build/{line} is PARTIAL: {found.detail}",
            fix=f"end the git operation in {shown}, or: series apply {line}",
        )
    if found.state is State.STALE:
        rows = "; ".join(found.stale[:5])
        raise WouldLoseWork(f"build/{line} is STALE: {rows}", fix=f"series apply {line}")
    raise WouldLoseWork(f"build/{line} is {found.state.value}", fix=f"series apply {line}")
