"""Site folders: one git tree of a line with the files that only upstream's wheel has, ready for
``PYTHONPATH``.

A *site* holds the whole tree (``vllm/``, ``tests/``, ``csrc/`` ...), the compiled and vendored files of the
official wheel as hard links, and the wheel's dist-info, so that ``import vllm`` and its metadata work as
after an install. The pristine and the patched site of a line differ in exactly what the git trees differ in.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_series import fetch
from vllm_series.envs import exclusive
from vllm_series.errors import UsageError
from vllm_series.files import unpack_git_archive
from vllm_series.git import Git
from vllm_series.importer import import_pin, odb
from vllm_series.pins import Artifact, Pin, load_pin
from vllm_series.workspace import Workspace

KEEP_SITES = 6  # per line; a site is about 200 MB beside its hard links


@dataclass(frozen=True)
class Site:
    """A laid tree. ``tree`` is the git tree id that it was made from."""

    path: Path
    tree: str


def host_wheel(pin: Pin) -> Artifact:
    """The official wheel for this machine.

    Raises:
        UsageError: upstream has none for this kind of machine.
    """
    machine = platform.machine().lower()
    kind = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if kind not in pin.wheels:
        raise UsageError(f"{pin.line}: no official wheel for {machine}", fix="use x86_64 or aarch64 Linux")
    return pin.wheels[kind]


def unpack_wheel(ws: Workspace, wheel: Artifact) -> Path:
    """Return the folder with the unpacked official wheel, made once per cache (about 0.8 GB)."""
    root = ws.cache / "wheels" / wheel.sha256[:16]
    mark = root / "complete"
    if mark.exists():
        return root / "files"
    with exclusive(root.with_name(root.name + ".lock")):
        if not mark.exists():
            shutil.rmtree(root, ignore_errors=True)
            (root / "files").mkdir(parents=True)
            with zipfile.ZipFile(fetch.fetch(ws, wheel)) as archive:
                archive.extractall(root / "files")
            mark.touch()
    return root / "files"


def lay_site(wheel: Path, upstream_files: Iterable[str], dest: Path) -> None:
    """Hard-link into ``dest`` what the unpacked ``wheel`` has and upstream's source tree has not.

    What a patch deletes stays deleted, because ``upstream_files`` (paths of the pristine tree) decides.
    """
    known = set(upstream_files)
    for folder, _dirs, names in os.walk(wheel):
        for name in names:
            source = Path(folder) / name
            relative = source.relative_to(wheel).as_posix()
            if relative in known:
                continue
            target = dest / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():  # the overlay's own file, for example a locally built library
                continue
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)
            if target.name == "vllm-rs":
                target.chmod(0o755)


def make_site(ws: Workspace, line: str, git: Git, commit: str) -> Site:
    """Return the site of ``commit``, made when it is not there yet; found again by its tree id."""
    pin = load_pin(ws, line)
    tree = git.tree_of(commit)
    root = ws.root / "build" / "baseline" / "sites" / line
    place = root / tree[:12]
    mark = root / f"{tree[:12]}.complete"
    with exclusive(root / "lock"):
        if mark.exists() and place.is_dir():
            mark.touch()
            return Site(place, tree)
        shutil.rmtree(place, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            packed = Path(scratch) / "tree.tar"
            git.run("archive", "--format=tar", "-o", str(packed), commit)
            unpack_git_archive(packed, place)
        store = odb(ws)
        upstream = store.files(import_pin(ws, pin))
        lay_site(unpack_wheel(ws, host_wheel(pin)), upstream, place)
        mark.touch()
        _drop_old(root)
    return Site(place, tree)


def _drop_old(root: Path) -> None:
    marks = sorted(root.glob("*.complete"), key=lambda path: path.stat().st_mtime, reverse=True)
    for mark in marks[KEEP_SITES:]:
        shutil.rmtree(root / mark.stem, ignore_errors=True)
        mark.unlink()


def pristine_site(ws: Workspace, line: str) -> Site:
    """The site of the unpatched pin."""
    pin = load_pin(ws, line)
    commit = import_pin(ws, pin)
    return make_site(ws, line, odb(ws), commit)
