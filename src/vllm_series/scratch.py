"""Throw-away work trees on commits of the object store.

Each is a repository of its own whose ``objects`` is a link to the object store's, so what is committed there
is in the store at once, and nothing of it is registered in the store: whatever a killed run leaves of it is
gone with its folder. (``git worktree`` keeps its books in the store, and a kill leaves them locked.)
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_series.errors import NeedsPerson
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.workspace import Workspace

# The objects are not the repository's own: no git that a person runs in it may collect them.
_CONFIG = """[core]
\trepositoryFormatVersion = 1
[extensions]
\tpreciousObjects = true
[gc]
\tauto = 0
"""


def repository(store: Git, place: Path, commit: str) -> Git:
    """Make a repository at ``place`` with a detached HEAD at ``commit``, no file checked out; return git in
    it.

    It is made beside its place and renamed: ``place`` is either not there or whole. The caller holds the lock
    that guards it, and has removed what was there.
    """
    new = place.with_name(f".{place.name}.new")
    remove(new)
    (new / ".git").mkdir(parents=True)
    (new / ".git" / "objects").symlink_to((store.cwd / "objects").resolve())
    git = Git(new)
    git.run("init", "-q", "--template=", "--object-format=sha1", ".")
    with (new / ".git" / "config").open("a") as config:
        config.write(_CONFIG)
    git.run("update-ref", "--no-deref", "HEAD", commit)
    new.rename(place)
    return Git(place)


def remove(place: Path) -> None:
    """Remove a repository and what a killed run left of making it."""
    for folder in (place, place.with_name(f".{place.name}.new")):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


@contextlib.contextmanager
def work_tree(
    store: Git, ws: Workspace, commit: str, name: str, only: Iterable[str] | None = None
) -> Iterator[Git]:
    """Yield git in a throw-away work tree at ``commit``; ``only`` limits which files are really written.

    The caller holds the lock of ``name``: a leftover of a killed run under this name is removed first.
    """
    place = ws.work / "scratch" / name
    remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    tree = repository(store, place, commit)
    try:
        if only is not None:
            sparse = place / ".git" / "info" / "sparse-checkout"
            sparse.parent.mkdir(exist_ok=True)
            sparse.write_text("".join(f"/{_escaped(path)}\n" for path in only) or "/.none\n")
            tree = tree.with_config(core_sparseCheckout="true", core_sparseCheckoutCone="false")
        tree.run("read-tree", "-m", "-u", "HEAD")
        yield tree
    finally:
        remove(place)


@contextlib.contextmanager
def folder(ws: Workspace, kind: str) -> Iterator[Path]:
    """Yield a new folder for temporary files under ``.work/``, after removing those of runs that were
    killed."""
    base = ws.work / "tmp"
    with contextlib.ExitStack() as stack:
        with locked(base / "lock"):
            for old in base.glob("*.d"):
                with contextlib.suppress(NeedsPerson), locked(old.with_suffix(".lock"), wait=0):
                    old.with_suffix(".lock").unlink()
                    shutil.rmtree(old, ignore_errors=True)
            place = Path(tempfile.mkdtemp(prefix=f"{kind}-", suffix=".d", dir=base))
            held = place.with_suffix(".lock")
            stack.enter_context(locked(held))
        try:
            yield place
        finally:
            held.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)


def _escaped(path: str) -> str:
    return "".join("\\" + c if c in "\\*?[]! #" else c for c in path)
