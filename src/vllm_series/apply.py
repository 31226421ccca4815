"""Lays a line's patched tree out in ``build/<line>``; safe to repeat, never overwrites work that is not
exported."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_series import clone, fetch, identity, importer, lock, overlay, scratch, series, stack, state
from vllm_series.errors import IntegrityError, UsageError, WouldLoseWork
from vllm_series.files import blob_id
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.pins import Pin
from vllm_series.stack import Stack
from vllm_series.state import EXPORTING, NEXT, PREVIOUS, STAMP, State
from vllm_series.ui import say
from vllm_series.workspace import Workspace


@dataclass(frozen=True)
class Applied:
    """Result of an apply; ``changed`` is False if the tree was already as wanted."""

    stack: Stack
    path: Path
    changed: bool
    saved: str = ""  # ref that keeps discarded work


def line_lock(ws: Workspace, line: str) -> contextlib.AbstractContextManager[None]:
    """Return the lock that every command which changes a line's tree or patches holds."""
    return locked(ws.work / f"line-{line}.lock")


def apply(
    ws: Workspace,
    pin: Pin,
    *,
    discard: bool = False,
    before: str | None = None,
    base: str | None = None,
    sources: Iterable[Path] = (),
) -> Applied:
    """Bring ``build/<line>`` to what patches/ and overlay/ give. Takes the line's lock.

    ``discard`` saves unexported work under a ref and overwrites it. ``before`` stops before the named patch
    and leaves
    the overlay out (state PARTIAL). ``base`` is another base commit in the object store (from a clone).

    Raises:
        WouldLoseWork: the tree holds work that is not exported, or is not ours.
        CheckFailed: a patch does not apply, or the result differs from LOCK.
    """
    with line_lock(ws, pin.line):
        imported = importer.import_pin(ws, pin, sources)
        _remove_leftovers(ws, pin.line)
        found = state.inspect(ws, pin)
        if found.interrupted:
            finish(ws, pin, found)
            found = state.inspect(ws, pin)
        accepted = {State.ABSENT, State.PRISTINE, State.APPLIED, State.STALE}
        if found.state is State.PARTIAL and found.detail.startswith("only"):
            accepted.add(State.PARTIAL)
        if discard:
            accepted |= {State.DIRTY, State.AHEAD, State.PARTIAL}
        state.require(found, pin.line, accepted)
        made = _wanted(ws, pin, before, base or _base_of(ws, pin, found, imported))
        if before is None:
            _check_lock(ws, pin, made, imported)
        same = found.stamp and found.stamp.key == made.key and found.stamp.complete == made.complete
        if same and found.state is (State.APPLIED if before is None else State.PARTIAL):
            identity.write(found.path, pin)
            return Applied(made, found.path, changed=False)
        try:
            if found.state is State.ABSENT:
                _create(ws, made)
                identity.write(found.path, pin)
                return Applied(made, found.path, changed=True)
            saved = ""
            if discard and found.state in {State.DIRTY, State.AHEAD, State.PARTIAL}:
                saved = _save(ws, pin, found)
            _move(ws, made, found)
            identity.write(found.path, pin)
            return Applied(made, found.path, changed=True, saved=saved)
        except OSError as err:
            raise fetch.disk_error(err, found.path) from err


def _wanted(ws: Workspace, pin: Pin, before: str | None, base: str) -> Stack:
    if before is None:
        return stack.current(ws, pin, base=base)
    patches = series.load(ws, pin.line)
    order = [patch.name for patch in patches]
    if before not in order:
        raise UsageError(
            f"--before {before}: no such patch in patches/{pin.line}/series",
            fix="name one of: " + ", ".join(order),
        )
    return stack.build(ws, pin, patches[: order.index(before)], {}, base=base, complete=False)


def _base_of(ws: Workspace, pin: Pin, found: state.TreeState, imported: str) -> str:
    """Stay on the commit of a clone if that is what the tree stands on, else take the import."""
    if found.stamp is None or found.stamp.base == imported:
        return imported
    git, store = Git(found.path), importer.odb(ws)
    if not git.commit_of(found.stamp.base) or not clone.is_clone_of(git, found.stamp.base, pin):
        return imported
    if not store.commit_of(found.stamp.base):
        importer.fetch_ref(ws, found.path, "HEAD", clone.ref(pin.line))
    return found.stamp.base


def _check_lock(ws: Workspace, pin: Pin, made: Stack, imported: str) -> None:
    """Compare with LOCK; a stack on a clone's commit must change the same files to the same bytes.

    Raises:
        CheckFailed: LOCK is of other patches.
        IntegrityError: the result is another one.
    """
    if made.base == imported:
        lock.check(ws, made)
        return
    own, store = stack.current(ws, pin, base=imported), importer.odb(ws)
    lock.check(ws, own)
    paths = sorted({*store.changed(made.base, made.top), *store.changed(own.base, own.top)})
    if paths and store.files(made.top, *paths) != store.files(own.top, *paths):
        raise IntegrityError(
            f"line {pin.line}: the patches give other files on the clone's commit than on the sdist",
            fix=f"leave --git out, and report it with `git -C build/{pin.line} log -1`",
        )


def _create(ws: Workspace, made: Stack) -> None:
    """Make the tree beside its place and rename it there, so that a killed run leaves nothing half made."""
    store, place = importer.odb(ws), ws.build(made.line)
    place.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{made.line}.new-", dir=place.parent))
    store.set_ref(stack.stack_ref(made.line), made.head)
    git = Git(tmp)
    git.run("init", "-q", "--template=", "--object-format=sha1", "-b", f"series/{made.line}", ".")
    _link_packs(store, git)
    _bring(ws, git, made)
    git.set_ref(stack.stack_ref(made.line), made.head, message="series apply")
    git.run("config", "core.autocrlf", "false")
    git.run("config", "gc.auto", "0")
    # Nearly all the time goes into the file system making thousands of files: let each core do it.
    git.with_config(checkout_workers="0").run("read-tree", "-m", "-u", "HEAD")
    stack.write_ref(git, STAMP, made)
    tmp.chmod(0o755)
    with contextlib.suppress(OSError):
        place.rmdir()
    tmp.replace(place)


def _link_packs(store: Git, git: Git) -> None:
    """Take the store's packs over into a new repository, as hard links where that is possible.

    `git clone` would do so too, but takes loose objects along that another run is writing, and fails when one
    of them gets its name meanwhile.
    """
    for index in (store.cwd / "objects" / "pack").glob("pack-*.idx"):
        for part in (index.with_suffix(".pack"), index):
            place = git.cwd / ".git" / "objects" / "pack" / part.name
            try:
                os.link(part, place)
            except OSError:  # on another disk
                shutil.copyfile(part, place)


def _remove_leftovers(ws: Workspace, line: str) -> None:
    for leftover in (ws.root / "build").glob(f".{line}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _bring(ws: Workspace, git: Git, made: Stack) -> None:
    """Copy the stack's commits from the object store into the tree's repository, past its config and
    hooks."""
    if git.commit_of(made.head) and git.commit_of(made.top):
        return
    have = [f"^{made.base}"] if git.commit_of(made.base) else []
    wanted = "\n".join([made.head, *have, ""]).encode()
    pack = importer.odb(ws).raw("pack-objects", "-q", "--revs", "--thin", "--stdout", data=wanted)
    git.run("index-pack", "--stdin", "--fix-thin", data=pack)


def _move(ws: Workspace, made: Stack, found: state.TreeState) -> None:
    """Move an existing tree, whose work is exported or saved, to another stack."""
    git = Git(found.path)
    _bring(ws, git, made)
    _nothing_in_the_way(git, made, found.head or made.base)
    _begin(git, made)
    _lay_out(
        git,
        made,
        found.head or made.base,
        overwrite=found.state not in {State.PRISTINE, State.APPLIED, State.STALE},
    )


def _begin(git: Git, made: Stack) -> None:
    """Note what is about to be laid out and from which commit, for the case that this run is killed."""
    git.set_ref(PREVIOUS, "HEAD")
    stack.write_ref(git, NEXT, made)


def _lay_out(git: Git, made: Stack, old: str, *, overwrite: bool) -> None:
    """Change files, HEAD and stamp; ``refs/series/next`` tells a later run to finish this if it is
    interrupted."""
    if overwrite:
        for leftover in ("rebase-merge", "rebase-apply"):
            shutil.rmtree(git.cwd / ".git" / leftover, ignore_errors=True)
        for name in ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG"):
            (git.cwd / ".git" / name).unlink(missing_ok=True)
        git.run("read-tree", "--reset", "-u", made.head)
    else:
        git.run("update-index", "-q", "--refresh", check=False)  # a touched file is no changed file
        git.run("read-tree", "-m", "-u", old, made.head)
    git.run("symbolic-ref", "HEAD", stack.stack_ref(made.line))
    git.set_ref(stack.stack_ref(made.line), made.head, message="series apply")
    stack.write_ref(git, STAMP, made)
    git.clear_ref(EXPORTING)
    git.clear_ref(NEXT)


def adopt(ws: Workspace, git: Git, made: Stack) -> None:
    """Make a clean tree whose files are those of ``made`` stand on its commits (HEAD's history is
    rewritten)."""
    _bring(ws, git, made)
    _nothing_in_the_way(git, made, "HEAD")
    _begin(git, made)
    _lay_out(git, made, "HEAD", overwrite=False)


def _nothing_in_the_way(git: Git, made: Stack, old: str) -> None:
    """Refuse to overwrite a file that git does not track; git itself overwrites those that it ignores.

    Raises:
        WouldLoseWork: a file of the new stack is there already, with other content.
    """
    added = [path for path, how in git.changed(old, made.head).items() if how == "A"]
    there = [path for path in added if (git.cwd / path).is_symlink() or (git.cwd / path).exists()]
    blobs = git.files(made.head, *there) if there else {}
    other = [
        p for p in there if not (git.cwd / p).is_file() or blob_id((git.cwd / p).read_bytes()) != blobs[p][1]
    ]
    if other:
        raise WouldLoseWork(
            f"build/{made.line} has files that the series brings too, with other content: "
            f"{', '.join(other[:5])}",
            fix="move them away or delete them, then run the command again",
        )


def finish(ws: Workspace, pin: Pin, found: state.TreeState) -> None:
    """End a run that was killed while it laid files out; the caller holds the line's lock.

    Files that the run did not change, and commits made after it, are work of the user: they are saved under
    a ref.
    """
    made, git = found.interrupted, Git(found.path)
    assert made is not None
    for name in ("index.lock", "HEAD.lock", "packed-refs.lock"):
        (found.path / ".git" / name).unlink(missing_ok=True)
    if not git.commit_of(made.head) or not found.head:
        git.clear_ref(NEXT)
        return
    expected = {git.commit_of(PREVIOUS), made.head}
    moving = set(git.changed(found.head, made.head))
    if found.head in expected:
        git.run("read-tree", "--reset", found.head)  # the index may be half new
    others = [path for path in state.dirty_paths(git) if path not in moving]
    if others or found.head not in expected:
        saved = _save(ws, pin, found)
        say(f"build/{pin.line}: changes made after an interrupted run are kept under {saved}")
    say(f"build/{pin.line}: ending an interrupted run")
    _lay_out(git, made, found.head, overwrite=True)


def _save(ws: Workspace, pin: Pin, found: state.TreeState) -> str:
    """Keep HEAD and all uncommitted files as a commit under ``refs/series/saved``; clean the tree to HEAD."""
    git = Git(found.path)
    head = found.head or "HEAD"
    with scratch.folder(ws, "index") as tmp:
        own = git.with_env(GIT_INDEX_FILE=os.fspath(tmp / "index"))
        own.run("read-tree", head)
        own.run("add", "-A", ".")
        tree = own.out("write-tree")
    commit = git.out("commit-tree", tree, "-p", head, "-m", "work discarded by series apply --discard")
    ref = f"refs/series/saved/{commit[:12]}"
    git.set_ref(ref, commit)
    for path in git.paths("ls-files", "-z", "--others", "--exclude-standard"):
        if not overlay.is_junk(path):
            (found.path / path).unlink(missing_ok=True)
    return ref


def ensure(ws: Workspace, pin: Pin) -> Stack:
    """Return the line's stack as commits in the object store, checked against LOCK; touches no tree."""
    with line_lock(ws, pin.line):
        made = stack.current(ws, pin)
        lock.check(ws, made)
        return made
