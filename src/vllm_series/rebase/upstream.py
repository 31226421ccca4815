"""Finds the two sides of a rebase: a pinned line, a release on the package index, or a commit of a clone."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_series import fetch, importer, index, pin_add, sdist
from vllm_series.errors import FetchFailed, UsageError
from vllm_series.git import Git, GitError
from vllm_series.lock_file import locked
from vllm_series.pins import Pin, Source, lines, load_pin
from vllm_series.rebase.moves import History
from vllm_series.ui import say
from vllm_series.workspace import Workspace

LATEST = "latest"
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")


@dataclass(frozen=True)
class Upstream:
    """One release. ``base`` is its commit in the object store, ``pin`` what the index or ``pins/`` say of it.

    ``clone`` says that the base is a commit of a clone, which has no release and no pin.
    """

    line: str
    version: str
    commit: str
    base: str
    pin: Pin | None
    clone: bool = False

    def as_json(self) -> dict[str, str]:
        return {"line": self.line, "version": self.version, "commit": self.commit}


def is_version(text: str) -> bool:
    """Say whether this can be a release (``0.34.0``) rather than a branch, a tag or a commit."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return "." in text and not text.startswith("v")


def of_line(ws: Workspace, line: str) -> Upstream:
    """Return a line that the series is carried on."""
    return of_pin(ws, load_pin(ws, line))


def of_pin(ws: Workspace, pin: Pin) -> Upstream:
    base = _imported(ws, pin) or importer.import_pin(ws, pin)
    return Upstream(pin.line, pin.version, pin.source.commit, base, pin)


def _imported(ws: Workspace, pin: Pin) -> str | None:
    """Return the import of a release that is not pinned yet, if an earlier run left it: its message names
    the sdist."""
    store = importer.odb(ws)
    commit = store.commit_of(importer.base_ref(pin.line))
    if pin.source.tree or commit is None:
        return None
    said = store.raw("log", "-1", "--format=%B", commit).decode().rstrip("\n")
    return commit if said == importer.message(pin).rstrip("\n") else None


def of_version(ws: Workspace, version: str, *, need_wheel: bool = False) -> Upstream:
    """Return a release by its version, or the newest one for ``latest``; writes no pin.

    Raises:
        UsageError: there is no such release, it was yanked, or it lacks its sdist, or its wheel and
        ``need_wheel`` is
            set.
        FetchFailed: the index cannot be reached.
    """
    if version not in lines(ws) and index.offline():
        raise FetchFailed(
            f"{version} is not pinned here, and VLLM_SERIES_OFFLINE forbids to ask the index",
            fix=f"unset VLLM_SERIES_OFFLINE, or name a pinned line ({', '.join(lines(ws))})",
        )
    if version == LATEST:
        version = pin_add.newest()
    if version in lines(ws):
        return of_line(ws, version)
    if not is_version(version):
        raise UsageError(
            f"{version!r} is not a release of vLLM",
            fix="give a version, `latest`, or with --git URL a commit, tag or branch",
        )
    wanted = Version(version)
    archive, wheels = pin_add.release(wanted, need_wheel=need_wheel)
    commit = sdist.commit_id(fetch.fetch(ws, archive))
    source = Source(str(wanted), commit, "", archive)
    # What is not needed to try patches is left empty: this pin is never written, `pin add` makes its own.
    pin = Pin(str(wanted), "candidate", 1, source, wheels, "", "", "", ws.pins / f"{wanted}.toml")
    return of_pin(ws, pin)


def of_git(ws: Workspace, url: str, ref: str) -> Upstream:
    """Return a commit, branch or tag of a clone; its objects are copied into the object store.

    Raises:
        UsageError: the clone cannot be read or does not have it.
    """
    store = importer.odb(ws)
    where = url if "://" in url or not Path(url).exists() else str(Path(url).resolve())
    wanted = _resolve(store, where, ref)
    kept = f"refs/upstream-commits/{wanted}"
    if store.commit_of(kept) != wanted:
        try:
            with importer.writing(ws):
                store.drop_ref_lock(kept)
                store.run(
                    *("fetch", "-q", "--depth=1", "--no-tags", "--no-write-fetch-head"),
                    *(where, f"+{wanted}:{kept}"),
                )
        except GitError as err:
            raise _unreadable(url, err) from err
    line = f"git-{wanted[:12]}"
    return Upstream(line, line, wanted, wanted, None, clone=True)


def _resolve(store: Git, where: str, ref: str) -> str:
    """Turn a ref or an id into a full commit id of the clone."""
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ref
    if Path(where).is_dir():
        local = Git(Path(where)).commit_of(ref)
        if local:
            return local
    try:
        rows = store.lines("ls-remote", where)
    except GitError as err:
        raise _unreadable(where, err) from err
    named = {name: commit for commit, name in (row.split("\t", 1) for row in rows)}
    for name in (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref):
        if name in named:
            return named[name]
    if _COMMIT.match(ref):
        short = {commit for commit in named.values() if commit.startswith(ref)}
        if len(short) == 1:
            return short.pop()
    raise UsageError(
        f"{where} has no {ref!r}", fix="give the full 40 digits of the commit, a tag or a branch"
    )


def _unreadable(url: str, err: GitError) -> UsageError:
    return UsageError(
        f"cannot read {index.shown(url) if '://' in url else url}: {err.stderr.splitlines()[-1:]}",
        fix="check the URL or path given to --git, and that the commit exists there",
    )


def history(ws: Workspace, url: str, old: Upstream, new: Upstream) -> History | None:
    """Return upstream's history between the two releases, or None (with a word why) if the clone lacks one
    of them."""
    clone = Path(url)
    if "://" in url or not clone.exists():
        clone = _partial_clone(ws, url)
    git = Git(clone.resolve())
    ends = []
    for side in (old, new):
        found = next((c for name in (side.commit, f"v{side.version}") if (c := git.commit_of(name))), None)
        if found is None:
            say(
                f"note: {url} has neither commit {side.commit} nor tag v{side.version}: "
                "the report lists no commits"
            )
            return None
        ends.append(found)
    return History(git, ends[0], ends[1])


def _partial_clone(ws: Workspace, url: str) -> Path:
    """Keep a clone without file contents: enough for `git log -- PATH`."""
    import hashlib

    place = ws.work / f"history-{hashlib.sha256(url.encode()).hexdigest()[:12]}.git"
    new = place.with_suffix(".new")
    with locked(place.with_suffix(".lock")):
        try:
            if not place.is_dir():
                shutil.rmtree(new, ignore_errors=True)
                say(f"clone the history of {index.shown(url)} (without file contents)")
                Git(ws.work).run("clone", "-q", "--bare", "--filter=blob:none", url, str(new))
                new.rename(place)
            else:
                for leftover in (*place.glob("*.lock"), *(place / "refs").rglob("*.lock")):
                    leftover.unlink()  # of a git that was killed: nothing else writes here
                Git(place).run("fetch", "-q", "--tags", url, "+refs/heads/*:refs/heads/*")
        except GitError as err:
            raise _unreadable(url, err) from err
    return place
