"""Reads a vLLM sdist without unpacking it: safe member names, commit id, files."""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_series.errors import IntegrityError

VERSION_FILE = "vllm/_version.py"
# Made by the build of the sdist, not part of upstream's repository.
GENERATED = ("PKG-INFO", "setup.cfg", "vllm.egg-info", VERSION_FILE)
_COMMIT = re.compile(rb"commit_id\s*=\s*'g([0-9a-f]{7,40})'")


@dataclass(frozen=True)
class Member:
    """One file of an sdist; ``path`` is relative to its top folder, ``mode`` git's (100644, 100755,
    120000)."""

    path: str
    mode: str
    data: bytes


def is_generated(path: str) -> bool:
    return any(path == name or path.startswith(name + "/") for name in GENERATED)


def members(path: Path) -> Iterator[Member]:
    """Yield every file and link of the archive, generated files included, in archive order.

    Raises:
        IntegrityError: the archive is damaged, or a member points outside of its top folder.
    """
    top: str | None = None
    seen: set[str] = set()
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                parts = PurePosixPath(entry.name).parts
                if top is None and parts:
                    top = parts[0]
                if not parts or parts[0] != top or ".." in parts or entry.name.startswith("/"):
                    raise _unsafe(path, entry.name)
                if entry.isdir():
                    continue
                name = "/".join(parts[1:])
                if not name or ".git" in parts or name in seen or "\n" in name or "\0" in name:
                    raise _unsafe(path, entry.name)
                seen.add(name)
                if entry.issym():
                    target = PurePosixPath(name).parent / entry.linkname
                    if entry.linkname.startswith("/") or _climbs(target):
                        raise _unsafe(path, f"{entry.name} -> {entry.linkname}")
                    yield Member(name, "120000", entry.linkname.encode())
                elif entry.isfile():
                    source = archive.extractfile(entry)
                    assert source is not None
                    data = source.read()
                    if len(data) != entry.size:
                        raise tarfile.ReadError("unexpected end of data")
                    yield Member(name, "100755" if entry.mode & 0o111 else "100644", data)
                else:
                    raise _unsafe(path, f"{entry.name} (neither a file nor a link)")
    except (tarfile.TarError, EOFError, zlib.error) as err:
        raise IntegrityError(
            f"{path.name} is not a readable source archive: {err}",
            fix="remove it from the cache and fetch it again",
        ) from err


def commit_id(path: Path) -> str:
    """Return the abbreviated commit id that the build wrote into ``vllm/_version.py``.

    Raises:
        IntegrityError: the archive does not tell it.
    """
    for member in members(path):
        if member.path == VERSION_FILE:
            return commit_in(member.data, path)
    raise IntegrityError(
        f"{path.name} has no {VERSION_FILE}, so its commit is not known", fix="use an official sdist"
    )


def commit_in(version_file: bytes, path: Path) -> str:
    found = _COMMIT.search(version_file)
    if not found:
        raise IntegrityError(f"{path.name}: {VERSION_FILE} names no commit", fix="use an official sdist")
    return found[1].decode()


def same_commit(one: str, other: str) -> bool:
    """Compare two ids of which either may be abbreviated."""
    return bool(one) and bool(other) and (one.startswith(other) or other.startswith(one))


def _climbs(path: PurePosixPath) -> bool:
    depth = 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def _unsafe(path: Path, name: str) -> IntegrityError:
    return IntegrityError(f"{path.name} holds an unsafe member: {name}", fix="use an official sdist")
