"""Tries one patch on a new release and gives it a state. Changes nothing but the scratch tree that it is
handed."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_series import series
from vllm_series.errors import CheckFailed
from vllm_series.git import Git
from vllm_series.rebase import checks, effects
from vllm_series.rebase.model import Outcome, State, Target
from vllm_series.rebase.moves import Moves
from vllm_series.series import Patch

_AM = (
    "am", "-q", "--keep-non-patch", "--keep-cr", "--no-scissors", "--no-gpg-sign", "--quoted-cr=nowarn",
    "--empty=stop", "--patch-format=mbox",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One patch of the old line with the commits before and after it there."""

    patch: Patch
    before: str
    after: str


@dataclass(frozen=True)
class _Fit:
    """How far the text of a patch got: state, resulting commit, and what there is to say."""

    how: State
    commit: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()


def try_patch(tree: Git, head: str, step: Step, moves: Moves, *, keep_conflict: bool = False) -> Outcome:
    """Try ``step`` on the commit ``head``, which ``tree`` has checked out; leave ``tree`` at ``head`` or at
    the result.

    The tree moves on only if the patch applied and nothing speaks against the place; ``Outcome.commit`` is
    then its HEAD. With ``keep_conflict`` a conflict stays in the files and the index, without an operation
    in progress.
    """
    begin = time.monotonic()
    patch = step.patch
    targets = tuple(moves.target(path) for path in patch.paths)
    outcome = _outcome(tree, head, step, moves, targets, keep_conflict)
    feature = (patch.get("Feature") or [""])[0]
    if not outcome.commit and not (keep_conflict and outcome.how == State.CONFLICT):
        reset(tree, head)
    return replace(outcome, feature=feature, targets=targets, seconds=round(time.monotonic() - begin, 3))


def _outcome(
    tree: Git, head: str, step: Step, moves: Moves, targets: tuple[Target, ...], keep_conflict: bool
) -> Outcome:
    patch = step.patch
    reason = checks.drop_reason(tree, moves.new, moves.version, patch)
    if reason:
        return Outcome(patch.name, State.UPSTREAMED, how=State.UPSTREAMED, detail=reason)
    names = missing(tree, head, step, targets)
    gone = [path for path, now in names.items() if not now]
    if gone:
        return Outcome(patch.name, State.TARGET_GONE, detail=f"not in this release: {', '.join(gone)}")
    moved = rename(patch, names) if names else patch
    fit = _fit(tree, head, replace(step, patch=moved), keep_conflict and not names)
    outcome = Outcome(patch.name, fit.how, fit.how, fit.detail, fit.notes, commit=fit.commit)
    outcome = _judge(tree, head, step, moved, outcome, names)
    if names and outcome.state is not State.UPSTREAMED:
        where = ", ".join(f"{old} -> {new}" for old, new in sorted(names.items()))
        there = outcome.state if outcome.state is outcome.how else f"{outcome.state} ({outcome.how})"
        detail = f"{where}; there it is {there}" + (f": {outcome.detail}" if outcome.detail else "")
        return replace(outcome, state=State.TARGET_RENAMED, detail=detail)
    return outcome


def missing(tree: Git, head: str, step: Step, targets: tuple[Target, ...]) -> dict[str, str]:
    """Return ``{path: new name or ''}`` of the files that the patch changes and ``head`` does not have."""
    needed = {path for path, how in tree.changed(step.before, step.after).items() if how != "A"}
    there = tree.files(head, *needed) if needed else {}
    return {one.path: one.now for one in targets if one.path in needed and one.path not in there}


def rename(patch: Patch, names: Mapping[str, str]) -> Patch:
    """Return the patch with files, and its Anchor trailers, under their new names."""
    start = patch.data.find(b"\ndiff --git ") + 1
    head, diff = patch.data[:start], patch.data[start:]
    for old, new in names.items():
        was, now = re.escape(old.encode()), new.encode()
        # A replacement string would read backslashes of the new name, hence the functions.
        diff = re.sub(rb"(?m)^(--- a/|\+\+\+ b/)" + was + rb"(?=\t|$)", _put(now), diff)
        line = rb"(?m)^(diff --git a/)" + was + rb" b/" + was + rb"$"
        diff = re.sub(line, _put(now + b" b/" + now), diff)
        head = re.sub(rb"(?m)^(Anchor: *)" + was + rb"(?=::)", _put(now), head)
    return series.parse(patch.name, head + diff)


def _put(text: bytes) -> Callable[[re.Match[bytes]], bytes]:
    return lambda row: row[1] + text


def _fit(tree: Git, head: str, step: Step, keep_conflict: bool) -> _Fit:
    """Find out whether the release has the effect already, else apply strictly, else merge."""
    with tempfile.TemporaryDirectory() as tmp:
        mail = Path(tmp) / "mail"
        mail.write_bytes(step.patch.data)
        forward = tree.run("apply", "--cached", "--check", "--verbose", str(mail), check=False)
        strict = forward.returncode == 0
        notes: tuple[str, ...] = ()
        if _present(tree, head, step, mail):
            if not strict:
                return _Fit(
                    State.UPSTREAMED, detail="all its lines are there already (it applies in reverse)"
                )
            notes = ("its lines are there already, yet it applies once more: check for a double",)
        if strict:
            tree.run(*_AM, "--no-3way", str(mail))
            moved = effects.offsets(forward.stderr.decode("utf-8", "replace"))
            state = State.OFFSET if moved else State.CLEAN
            return _Fit(state, tree.out("rev-parse", "HEAD"), "; ".join(moved), notes)
        done = tree.run(*_AM, "--3way", str(mail), check=False)
        now = tree.out("rev-parse", "HEAD")
        if done.returncode == 0:
            if now == head or tree.tree_of(now) == tree.tree_of(head):
                return _Fit(State.UPSTREAMED, detail="a 3-way merge finds nothing left to change")
            return _Fit(State.MERGED, now, "its context changed: " + _first_error(forward.stderr))
        if _elsewhere(tree, head, step):
            reset(tree, head)
            return _Fit(State.UPSTREAMED, detail="all its lines are there already, in other surroundings")
        clash = tree.paths("diff", "-z", "--name-only", "--diff-filter=U")
        if keep_conflict and clash:
            tree.run("am", "--quit")
        else:
            reset(tree, head)
        return _Fit(State.CONFLICT, detail=_conflict(clash, done.stderr, forward.stderr))


def _present(tree: Git, head: str, step: Step, mail: Path) -> bool:
    """Say whether the patch applies in reverse on ``head`` but did not before it was applied on the old
    line."""
    if tree.run("apply", "--cached", "--check", "-R", str(mail), check=False).returncode != 0:
        return False
    with tempfile.TemporaryDirectory() as tmp:
        old = tree.with_env(GIT_INDEX_FILE=str(Path(tmp) / "index"))
        old.run("read-tree", step.before)
        return old.run("apply", "--cached", "--check", "-R", str(mail), check=False).returncode != 0


def _elsewhere(tree: Git, head: str, step: Step) -> bool:
    """Say whether all that the patch adds is in its files on ``head``, and all that it removes is gone."""

    def text(commit: str, path: str) -> str:
        return (tree.blob(commit, path) or b"").decode("utf-8", "surrogateescape")

    diff = effects.diff_between(tree, step.before, step.after)
    return effects.is_present(diff, lambda path: text(step.before, path), lambda path: text(head, path))


def _first_error(said: bytes) -> str:
    rows = [
        row.removeprefix("error: ")
        for row in said.decode("utf-8", "replace").splitlines()
        if row.startswith("error: ")
    ]
    failed = [row.replace("patch failed: ", "around ") for row in rows if row.startswith("patch failed: ")]
    return ", ".join(failed) or (rows[0] if rows else "it does not apply strictly")


def _conflict(clash: list[str], am: bytes, strict: bytes) -> str:
    if clash:
        return "in " + ", ".join(clash)
    return _first_error(am) if b"error: " in am else _first_error(strict)


def _judge(
    tree: Git, head: str, step: Step, moved: Patch, outcome: Outcome, names: Mapping[str, str]
) -> Outcome:
    """Look at what the text did: lost lines, place, and whether that code still runs."""
    if outcome.state is State.UPSTREAMED:
        return outcome
    reached = checks.live_problem(tree, head, moved)
    if not outcome.commit:
        lost = [] if names else checks.missing_anchors(tree, step.before, head, moved)
        notes = (*outcome.notes, f"UNREACHED as well: {reached}") if reached else outcome.notes
        if lost:
            detail = f"{'; '.join(lost)}; {outcome.detail}"
            return replace(outcome, state=State.ANCHOR_LOST, detail=detail, notes=notes)
        return replace(outcome, notes=notes)
    outcome = compare(tree, step, head, outcome, names)
    wrong = checks.anchor_problems(tree, head, outcome.commit, moved)
    if wrong:
        return replace(outcome, state=State.ANCHOR_LOST, detail="; ".join(wrong), commit="")
    if reached:
        return replace(outcome, state=State.UNREACHED, detail=reached)
    return outcome


def compare(
    tree: Git, step: Step, head: str, outcome: Outcome, names: Mapping[str, str] | None = None
) -> Outcome:
    """Compare the change that ``outcome.commit`` makes with the one of the old line."""
    old = effects.of_diff(effects.diff_between(tree, step.before, step.after), names)
    new = effects.of_commit(tree, head, outcome.commit)
    notes = outcome.notes
    if new.hunks < old.hunks:
        notes = (*notes, f"{old.hunks} hunks became {new.hunks}")
    for path in sorted(old.paths - new.paths):
        notes = (*notes, f"{path} is not changed any more")
    for path in sorted(new.paths - old.paths):
        notes = (*notes, f"{path} is changed now, it was not before")
    lost, gained = old.without(new), new.without(old)
    if outcome.state in {State.CLEAN, State.OFFSET} and (lost or gained):
        raise CheckFailed(
            f"{step.patch.name} applied strictly, yet other lines changed: {'; '.join([*lost, *gained][:3])}",
            fix="report this with your git version; nothing was written",
        )
    return replace(outcome, hunks=(old.hunks, new.hunks), lost=lost, gained=gained, notes=notes)


def reset(tree: Git, head: str) -> None:
    """Put the tree back to ``head``: no operation in progress, no changed and no new file."""
    tree.run("am", "--quit", check=False)
    tree.run("read-tree", "--reset", "-u", head)
    tree.run("update-ref", "--no-deref", "HEAD", head)
    tree.run("clean", "-q", "-f", "-d")
