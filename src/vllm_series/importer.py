"""Imports a pinned sdist into the object store as one commit whose id depends on the sdist alone."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from vllm_series import fetch, lock_file, sdist
from vllm_series.errors import IntegrityError
from vllm_series.git import (
    FIXED_DATE,
    IDENT_EMAIL,
    IDENT_NAME,
    Git,
    GitError,
    clean_env,
    raise_if_disk_full,
    require_git,
)
from vllm_series.lock_file import locked
from vllm_series.pins import Pin
from vllm_series.ui import say
from vllm_series.workspace import Workspace

_A_DAY = 86400.0  # seconds


def odb(ws: Workspace) -> Git:
    """Return git in the object store, which is made on first use and holds the imports of all pins."""
    require_git()
    if not ws.odb.is_dir():
        with locked(ws.work / "odb.lock"):
            new = ws.odb.with_name(f".{ws.odb.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            Git(new).run("init", "-q", "--bare", "--template=", "--object-format=sha1", ".")
            if not ws.odb.is_dir():  # another run may have made it while this one waited
                new.rename(ws.odb)
    return Git(ws.odb)


@contextlib.contextmanager
def writing(ws: Workspace) -> Iterator[None]:
    """Hold the store's lock, as every run does that fetches or imports into it, and remove what killed ones
    left."""
    with locked(ws.work / "odb.lock"):
        packs = ws.odb / "objects" / "pack"
        # A .keep stops every later import of the same files: "cannot create keep file".
        for leftover in (*packs.glob("tmp_*"), *packs.glob("*.keep"), ws.odb / "shallow.lock"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        for leftover in (ws.odb / "objects").glob("??/tmp_obj_*"):  # may be another run's that is alive
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _A_DAY:
                    leftover.unlink()
        yield


def fetch_ref(ws: Workspace, source: Path, name: str, ref: str) -> None:
    """Fetch ``name`` of another repository on this machine into a ref of the store; the caller holds the lock
    that guards the ref."""
    store = odb(ws)
    with writing(ws):
        store.fetch_ref(source, name, ref)


def base_ref(line: str) -> str:
    return f"refs/heads/upstream/{line}"


def message(pin: Pin) -> str:
    return (
        f"vLLM {pin.version}\n\n"
        f"Source: {pin.source.sdist.filename}\nSha256: {pin.source.sdist.sha256}\n"
        f"Commit: {pin.source.commit}\n"
    )


def expected_commit(pin: Pin) -> str | None:
    """Return the id of the import's commit, computed from the pin alone; None if the pin has no tree yet."""
    if not pin.source.tree:
        return None
    who = f"{IDENT_NAME} <{IDENT_EMAIL}> {FIXED_DATE}"
    body = f"tree {pin.source.tree}\nauthor {who}\ncommitter {who}\n\n{message(pin)}".encode()
    return hashlib.sha1(b"commit %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def import_pin(ws: Workspace, pin: Pin, sources: Iterable[Path] = ()) -> str:
    """Make sure that the pin's source is in the object store; return the commit id.

    The sdist is read only if the store does not hold the import yet.

    Raises:
        IntegrityError: sha256, commit id or tree id differ from the pin.
        FetchFailed: the sdist cannot be had.
    """
    store = odb(ws)
    wanted = expected_commit(pin)
    if wanted and store.commit_of(base_ref(pin.line)) == wanted:
        return wanted
    archive = fetch.fetch(ws, pin.source.sdist, sources)
    with writing(ws):
        if wanted and store.commit_of(wanted):
            store.set_ref(base_ref(pin.line), wanted)
            return wanted
        say(f"import {archive.name}")
        try:
            commit = _fast_import(store, pin, archive)
        except OSError as err:
            raise fetch.disk_error(err, ws.odb) from err
        tree = store.tree_of(commit)
        if pin.source.tree and tree != pin.source.tree:
            raise IntegrityError(
                f"{archive.name} imports as tree {tree}, the pin says {pin.source.tree}",
                fix=f"check pins/{pin.line}.toml, or upgrade this tool",
            )
        store.set_ref(base_ref(pin.line), commit)
        return commit


def _fast_import(store: Git, pin: Pin, archive: Path) -> str:
    """Feed the sdist to git fast-import; what it is good for shows only when the caller sets the line's
    ref."""
    tmp_ref = f"refs/import/{pin.line}"
    store.drop_ref_lock(tmp_ref)
    settings = {"fastimport.unpackLimit": "1", "pack.compression": "1"}
    argv = Git(store.cwd, config=settings).argv(
        "fast-import", "--quiet", "--force", "--depth=0", "--date-format=raw"
    )
    with subprocess.Popen(
        argv,
        cwd=store.cwd,
        env=clean_env(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=lock_file.held(),
    ) as child:
        assert child.stdin is not None and child.stderr is not None
        try:
            _send(child.stdin, pin, archive, tmp_ref)
            child.stdin.close()
        except BrokenPipeError:
            pass  # it said why on stderr
        except BaseException:
            child.kill()
            with contextlib.suppress(OSError):  # what is buffered cannot be written any more
                child.stdin.close()
            raise
        said = child.stderr.read().decode("utf-8", "replace")
    if child.returncode != 0:
        raise_if_disk_full(said, store.cwd)
        raise GitError(["fast-import"], child.returncode, said)
    return store.out("rev-parse", tmp_ref)


def _send(out: IO[bytes], pin: Pin, archive: Path, ref: str) -> None:
    who = f"{IDENT_NAME} <{IDENT_EMAIL}> {FIXED_DATE}"
    text = message(pin).encode()
    out.write(
        f"commit {ref}\nauthor {who}\ncommitter {who}\ndata {len(text)}\n".encode() + text + b"\ndeleteall\n"
    )
    commit = ""
    for member in sdist.members(archive):
        if member.path == sdist.VERSION_FILE:
            commit = sdist.commit_in(member.data, archive)
        if not sdist.is_generated(member.path):
            out.write(f"M {member.mode} inline {_quoted(member.path)}\ndata {len(member.data)}\n".encode())
            out.write(member.data)
            out.write(b"\n")
    if not sdist.same_commit(commit, pin.source.commit):
        raise IntegrityError(
            f"{archive.name} was made from commit {commit or '(not told)'}, the pin says {pin.source.commit}",
            fix=f"correct source.commit in pins/{pin.line}.toml if the release was really made from {commit}",
        )
    out.write(b"done\n")


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
