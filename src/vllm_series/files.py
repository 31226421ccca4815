"""Small file helpers: atomic writes and hashes."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import tarfile
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644) -> bool:
    """Write ``data`` to ``path`` by temp file, fsync and rename; return False if it already had these
    bytes."""
    raw = data.encode() if isinstance(data, str) else data
    if path.is_file() and path.read_bytes() == raw and (path.stat().st_mode & 0o777) == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        _remove_if_left(leftover)
    fd, name = _new_beside(path)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(raw)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return True


def _new_beside(path: Path) -> tuple[int, str]:
    """Make a temporary file that is locked as long as it is open, so that nobody takes it for a leftover."""
    while True:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:  # else another run took it for one, in the moment before it was locked
            return fd, name
        os.close(fd)


def _remove_if_left(path: Path) -> None:
    """Remove a temporary file whose writer was killed."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as src:
        return hashlib.file_digest(src, "sha256").hexdigest()


def blob_id(data: bytes) -> str:
    """Return git's object id of a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def mebibytes(size: int) -> str:
    return f"{size / 1048576:.1f} MiB"


def unpack_git_archive(packed: Path, place: Path) -> None:
    """Unpack what `git archive` of our own object store wrote; runs on every Python from 3.11.0 on.

    ``extractall(filter=...)`` only exists from 3.11.4 on (Debian 12 has 3.11.2), and later versions warn when
    they are not told which filter to use.
    """
    with tarfile.open(packed) as archive:
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        archive.extractall(place)
