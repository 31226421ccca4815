"""Takes over what a person did in the tree after a stop, and refuses what cannot be right."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from vllm_series import importer, overlay, series
from vllm_series.errors import CheckFailed, NeedsPerson
from vllm_series.export import FORMAT
from vllm_series.git import FIXED_DATE, Git
from vllm_series.rebase import checks, saved
from vllm_series.rebase.classify import Step, compare
from vllm_series.rebase.model import Decision, Need, Outcome, State
from vllm_series.rebase.saved import Saved
from vllm_series.workspace import Workspace

_MARKERS = (b"<<<<<<< ", b">>>>>>> ", b"||||||| ")


def message_of(git: Git, commit: str) -> str:
    return git.raw("log", "-1", "--format=%B", commit).decode("utf-8", "replace").strip("\n") + "\n"


def settle_stopped(ws: Workspace, tree: Git, now: Saved, step: Step) -> Saved:
    """Return the state after the stop: the patch accepted, resolved or dropped, ``head`` moved on.

    Raises:
        NeedsPerson: nothing was decided, or the edit is not finished.
        CheckFailed: the edit lies outside of the patch's anchors.
    """
    outcome, name = now.outcomes[-1], step.patch.name
    left = outcome.commit or now.head
    files = _tree_of(tree, now)
    if name in now.drop:
        if files is not None and files != tree.tree_of(left):
            keep(importer.odb(ws), tree, now.head)
        return saved.with_outcome(now, outcome.decided(Decision.DROPPED, ""), phase=saved.RUNNING)
    if files is None:
        raise _unfinished(
            now, f"{', '.join(_unmerged(tree))}: conflict markers or unmerged files are left", outcome
        )
    if files == tree.tree_of(left):
        if outcome.need is Need.ACCEPT and name in now.accept:
            done = outcome.decided(Decision.ACCEPTED)
            return saved.with_outcome(now, done, head=outcome.commit, phase=saved.RUNNING)
        what = (
            "nobody said yes to it yet" if outcome.need is Need.ACCEPT else "nothing was changed in the tree"
        )
        raise _unfinished(now, f"{name} ({outcome.state}): {what}", outcome)
    if files == tree.tree_of(now.head):
        raise _unfinished(now, f"{name}: the edited tree has no change left", outcome)
    if done_by_tool := next((m for m in _changed(tree, now.head, files) if overlay.is_overlay(m)), ""):
        raise CheckFailed(
            f"{done_by_tool} belongs to the overlay, not to a patch", fix="edit it in overlay/ instead"
        )
    commit = _commit(ws, tree, now, step, left, files)
    patch = series.parse(name, tree.raw(*FORMAT, commit))
    wrong = checks.anchor_problems(tree, now.head, commit, patch)
    if wrong:
        raise CheckFailed(
            f"{name}: {'; '.join(wrong)}",
            fix=f"move the change into the function, or correct Anchor in {_message(ws, now)}, then: "
            f"series rebase --continue --to {now.new}",
        )
    solved = compare(
        tree, step, now.head, replace(outcome, state=State.CONFLICT, commit=commit, notes=outcome.notes)
    )
    solved = replace(solved, state=outcome.state)
    reached = checks.live_problem(tree, now.head, patch)
    if reached and name not in now.accept:
        raise _unfinished(
            now, f"{name}: UNREACHED, {reached}",
            replace(outcome, state=State.UNREACHED, commit=commit),
        )  # fmt: skip
    return saved.with_outcome(now, solved.decided(Decision.RESOLVED), head=commit, phase=saved.RUNNING)


def _message(ws: Workspace, now: Saved) -> str:
    return str(saved.message_path(ws, now.new).relative_to(ws.root))


def _unfinished(now: Saved, what: str, outcome: Outcome) -> NeedsPerson:
    go = f"series rebase --continue --to {now.new}"
    if outcome.need is Need.ACCEPT:
        return NeedsPerson(what, fix=f"{go} --accept {outcome.patch}, or {go} --drop {outcome.patch}")
    return NeedsPerson(
        what, fix=f"edit build/{now.new}.rebase, then: {go}; or leave it out: {go} --drop {outcome.patch}"
    )


def _tree_of(tree: Git, now: Saved) -> str | None:
    """Return the git tree of the files as they lie there, or None if a conflict is left in them.

    Works on a copy of the index, so that a refusal changes nothing. New files count once they were `git
    add`ed.

    Raises:
        NeedsPerson: there are new files of which it is not clear whether they belong to the patch.
    """
    new = [
        p for p in tree.paths("ls-files", "-z", "--others", "--exclude-standard") if not overlay.is_junk(p)
    ]
    if new:
        place = f"build/{now.new}.rebase"
        raise NeedsPerson(
            f"new files in {place}: {', '.join(new[:5])}",
            fix=f"git -C {place} add those that belong to the patch, remove the others, and continue",
        )
    if _unmerged(tree):
        return None
    return _write_tree(tree)


def _write_tree(tree: Git, *more: str) -> str:
    index = Path(tree.out("rev-parse", "--absolute-git-dir")) / "index"
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "index"
        if index.is_file():  # a run that was killed may not have come to it
            shutil.copyfile(index, copy)
        own = tree.with_env(GIT_INDEX_FILE=str(copy))
        own.run("add", *(more or ("-u",)), "--", ":/")
        return own.out("write-tree")


def _unmerged(tree: Git) -> list[str]:
    """Return the files that still hold conflict markers (also where `git add` said that they were
    resolved)."""
    open_ = set(tree.paths("diff", "-z", "--name-only", "--diff-filter=U"))
    changed = open_ | set(tree.paths("diff", "-z", "--name-only", "HEAD"))
    found = []
    for path in sorted(changed):
        file = tree.cwd / path
        if file.is_file():
            starts = [row for row in file.read_bytes().splitlines() if row.startswith(_MARKERS)]
            if len(starts) >= 2:
                found.append(path)
    return found


def _changed(tree: Git, head: str, files: str) -> list[str]:
    return tree.paths("diff-tree", "-r", "-z", "--no-renames", "--name-only", head, files)


def _commit(ws: Workspace, tree: Git, now: Saved, step: Step, left: str, files: str) -> str:
    """Make the commit of the edited files: author and message of the patch, or the message that the person
    gave it."""
    at = tree.out("rev-parse", "HEAD")
    file = saved.message_path(ws, now.new)
    text = file.read_text(encoding="utf-8") if file.is_file() else message_of(tree, step.after)
    if at != left and tree.commit_of(f"{at}^") == now.head:
        text = message_of(tree, at)
    name, mail, date = tree.out("log", "-1", "--format=%an%x00%ae%x00%at +0000", step.after).split("\0")
    own = tree.with_env(GIT_AUTHOR_NAME=name, GIT_AUTHOR_EMAIL=mail, GIT_AUTHOR_DATE=date or FIXED_DATE)
    return own.out("commit-tree", files, "-p", now.head, "-F", "-", data=text.encode())


def keep(store: Git, tree: Git, head: str | None) -> str:
    """Keep the files of the tree under a ref of the object store; return the ref, or '' if they are those of
    ``head``."""
    at = tree.out("rev-parse", "HEAD")
    files = _write_tree(tree, "-A")
    if files == tree.tree_of(at) and (head is None or at == head):
        return ""
    commit = tree.out("commit-tree", files, "-p", at, "-m", "work of a rebase that was given up")
    ref = f"refs/rebase/kept/{commit[:12]}"
    store.set_ref(ref, commit)
    return ref
