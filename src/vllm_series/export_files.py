"""The writing half of an export: patch files, series, LOCK and overlay files, so that a killed run can be
repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vllm_series import lock, series
from vllm_series.errors import SeriesError
from vllm_series.fetch import disk_error
from vllm_series.files import write_atomic
from vllm_series.git import Git
from vllm_series.lock import Lock
from vllm_series.series import Patch
from vllm_series.state import EXPORTING, TreeState
from vllm_series.workspace import Workspace


def install(
    ws: Workspace,
    line: str,
    found: TreeState,
    patches: Sequence[Patch],
    laid: Mapping[str, bytes | None],
    modes: Mapping[str, str],
    new_lock: Lock,
) -> None:
    """Write everything; each file by temp and rename, LOCK after the patches, removals last.

    Before the first write the plan is noted in the tree's repository: if this is killed, the next export
    knows that the
    half-written patches on disk are its own. The note goes away when the tree stands on the new commits.
    """
    git, folder = Git(found.path), ws.patches(line)
    keep = {patch.name for patch in patches}
    gone = sorted(path.name for path in folder.glob("*.patch") if path.name not in keep)
    note = json.dumps({"patches": {p.name: p.sha256 for p in patches}, "gone": gone})
    git.set_ref(EXPORTING, git.out("hash-object", "-w", "--stdin", data=note.encode()))
    try:
        for path, data in laid.items():
            target = ws.overlay / path
            if data is None:
                target.unlink(missing_ok=True)
            else:
                write_atomic(target, data, mode=0o755 if modes.get(path) == "100755" else 0o644)
        for patch in patches:
            write_atomic(folder / patch.name, patch.data)
        write_atomic(series.series_path(ws, line), series_text(ws, line, [patch.name for patch in patches]))
        lock.write(ws, new_lock)
        for name in gone:
            (folder / name).unlink(missing_ok=True)
    except OSError as err:
        raise _half_written(err, ws, line) from err


def _half_written(err: OSError, ws: Workspace, line: str) -> SeriesError:
    problem = disk_error(err, ws.patches(line))
    problem.fix = f"free some space, then: series export {line} (your commits in build/{line} are safe)"
    return problem


def pending(git: Git) -> dict[str, set[str]]:
    """Return ``{patch name: {sha256}}`` of an export that was interrupted."""
    return {name: {sha} for name, sha in _note(git).get("patches", {}).items()}


def patches_on_disk(ws: Workspace, line: str, git: Git) -> list[Patch]:
    """Return the series' patches; after an interrupted export what is there of the old and the new ones."""
    note = _note(git)
    if not note:
        return series.load(ws, line)
    order = list(note.get("patches", ()))
    there = [patch for patch in series.load_present(ws, line) if patch.name not in note.get("gone", ())]
    return sorted(there, key=lambda patch: order.index(patch.name) if patch.name in order else len(order))


def dropping(git: Git) -> set[str]:
    return set(_note(git).get("gone", ()))


def _note(git: Git) -> dict[str, dict[str, str]]:
    done = git.run("cat-file", "blob", EXPORTING, check=False)
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def series_text(ws: Workspace, line: str, names: Sequence[str]) -> str:
    """Return the new series file: comments stay above the entry that they precede."""
    path = series.series_path(ws, line)
    header: list[str] = []
    notes: dict[str, list[str]] = {}
    block: list[str] = []
    first = True
    for row in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        entry = row.strip()
        if entry and not entry.startswith("#"):
            if first and not header:
                cut = max((n for n, r in enumerate(block, 1) if not r.strip()), default=len(block))
                header, block = block[:cut], block[cut:]
            first = False
            notes[entry], block = block, []
        else:
            block.append(row)
    if first:
        header, block = block, []
    rows = [*header]
    for name in names:
        rows += [*notes.get(name, []), name]
    rows += block
    return "\n".join(rows) + "\n"
