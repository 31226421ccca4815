"""Fetches pinned files into a cache that is keyed by sha256: resumed, checked, and put in place
atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import httpx

from vllm_series import index
from vllm_series.errors import FetchFailed, IntegrityError, SeriesError, UsageError
from vllm_series.files import mebibytes, sha256_file
from vllm_series.lock_file import locked
from vllm_series.pins import Artifact
from vllm_series.ui import progress, say
from vllm_series.workspace import Workspace

ATTEMPTS = 5  # a download that advances starts the count anew
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Incomplete(Exception):
    """The server ended before all bytes were there."""


def cached_path(ws: Workspace, artifact: Artifact) -> Path:
    """Return where the file lies, or will lie, in the cache."""
    return ws.cache / artifact.sha256[:16] / artifact.filename


def is_cached(ws: Workspace, artifact: Artifact) -> bool:
    """Say whether a file of the right size is in the cache (its hash is checked when it is used)."""
    path = cached_path(ws, artifact)
    return path.is_file() and path.stat().st_size == artifact.size


def fetch(ws: Workspace, artifact: Artifact, sources: Iterable[Path] = ()) -> Path:
    """Return the path of ``artifact`` in the cache, with its sha256 checked.

    ``sources`` are folders that may hold the file already; they are tried before the index.

    Raises:
        IntegrityError: what was delivered has another hash or size.
        FetchFailed: the network, the index or the disk did not deliver.
        UsageError: a source is not a folder.
    """
    path = cached_path(ws, artifact)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / f".{artifact.filename}.lock"):
            if path.is_file():
                if path.stat().st_size == artifact.size and sha256_file(path) == artifact.sha256:
                    return path
                say(f"{artifact.filename}: the cached copy is damaged, fetching it again")
                path.unlink()
            if not _from_folder(path, artifact, sources):
                _download(path, artifact)
            return path
    except OSError as err:
        raise disk_error(err, path.parent, artifact) from err


def _from_folder(path: Path, artifact: Artifact, sources: Iterable[Path]) -> bool:
    for folder in sources:
        if not folder.is_dir():
            raise UsageError(
                f"--source {folder} is not a folder", fix="name a folder that holds the pinned files"
            )
        given = folder / artifact.filename
        if not given.is_file():
            continue
        if given.stat().st_size != artifact.size or sha256_file(given) != artifact.sha256:
            raise IntegrityError(
                f"{given} is not the pinned file (sha256 differs from {artifact.sha256})",
                fix=f"remove it or replace it with the release's {artifact.filename}",
            )
        part = _part(path)
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        try:
            os.link(given, part)
        except OSError:
            with given.open("rb") as src, part.open("wb") as out:
                shutil.copyfileobj(src, out, _CHUNK)
                out.flush()
                os.fsync(out.fileno())
        if sha256_file(part) != artifact.sha256:
            part.unlink()
            raise IntegrityError(f"{given} changed while it was copied", fix="run the command again")
        part.replace(path)
        return True
    return False


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _download(path: Path, artifact: Artifact) -> None:
    if index.offline():
        raise FetchFailed(
            f"{artifact.filename} is not in the cache and VLLM_SERIES_OFFLINE is set",
            fix="unset it, or hand the file in: series fetch --source DIR",
        )
    part = _part(path)
    have = part.stat().st_size if part.is_file() else 0
    if have > artifact.size:
        part.unlink()
        have = 0
    free, need = shutil.disk_usage(path.parent).free, artifact.size - have
    if free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with index.client() as http:
        url = _url(http, artifact)
        resumed = have > 0
        _complete(http, url, part, artifact)
        if sha256_file(part) != artifact.sha256 and resumed:
            say(f"{artifact.filename}: the resumed download does not check, starting over")
            part.unlink()
            _complete(http, url, part, artifact)
    actual = sha256_file(part)
    if actual != artifact.sha256:
        part.unlink()
        raise IntegrityError(
            f"{artifact.filename} from {index.shown(url)} has sha256 {actual}, "
            f"the pin says {artifact.sha256}",
            fix="do not use this index; unset VLLM_SERIES_INDEX or report it to whoever runs the mirror",
        )
    part.replace(path)
    _sync_folder(path.parent)


def _url(http: httpx.Client, artifact: Artifact) -> str:
    """Find the file's URL in the index.

    Raises:
        FetchFailed: the index has no such file.
        IntegrityError: the index announces another hash.
    """
    for row in index.list_files(http, artifact.project):
        if row.filename != artifact.filename:
            continue
        if row.sha256 and row.sha256 != artifact.sha256:
            raise IntegrityError(
                f"{index.shown(index.index_url())} offers {row.filename} with sha256 {row.sha256}, "
                f"the pin says {artifact.sha256}",
                fix="restore the pin (git checkout -- pins) if it was edited; else do not use this index: "
                "unset VLLM_SERIES_INDEX or report it to whoever runs the mirror",
            )
        if row.yanked:
            say(f"note: {row.filename} was yanked from the index ({row.yanked})")
        return row.url
    raise FetchFailed(
        f"{index.shown(index.index_url())} has no {artifact.filename}",
        fix="set VLLM_SERIES_INDEX to an index that has it, or: series fetch --source DIR",
    )


def _complete(http: httpx.Client, url: str, part: Path, artifact: Artifact) -> None:
    """Download until ``part`` has all bytes, resuming after each interruption."""
    failures, pause = 0, PAUSE
    while True:
        before = part.stat().st_size if part.is_file() else 0
        if before == artifact.size:
            return
        try:
            _stream(http, url, part, artifact, before)
            return
        except (httpx.TransportError, httpx.HTTPStatusError, _Incomplete) as err:
            status = err.response.status_code if isinstance(err, httpx.HTTPStatusError) else 0
            if status and status < 500 and status not in {408, 429}:
                raise FetchFailed(
                    f"{index.shown(url)} answered {status}",
                    fix="try again later, or: series fetch --source DIR",
                ) from err
            now = part.stat().st_size if part.is_file() else 0
            failures, pause = (1, PAUSE) if now > before else (failures + 1, pause)
            if failures >= ATTEMPTS:
                raise _gave_up(url, artifact, now, err) from err
            time.sleep(pause)
            pause *= 2


def _gave_up(url: str, artifact: Artifact, have: int, err: Exception) -> SeriesError:
    if isinstance(err, httpx.TransportError) and have == 0:
        return index.no_network(url, err)
    return FetchFailed(
        f"{artifact.filename}: got {mebibytes(have)} of {mebibytes(artifact.size)} from {index.shown(url)}, "
        f"then: {err or type(err).__name__}",
        fix="run the command again; it goes on where it stopped",
    )


def _stream(http: httpx.Client, url: str, part: Path, artifact: Artifact, have: int) -> None:
    ask = {"Accept-Encoding": "identity"}
    if have:
        ask["Range"] = f"bytes={have}-"
    with http.stream("GET", url, headers=ask) as answer:
        if answer.status_code == 416:
            part.unlink()
            raise _Incomplete("the server cannot resume")
        answer.raise_for_status()
        resumed = answer.status_code == 206 and answer.headers.get("content-range", "").startswith(
            f"bytes {have}-"
        )
        if have and not resumed:
            have = 0
        with (
            part.open("r+b" if have else "wb") as out,
            progress(f"fetch {artifact.filename}", artifact.size, have) as advance,
        ):
            out.seek(have)
            try:
                for chunk in answer.iter_raw():
                    out.write(chunk)
                    have += len(chunk)
                    if have > artifact.size:
                        break
                    advance(len(chunk))
            finally:
                out.flush()
            os.fsync(out.fileno())
    if have > artifact.size:
        part.unlink()
        raise IntegrityError(
            f"{artifact.filename} from {index.shown(url)} is longer than the pinned {artifact.size} bytes",
            fix="do not use this index; unset VLLM_SERIES_INDEX or report it to whoever runs the mirror",
        )
    if have < artifact.size:
        raise _Incomplete(f"the server closed the connection after {have} of {artifact.size} bytes")


def disk_error(err: OSError, folder: Path, artifact: Artifact | None = None) -> SeriesError:
    """Turn an error of the file system into one that says what to do."""
    if err.errno in _FULL:
        need = f" (need {mebibytes(artifact.size)} for {artifact.filename})" if artifact else ""
        return FetchFailed(
            f"no space left in {folder}{need}: {err.strerror}",
            fix="free some space or set VLLM_SERIES_CACHE to a folder on a larger disk, then try again",
        )
    return FetchFailed(
        f"cannot write to {folder}: {err}",
        fix="check its permissions, or set VLLM_SERIES_CACHE to another folder",
    )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
