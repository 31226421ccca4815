"""Lays the patched files over an installed upstream wheel, and takes them off again.

The state is a folder ``series/`` in vLLM's ``.dist-info``: ``before/`` holds the files as they were,
``journal.json`` what is being done. The journal is written before the first file changes and removed after
the last one is back, so a run that was killed anywhere leaves either upstream's files or a journal from which
the next run goes back to them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed, IntegrityError, UsageError, WouldLoseWork
from vllm_series.files import sha256_file, sha256_of, write_atomic
from vllm_series.install.environment import Installed

SCHEMA = 1
LARGE = 32 << 20  # compiled libraries above it are compared by size only: hashing gigabytes takes minutes


@dataclass(frozen=True)
class Layer:
    """What is laid over: path under site-packages -> bytes, or None for a file that goes.

    Attributes:
        version: the series' version, such as ``0.33.0+dsa.1``.
        upstream: the release that must be installed.
        files: all of ``vllm/``: changed files, the overlay, the kernels.
        base: sha256 of upstream's own file by path, for each changed one.
    """

    version: str
    upstream: str
    files: Mapping[str, bytes | None]
    base: Mapping[str, str]


def folder_of(at: Installed) -> Path:
    """Where the state of an installation is kept."""
    return at.dist_info / "series"


def journal(at: Installed) -> dict[str, Any] | None:
    """Return the journal, None if upstream's files are in place.

    Raises:
        IntegrityError: it cannot be read.
    """
    path = folder_of(at) / "journal.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}")
        if not all({"before", "after"} <= set(row) for row in found["files"].values()) or not found["state"]:
            raise ValueError("it names no hashes")
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error}",
            fix=_reinstall(at.upstream),
        ) from None


def install(at: Installed, layer: Layer) -> bool:
    """Lay ``layer`` over the installation; returns False if it lies there already.

    What a killed run left, and another version of the layer, are taken off first.

    Raises:
        UsageError: another release is installed, or a wheel of this project, or a source tree.
        CheckFailed: the installation is not as its RECORD says.
        WouldLoseWork: files of an earlier layer were changed by hand.
    """
    refuse_other(at, layer.upstream)
    found = journal(at)
    wanted = {path: _sha(data) for path, data in layer.files.items()}
    if found:
        now = {path: row["after"] for path, row in found["files"].items()}
        if found["state"] == "installed" and now == wanted and not changed_by_hand(at, found):
            return False
        take_off(at)
    shutil.rmtree(folder_of(at), ignore_errors=True)  # backups of a run that was killed before it began
    check_clean(at, layer)
    _back_up(at, layer)
    note = {
        "schema": SCHEMA,
        "state": "installing",
        "version": layer.version,
        "files": {
            path: {"before": _sha_of_file(at.site / path), "after": wanted[path]} for path in sorted(wanted)
        },
    }
    _write_journal(at, note)
    for path, data in layer.files.items():
        _put(at.site / path, data)
    write_atomic(at.dist_info / "RECORD", _record_with(at, layer))
    _write_journal(at, note | {"state": "installed"})
    return True


def take_off(at: Installed, *, force: bool = False) -> bool:
    """Put upstream's files back; returns False if they are in place.

    Args:
        at: the installation.
        force: give up changes that were made by hand in the laid files.

    Raises:
        WouldLoseWork: a laid file was changed by hand.
        IntegrityError: a file that is put back is not the one that was kept.
    """
    found = journal(at)
    if not found:
        shutil.rmtree(folder_of(at), ignore_errors=True)
        return False
    edited = changed_by_hand(at, found)
    if edited and not force:
        raise WouldLoseWork(
            f"changed since they were installed: {', '.join(edited[:5])}",
            fix="keep a copy of what you need, then `series install --undo --force`",
        )
    before = folder_of(at) / "before"
    for path, row in found["files"].items():
        if row["before"] is not None and sha256_file(before / path) != row["before"]:
            raise IntegrityError(
                f"the kept {path} is damaged; nothing was changed",
                fix=_reinstall(at.upstream),
            )
    _write_journal(at, found | {"state": "undoing"})
    for path, row in found["files"].items():
        data = (before / path).read_bytes() if row["before"] is not None else None
        _put(at.site / path, data)
    _remove_empty(at.site, found["files"])
    write_atomic(at.dist_info / "RECORD", (folder_of(at) / "RECORD").read_bytes())
    (folder_of(at) / "journal.json").unlink()
    shutil.rmtree(folder_of(at))
    return True


def changed_by_hand(at: Installed, found: Mapping[str, Any]) -> list[str]:
    """Return the laid files that are neither as before nor as after the run that the journal is of."""
    edited = []
    for path, row in found["files"].items():
        now = _sha_of_file(at.site / path)
        allowed = {row["after"]} if found["state"] == "installed" else {row["after"], row["before"]}
        if now not in allowed:
            edited.append(path)
    return edited


def check_clean(at: Installed, layer: Layer) -> None:
    """Prove that the installation is upstream's wheel: every file of RECORD, and ours not there yet.

    Raises:
        CheckFailed: names the first files that differ.
    """
    record, wrong = at.dist_info / "RECORD", []
    for name, digest, size in rows_of(record.read_bytes() if record.is_file() else b""):
        if digest and name.startswith("vllm/") and not _is(at.site / name, digest, size):
            wrong.append(name)
    missing = [name for name in ("METADATA", "RECORD") if not (at.dist_info / name).is_file()]
    if missing:  # an installer was interrupted
        wrong.insert(0, f"{at.dist_info.name} has no {' and no '.join(missing)}")
    for path_name, data in layer.files.items():
        now, base = _sha_of_file(at.site / path_name), layer.base.get(path_name)
        if now != base and path_name not in wrong:
            wrong.append(path_name if base or data is None else f"{path_name} (is there already)")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckFailed(
            f"{at.site}/vllm is not the wheel of vLLM {layer.upstream}: {', '.join(wrong[:5])}{more}",
            fix=_reinstall(layer.upstream),
        )


def _is(path: Path, digest: str, size: str) -> bool:
    if not path.is_file() or str(path.stat().st_size) != size:
        return False
    return int(size) > LARGE or record_hash(path.read_bytes()) == digest


def _reinstall(release: str) -> str:
    return f"reinstall upstream's wheel: pip install --force-reinstall --no-deps vllm=={release}"


def rows_of(data: bytes) -> list[tuple[str, str, str]]:
    """Return RECORD's rows as (name, hash, size); installers add rows without hash."""
    rows = csv.reader(io.StringIO(data.decode("utf-8", errors="replace")))
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def record_hash(data: bytes) -> str:
    """Return a file's hash as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def refuse_other(at: Installed, upstream: str) -> None:
    """Refuse anything but an upstream wheel of the release ``upstream``.

    Raises:
        UsageError: another release is installed, or a wheel of this project, or a source tree.
    """
    if at.editable:
        raise UsageError(
            f"vLLM in {at.site} is a source tree (editable install)", fix="use series apply in a checkout"
        )
    if at.ours:
        raise UsageError(
            f"vLLM {at.version} is a wheel of this series",
            fix="install the new wheel: series install LINE; or go back first: series install --undo",
        )
    if at.version != upstream:
        raise UsageError(
            f"vLLM {at.version} is installed, the files are for {upstream}",
            fix=f"pip install vllm=={upstream}, or name the line of your release; "
            "`series pin list` shows them",
        )


def _back_up(at: Installed, layer: Layer) -> None:
    place = folder_of(at)
    for path, _ in layer.files.items():
        if (at.site / path).is_file():
            write_atomic(place / "before" / path, (at.site / path).read_bytes())
    write_atomic(place / "RECORD", (at.dist_info / "RECORD").read_bytes())


def _record_with(at: Installed, layer: Layer) -> bytes:
    """RECORD with the laid files, so that installers remove them too, and the state folder."""
    rows = {row[0]: row for row in rows_of((folder_of(at) / "RECORD").read_bytes())}
    for path, data in layer.files.items():
        if data is None:
            rows.pop(path, None)
        else:
            rows[path] = (path, record_hash(data), str(len(data)))
    for file in sorted(folder_of(at).rglob("*")):
        if file.is_file():
            name = file.relative_to(at.site).as_posix()
            rows[name] = (name, "", "")
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows.values())
    return out.getvalue().encode("utf-8")


def _write_journal(at: Installed, note: Mapping[str, Any]) -> None:
    write_atomic(folder_of(at) / "journal.json", json.dumps(note, indent=1) + "\n")


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            bytecode.unlink()
    else:
        write_atomic(path, data, mode=0o755 if path.suffix == ".so" else 0o644)


def _remove_empty(site: Path, paths: Mapping[str, Any]) -> None:
    """Remove folders that only the layer had, with the bytecode that Python left in them."""
    folders = {
        parent for path in paths for parent in (site / path).parents if parent.is_relative_to(site / "vllm")
    }
    for folder in sorted(folders, key=lambda one: -len(one.parts)):
        if folder.is_dir() and all(one.name == "__pycache__" for one in folder.iterdir()):
            shutil.rmtree(folder)


def _sha(data: bytes | None) -> str | None:
    return None if data is None else sha256_of(data)


def _sha_of_file(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None
