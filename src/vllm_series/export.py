"""Writes the commits of ``build/<line>`` back as patches, series, LOCK and overlay files.

Export never applies anything to the user's files on disk before it has proved, in the object store, that
the new
patches and overlay give exactly the tree that was committed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_series import apply as applying
from vllm_series import export_files, importer, lock, overlay, scratch, series, stack, state
from vllm_series.errors import CheckFailed, NeedsPerson, WouldLoseWork
from vllm_series.git import Git
from vllm_series.pins import Pin
from vllm_series.series import Patch
from vllm_series.stack import Stack
from vllm_series.state import State, TreeState
from vllm_series.workspace import Workspace

_AUTOSQUASH = re.compile(r"^(fixup|squash|amend)! ")
FORMAT = (
    "format-patch", "--stdout", "--zero-commit", "--full-index", "--no-signature", "--no-stat", "-N",
    "--no-renames",
    "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--no-attach", "--no-thread", "--no-base",
    "--no-notes", "--no-signoff", "--no-to", "--no-cc", "--no-add-header", "--no-encode-email-headers",
    "--src-prefix=a/", "--dst-prefix=b/",
    "--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers", "--indent-heuristic", "-1",
)  # fmt: skip


@dataclass(frozen=True)
class Commit:
    """One commit of the tree: what it touches in upstream's files and in the overlay."""

    id: str
    subject: str
    upstream: tuple[str, ...]
    overlay: tuple[str, ...]


@dataclass
class Plan:
    """What an export would write."""

    patches: list[Patch]
    rewritten: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    overlay: dict[str, bytes | None] = field(default_factory=dict)  # None: the file is removed
    modes: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.rewritten or self.added or self.dropped or self.overlay)


def export(ws: Workspace, pin: Pin, *, drop: Sequence[str] = ()) -> Plan:
    """Export the commits of ``build/<line>``; takes the line's lock. Returns what was written.

    Raises:
        WouldLoseWork: uncommitted changes, a patch would be dropped, or the files on disk changed as well.
        CheckFailed: a commit mixes overlay and upstream files, the export is empty, or it does not give the
        same tree.
        NeedsPerson: fixup commits do not squash without a conflict.
    """
    with applying.line_lock(ws, pin.line):
        found = state.inspect(ws, pin)
        if found.interrupted:
            applying.finish(ws, pin, found)
            found = state.inspect(ws, pin)
        state.require(found, pin.line, {State.APPLIED, State.AHEAD})
        assert found.head and found.stamp
        if not found.stamp.complete:
            raise WouldLoseWork(
                f"build/{pin.line} has only the first patches; an export would drop the others",
                fix=f"series export {pin.line} --as PATCH for the patch that was made anew",
            )
        store, stamp = importer.odb(ws), found.stamp
        _disk_unchanged(ws, pin.line, found)
        old = export_files.patches_on_disk(ws, pin.line, Git(found.path))
        importer.fetch_ref(ws, found.path, "HEAD", f"refs/export/{pin.line}")
        commits = collect(ws, store, stamp.base, found.head, pin.line)
        plan = plan_patches(store, commits, old, stamp, drop, pin.line)
        _plan_overlay(ws, store, found.head, stamp, plan, pin.line)
        made = _prove(ws, pin, store, found.head, stamp, plan)
        export_files.install(
            ws, pin.line, found, plan.patches, plan.overlay, plan.modes, lock.lock_of(ws, made)
        )
        final = stack.current(ws, pin, base=stamp.base)
        git = Git(found.path)
        applying.adopt(ws, git, final)
        return plan


def collect(ws: Workspace, store: Git, base: str, head: str, line: str) -> list[Commit]:
    """Return the commits from base to head after squashing fixups; refuses what cannot become patches."""
    merges = store.lines("rev-list", "--merges", f"{base}..{head}")
    if merges:
        raise CheckFailed(
            f"build/{line} has merge commits ({merges[0][:12]}); patches are a straight line",
            fix=f"git -C {ws.build(line)} rebase {base[:12]}, then export again",
        )
    if any(_AUTOSQUASH.match(row) for row in store.lines("log", "--format=%s", f"{base}..{head}")):
        head = _squash(ws, store, base, head, line)
    found = []
    for row in store.lines("log", "--reverse", "--format=%H %s", f"{base}..{head}"):
        commit, _, subject = row.partition(" ")
        paths = store.changed(f"{commit}^", commit)
        mine = tuple(sorted(path for path in paths if overlay.is_overlay(path)))
        theirs = tuple(sorted(path for path in paths if not overlay.is_overlay(path)))
        found.append(Commit(commit, subject, theirs, mine))
        if mine and theirs:
            raise CheckFailed(
                f"commit {commit[:12]} ({subject}) touches overlay files ({', '.join(mine[:3])}) "
                f"and upstream files "
                f"({', '.join(theirs[:3])})",
                fix="split it: git rebase -i, mark it `edit`, git reset HEAD^, commit the files under "
                f"{', '.join(overlay.ROOTS)} on their own, then the rest, git rebase --continue",
            )
        if not paths:
            raise CheckFailed(
                f"commit {commit[:12]} ({subject}) changes nothing",
                fix=f"git -C {ws.build(line)} rebase -i, drop it",
            )
    return found


def _squash(ws: Workspace, store: Git, base: str, head: str, line: str) -> str:
    touched = set(store.paths("log", "-z", "--format=", "--name-only", "--no-renames", f"{base}..{head}"))
    with scratch.work_tree(store, ws, head, f"export-{line}", sorted(touched)) as tree:
        # An editor that changes nothing leaves git's own remarks in a squashed message; "#" may start a
        # user's line.
        tree = tree.with_config(commit_cleanup="strip", core_commentChar="\x1f")
        done = tree.run(
            "rebase", "-q", "-i", "--autosquash", "--no-gpg-sign", "--empty=keep", base, check=False
        )
        if done.returncode != 0:
            where = tree.run("diff", "--name-only", "--diff-filter=U", check=False).stdout.decode().split()
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise NeedsPerson(
                f"line {line}: the fixup commits do not squash cleanly: "
                f"{', '.join(where) or ' '.join(said[-3:])}",
                fix=f"git -C {ws.build(line)} rebase -i --autosquash {base[:12]}, resolve, then export again",
            )
        left = [row for row in tree.lines("log", "--format=%s", f"{base}..HEAD") if _AUTOSQUASH.match(row)]
        if left:
            raise CheckFailed(
                f"line {line}: no commit to squash into: {left[0]}",
                fix="reword it to the subject of an existing patch",
            )
        return tree.out("rev-parse", "HEAD")


def plan_patches(
    store: Git, commits: Sequence[Commit], old: Sequence[Patch], stamp: Stack, drop: Sequence[str], line: str
) -> Plan:
    """Give every upstream commit a patch file: the old bytes where the effect is the same."""
    wanted = [c for c in commits if c.upstream]
    if not wanted and old:
        raise CheckFailed(
            f"line {line}: the tree has no patch commits, an export would remove all {len(old)} patches",
            fix=f"series apply {line} --discard restores them; to retire a line remove its files by hand",
        )
    fresh = {c.id: store.raw(*FORMAT, c.id) for c in wanted}
    names = _match(wanted, fresh, old, stamp)
    plan = Plan([])
    by_name = {patch.name: patch for patch in old}
    for commit in wanted:
        name = names.get(commit.id) or _new_name(commit.subject, {*by_name, *names.values()})
        names[commit.id] = name
        patch = series.parse(name, fresh[commit.id])
        before = by_name.get(name)
        if before and same(before, patch):
            patch = before
        elif before:
            plan.rewritten.append(name)
        else:
            plan.added.append(name)
        plan.patches.append(patch)
    kept = {patch.name for patch in plan.patches}
    plan.dropped = [patch.name for patch in old if patch.name not in kept]
    surprise = [name for name in plan.dropped if name not in drop]
    if surprise:
        raise WouldLoseWork(
            f"line {line}: no commit of the tree stands for {', '.join(surprise)}; the export would drop it",
            fix=" ".join([f"series export {line}", *(f"--drop {name}" for name in surprise)])
            + " if that is meant, else restore the commit (git reflog)",
        )
    order = [patch.name for patch in plan.patches if patch.name in by_name]
    if not plan.rewritten and order != [patch.name for patch in old if patch.name in kept]:
        plan.rewritten.append("series")
    return plan


def same(one: Patch, other: Patch) -> bool:
    """Say whether two patches have the same message, author and effect."""
    return (one.subject, one.body, one.author) == (other.subject, other.body, other.author) and series.effect(
        one.data
    ) == series.effect(other.data)


def _match(
    wanted: Sequence[Commit], fresh: Mapping[str, bytes], old: Sequence[Patch], stamp: Stack
) -> dict[str, str]:
    """Find which commit is which patch: same commit, then same subject, then same effect."""
    names: dict[str, str] = {}
    free = {patch.name: patch for patch in old}
    recorded = {commit: name for name, commit in stamp.commits}

    def take(commit: Commit, name: str | None) -> None:
        if name is not None and name in free:
            names[commit.id] = name
            del free[name]

    for commit in wanted:
        take(commit, recorded.get(commit.id))
    for commit in wanted:
        if commit.id not in names:
            subject = " ".join(commit.subject.split())
            take(commit, next((n for n, p in free.items() if p.subject == subject), None))
    for commit in wanted:
        if commit.id not in names:
            effect = series.effect(fresh[commit.id])
            take(commit, next((n for n, p in free.items() if series.effect(p.data) == effect), None))
    left = [commit for commit in wanted if commit.id not in names]
    if len(wanted) == len(old):  # nothing came and nothing went: what is left was reworded and changed
        for commit, name in zip(left, list(free), strict=True):
            take(commit, name)
    return names


def _new_name(subject: str, taken: set[str]) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:60].strip("-") or "patch"
    name, number = f"{slug}.patch", 2
    while name in taken:
        name, number = f"{slug}-{number}.patch", number + 1
    return name


def _disk_unchanged(ws: Workspace, line: str, found: TreeState) -> None:
    """Refuse to overwrite patches that were changed on disk since the tree was applied."""
    assert found.stamp
    expected = export_files.pending(Git(found.path))
    for name, sha in found.stamp.patches.items():
        expected.setdefault(name, set()).add(sha)
    now = {patch.name: patch.sha256 for patch in series.load_present(ws, line)}
    changed = [name for name, sha in now.items() if sha not in expected.get(name, set())]
    gone = [
        name
        for name in found.stamp.patches
        if name not in now and name not in export_files.dropping(Git(found.path))
    ]
    if changed or gone:
        raise WouldLoseWork(
            f"patches/{line} changed since build/{line} was applied ({', '.join([*changed, *gone])}); "
            "an export would overwrite that",
            fix=f"series apply {line} --discard keeps your commits under refs/series/saved and takes "
            "the new patches; "
            f"then git -C {ws.build(line)} cherry-pick your commits, and export",
        )


def _plan_overlay(ws: Workspace, store: Git, head: str, stamp: Stack, plan: Plan, line: str) -> None:
    """Find which overlay files the commits changed, and whether the disk changed them differently."""
    base = dict(stamp.overlay)
    mine = {p: " ".join(row) for p, row in store.files(head).items() if overlay.is_overlay(p)}
    disk = {p: " ".join(row) for p, row in overlay.entries(ws).items()}
    clash = []
    for path in sorted({*base, *mine}):
        if mine.get(path) == base.get(path) or mine.get(path) == disk.get(path):
            continue
        if disk.get(path) != base.get(path):
            clash.append(path)
        elif path in mine:
            mode, blob = mine[path].split(" ")
            plan.overlay[path], plan.modes[path] = store.raw("cat-file", "blob", blob), mode
        else:
            plan.overlay[path] = None
    if clash:
        raise WouldLoseWork(
            f"line {line}: changed both in build/{line} and in overlay/: {', '.join(clash)}",
            fix="bring the two together in overlay/ by hand, undo the commit's part of it, then export again",
        )


def _prove(ws: Workspace, pin: Pin, store: Git, head: str, stamp: Stack, plan: Plan) -> Stack:
    """Apply the planned patches on the pin's import and compare with the committed tree, file by file."""
    made = stack.build(ws, pin, plan.patches, {}, name=f"export-{pin.line}")
    want = {p: row for p, row in store.changed(stamp.base, head).items() if not overlay.is_overlay(p)}
    have = store.changed(made.base, made.top)
    tree, mine = store.files(head, *want) if want else {}, store.files(made.top, *have) if have else {}
    wrong = sorted(p for p in {*want, *have} if tree.get(p) != mine.get(p))
    if wrong:
        raise CheckFailed(
            f"line {pin.line}: the exported patches do not give the committed tree ({', '.join(wrong[:5])})",
            fix="report this with your git version; nothing was written",
        )
    return made
