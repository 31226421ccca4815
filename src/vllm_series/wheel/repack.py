"""Writes the wheel of a recipe: atomically, once, and only when something changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import FetchFailed
from vllm_series.files import mebibytes, sha256_file, write_atomic
from vllm_series.lock_file import locked
from vllm_series.wheel import archive, plan, provenance
from vllm_series.wheel.archive import Source, Stored
from vllm_series.wheel.recipe import Recipe

_SLACK = 16 << 20  # bytes beyond upstream's wheel that new members may take, beside the kernels


@dataclass(frozen=True)
class Built:
    """A wheel on disk. ``reused`` tells that it was there already, made from the same inputs."""

    path: Path
    sha256: str
    size: int
    reused: bool


def fingerprint(recipe: Recipe) -> str:
    """A digest of all inputs, this package's own code included."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    digest.update(provenance.render(provenance.record(recipe)))
    digest.update(f"{recipe.name}\n{recipe.generator}\n".encode())
    for path, data in sorted(recipe.changed.items()):
        digest.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    if recipe.kernels:
        digest.update(recipe.kernels.data)
    return digest.hexdigest()


@contextmanager
def written(target: Path, recipe: Recipe) -> Iterator[Path]:
    """Yield a finished temporary wheel beside ``target``; it is removed unless the caller moved it away.

    Raises:
        FetchFailed: the disk is full or not writable.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        need = recipe.artifact.size + _SLACK + (len(recipe.kernels.data) if recipe.kernels else 0)
        need += sum(map(len, recipe.deepgemm.files.values())) if recipe.deepgemm else 0
        if shutil.disk_usage(target.parent).free < need:
            raise _no_room(target.parent, need)
        with Source(recipe.upstream_wheel) as source:
            archive.write(part, source, plan.members(recipe, source))
        with part.open("rb+") as handle:
            os.fsync(handle.fileno())
        yield part
    except OSError as error:
        if archive.is_disk_full(error):
            raise _no_room(target.parent, recipe.artifact.size) from error
        raise FetchFailed(
            f"cannot write {target}: {error.strerror or error}", fix="check the folder's permissions"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _no_room(folder: Path, need: int) -> FetchFailed:
    return FetchFailed(
        f"no space left in {folder} for a wheel of {mebibytes(need)}",
        fix="free some space or name another folder with --output, then run the command again",
    )


def repack(recipe: Recipe, folder: Path, state: Path) -> Built:
    """Write the wheel of ``recipe`` into ``folder`` unless it is there; ``state`` remembers what was made.

    Raises:
        CheckFailed: the series cannot be repacked.
        IntegrityError: upstream's wheel and source do not belong together.
        FetchFailed: the disk is full or not writable.
    """
    target = folder / str(recipe.name)
    note = state / f"{recipe.name}.json"
    key = fingerprint(recipe)
    with locked(state / "lock"):
        for leftover in folder.glob(f".{target.name}.*.part"):  # of a killed run: the lock is ours
            leftover.unlink(missing_ok=True)
        if target.is_file() and (digest := sha256_file(target)) == _noted(note, key):
            return Built(target, digest, target.stat().st_size, reused=True)
        note.unlink(missing_ok=True)
        with written(target, recipe) as part:
            digest, size = sha256_file(part), part.stat().st_size
            part.replace(target)
        with contextlib.suppress(OSError):  # without the note the next run writes the same wheel again
            write_atomic(note, json.dumps({"fingerprint": key, "sha256": digest}) + "\n")
    return Built(target, digest, size, reused=False)


def _noted(note: Path, key: str) -> str | None:
    """The sha256 that the last run noted for the same inputs."""
    try:
        found = json.loads(note.read_text())
        return str(found["sha256"]) if found["fingerprint"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def new_members(recipe: Recipe) -> dict[str, bytes]:
    """The members that differ from upstream's wheel or are not in it: name -> bytes."""
    with Source(recipe.upstream_wheel) as source:
        return {m.name: m.data for m in plan.members(recipe, source) if isinstance(m, Stored)}
