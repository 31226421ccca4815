"""The interactive rebase: start, go on, give up. Every step is saved before the next begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_series import importer, scratch, series, state
from vllm_series.errors import CheckFailed, NeedsPerson, UsageError, WouldLoseWork
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.pins import lines, load_pin
from vllm_series.rebase import finish, render, resolve, saved, trial, upstream
from vllm_series.rebase.classify import Step, reset, try_patch
from vllm_series.rebase.model import Outcome, Report, settle
from vllm_series.rebase.moves import History, Moves
from vllm_series.rebase.saved import Saved
from vllm_series.rebase.upstream import Upstream
from vllm_series.state import State as TreeIs
from vllm_series.ui import say
from vllm_series.workspace import Workspace

LOCK_WAIT = 2.0  # seconds: a second run should say so at once, not queue behind the first


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    accept: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    git: str = ""


def start(ws: Workspace, old_line: str, to: str, wish: Wish) -> Report:
    """Begin a rebase and go as far as it goes without a person.

    Raises:
        NeedsPerson: a patch needs one, or a rebase to this release is under way already.
        UsageError: the release or a patch name is wrong, or the line exists.
        WouldLoseWork: a tree holds work that is not exported.
    """
    with locked(saved.folder(ws) / "lock", wait=LOCK_WAIT):
        old, new = sides(ws, old_line, to, wish.git, need_wheel=True)
        if saved.load(ws, new.line):
            raise NeedsPerson(
                f"a rebase to {new.line} is in progress already",
                fix=f"series rebase --continue --to {new.line}, "
                f"or give it up: series rebase --abort --to {new.line}",
            )
        _line_is_free(ws, old, new)
        for line in {old.line, new.line} & set(lines(ws)):
            exported(ws, line)
        patches = series.load(ws, old.line)
        _known(wish, [patch.name for patch in patches])
        now = Saved(
            old=old.line, new=new.line, phase=saved.RUNNING, base=new.base, head=new.base,
            patches=tuple((patch.name, patch.sha256) for patch in patches),
            accept=wish.accept, drop=wish.drop, git=wish.git, ref=new.commit if new.clone else "",
        )  # fmt: skip
        _place_is_free(ws, now)
        saved.save(ws, now)
        return _go_on(ws, now, old, new)


def go_on(ws: Workspace, new_line: str | None, wish: Wish) -> Report:
    """Continue a rebase that stopped or was killed.

    Raises:
        UsageError: there is none.
        NeedsPerson: it still cannot go on.
        CheckFailed: the old line's patches changed meanwhile.
    """
    with locked(saved.folder(ws) / "lock", wait=LOCK_WAIT):
        now = saved.load(ws, saved.the_one(ws, new_line, "--continue"))
        assert now is not None
        there = tuple((patch.name, patch.sha256) for patch in series.load(ws, now.old))
        if there != now.patches:
            raise CheckFailed(
                f"patches/{now.old} changed since the rebase to {now.new} began",
                fix=f"restore it (git stash, git checkout -- patches/{now.old}), or give up: "
                f"series rebase --abort --to {now.new}",
            )
        _known(wish, [name for name, _ in now.patches])
        now = replace(
            now,
            accept=tuple(dict.fromkeys((*now.accept, *wish.accept))),
            drop=tuple(dict.fromkeys((*now.drop, *wish.drop))),
        )
        old, new = sides(ws, now.old, now.ref or now.new, now.git)
        if new.base != now.base:
            raise CheckFailed(f"{now.new} is another commit now", fix=f"series rebase --abort --to {now.new}")
        return _go_on(ws, now, old, new)


def abort(ws: Workspace, new_line: str | None) -> str:
    """Give a rebase up; return the ref under which the tree's work is kept ('' if there was none)."""
    with locked(saved.folder(ws) / "lock", wait=LOCK_WAIT):
        line = saved.the_one(ws, new_line, "--abort")
        place = saved.tree_path(ws, line)
        kept = ""
        try:
            now = saved.load(ws, line)
        except CheckFailed:
            now = None
        if (place / ".git").exists():
            kept = resolve.keep(importer.odb(ws), Git(place), now.head if now else None)
        _remove_tree(ws, line)
        saved.forget(ws, line)
        return kept


def sides(
    ws: Workspace, old_line: str, to: str, git: str, *, need_wheel: bool = False
) -> tuple[Upstream, Upstream]:
    """Find both releases. With ``git`` a ``to`` that is no pinned or published version is a commit of that
    clone."""
    old = upstream.of_line(ws, old_line)
    if git and to != upstream.LATEST and not upstream.is_version(to):
        return old, upstream.of_git(ws, git, to)
    new = upstream.of_version(ws, to, need_wheel=need_wheel)
    if new.line == old.line:
        raise UsageError(f"line {old.line} is on {new.version} already", fix="name another release with --to")
    return old, new


def history(ws: Workspace, git: str, old: Upstream, new: Upstream) -> History | None:
    return upstream.history(ws, git, old, new) if git else None


def exported(ws: Workspace, line: str) -> None:
    """Refuse to go on while ``build/<line>`` holds work that the patches on disk do not have.

    Raises:
        WouldLoseWork: it does.
    """
    found = state.inspect(ws, load_pin(ws, line))
    if found.state in {TreeIs.DIRTY, TreeIs.AHEAD} or found.unexported or found.dirty:
        what = ", ".join([*found.dirty[:3], *(row.split(" ", 1)[1] for row in found.unexported[:3])])
        raise WouldLoseWork(
            f"build/{line} holds work that is not exported ({what}); the rebase would leave it behind",
            fix=f"commit it there and run: series export {line}; or drop it: series apply {line} --discard",
        )


def _line_is_free(ws: Workspace, old: Upstream, new: Upstream) -> None:
    path = series.series_path(ws, new.line)
    if path.is_file() and series.names(ws, new.line):
        raise UsageError(
            f"patches/{new.line} exists and has patches of its own",
            fix=f"try it without writing: series rebase {old.line} --to {new.line} --report; "
            f"or remove the line first: git rm -r patches/{new.line}",
        )


def _known(wish: Wish, names: Sequence[str]) -> None:
    for option, given in (("--accept", wish.accept), ("--drop", wish.drop)):
        for name in given:
            if name not in names:
                raise UsageError(
                    f"{option} {name}: no such patch in the series", fix="name one of: " + ", ".join(names)
                )
    if both := sorted(set(wish.accept) & set(wish.drop)):
        raise UsageError(f"{both[0]} is both accepted and dropped", fix="decide for one of the two")


def _place_is_free(ws: Workspace, now: Saved) -> None:
    place = now.tree(ws)
    if place.exists() and any(place.iterdir()):
        raise WouldLoseWork(
            f"build/{place.name} exists, but no rebase is in progress",
            fix=f"look whether you need anything of it, then: rm -r build/{place.name}",
        )


def _tree(ws: Workspace, now: Saved) -> Git:
    """Return the work tree of the rebase, made if it is not there, and while the tool works on it put to
    ``head``."""
    place = now.tree(ws)
    if now.phase != saved.STOPPED and (place / ".git").exists():
        _remove_tree(ws, now.new)  # of a run that was killed: no telling what git left in it
    if not (place / ".git").exists():
        if now.phase == saved.STOPPED:
            raise CheckFailed(
                f"build/{place.name} is gone, and with it what was edited there",
                fix=f"series rebase --abort --to {now.new}, then start again",
            )
        scratch.remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch.repository(importer.odb(ws), place, now.head)
        reset(Git(place), now.head)
    return Git(place)


def _remove_tree(ws: Workspace, line: str) -> None:
    scratch.remove(saved.tree_path(ws, line))


def _go_on(ws: Workspace, now: Saved, old: Upstream, new: Upstream) -> Report:
    begin = time.monotonic()
    steps = trial.steps_of(ws, now.old)
    tree = _tree(ws, now)
    if now.phase == saved.STOPPED:
        now = resolve.settle_stopped(ws, tree, now, steps[now.position])
        saved.save(ws, now)
        saved.message_path(ws, now.new).unlink(missing_ok=True)
        reset(tree, now.head)
    moves = Moves(importer.odb(ws), old.base, new.base, new.version, history(ws, now.git, old, new))
    while now.position < len(steps):
        step = steps[now.position]
        outcome = settle(try_patch(tree, now.head, step, moves, keep_conflict=True), now.accept, now.drop)
        if not outcome.settled:
            _stop(ws, now, step, outcome)
        head = outcome.commit or now.head
        now = saved.with_outcome(now, outcome, head=head, phase=saved.RUNNING)
        saved.save(ws, now)
        say(f"{step.patch.name}: {outcome.state}, {outcome.decision.value}")
        if not outcome.commit:
            reset(tree, now.head)
    now = replace(now, phase=saved.WRITING)
    saved.save(ws, now)
    report = Report(old.as_json(), new.as_json(), now.outcomes, seconds=time.monotonic() - begin)
    report = finish.write(ws, now, new, steps, tree, report)
    if not new.clone:
        _remove_tree(ws, now.new)
    saved.forget(ws, now.new)
    return report


def _stop(ws: Workspace, now: Saved, step: Step, outcome: Outcome) -> None:
    """Save where the run stopped and say how to go on.

    Raises:
        NeedsPerson: always.
    """
    message = saved.message_path(ws, now.new)
    message.parent.mkdir(parents=True, exist_ok=True)
    text = resolve.message_of(importer.odb(ws), outcome.commit or step.after)
    message.write_text(text, encoding="utf-8")
    saved.save(ws, saved.with_outcome(now, outcome, phase=saved.STOPPED))
    raise stopped(ws, now.new, outcome)


def stopped(ws: Workspace, new: str, outcome: Outcome) -> NeedsPerson:
    tree = saved.tree_path(ws, new).relative_to(ws.root)
    message = saved.message_path(ws, new).relative_to(ws.root)
    what, fix = render.stop(outcome, new, str(tree), str(message))
    return NeedsPerson(what, fix=fix)
