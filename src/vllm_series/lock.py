"""patches/<line>/LOCK: the tree that the patches must give, and the hashes of the files that give it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_series import importer
from vllm_series.errors import CheckFailed, IntegrityError
from vllm_series.files import write_atomic
from vllm_series.stack import Stack
from vllm_series.workspace import Workspace

SCHEMA = 1


@dataclass(frozen=True)
class Lock:
    """``base`` and ``tree`` are git tree ids: of the import, and after the last patch (without the
    overlay)."""

    line: str
    base: str
    tree: str
    patches: Mapping[str, str]

    def text(self) -> str:
        rows = [
            "# Written by `series export` and `series lock`; do not edit.",
            f"schema = {SCHEMA}",
            f'line = "{self.line}"',
            f'base = "{self.base}"  # tree of the imported upstream commit',
            f'tree = "{self.tree}"  # tree after the last patch, without the overlay',
            "",
            "[patches]",
            *(f'"{name}" = "{sha}"' for name, sha in self.patches.items()),
        ]
        return "\n".join(rows) + "\n"


def lock_of(ws: Workspace, made: Stack) -> Lock:
    """Return the lock that a stack gives."""
    store = importer.odb(ws)
    return Lock(made.line, store.tree_of(made.base), store.tree_of(made.top), dict(made.patches))


def read(ws: Workspace, line: str) -> Lock:
    """Read a line's lock.

    Raises:
        CheckFailed: it is missing or not readable.
    """
    path = ws.patches(line) / "LOCK"
    if not path.is_file():
        raise CheckFailed(f"patches/{line}/LOCK is missing", fix=f"series lock {line}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        return Lock(str(data["line"]), str(data["base"]), str(data["tree"]), dict(data["patches"]))
    except (ValueError, KeyError, TypeError) as err:
        raise CheckFailed(
            f"patches/{line}/LOCK is not readable ({err}); an unfinished merge?", fix=f"series lock {line}"
        ) from err


def write(ws: Workspace, lock: Lock) -> bool:
    """Write a lock; return False if the file had these bytes already."""
    return write_atomic(ws.patches(lock.line) / "LOCK", lock.text())


def check(ws: Workspace, made: Stack) -> None:
    """Compare a freshly applied stack with the lock.

    Raises:
        CheckFailed: the lock is of other patches.
        IntegrityError: the same patches gave another tree.
    """
    want, have = read(ws, made.line), lock_of(ws, made)
    if want == have and list(want.patches) == list(have.patches):
        return
    if want.base != have.base:
        raise IntegrityError(
            f"patches/{made.line}/LOCK is for base tree {want.base}, the pin gives {have.base}",
            fix=f"series lock {made.line} after checking pins/{made.line}.toml",
        )
    if list(want.patches.items()) != list(have.patches.items()):
        names = {n for n, _ in set(want.patches.items()) ^ set(have.patches.items())}
        what = ", ".join(sorted(names)) or "the order"
        raise CheckFailed(
            f"patches/{made.line}/LOCK does not match the patches ({what})",
            fix=f"series lock {made.line} if the change is meant, else: git checkout -- patches/{made.line}",
        )
    raise IntegrityError(
        f"line {made.line}: the patches give tree {have.tree}, LOCK says {want.tree}",
        fix="do not go on: report it with `git --version` and the output of `series verify`",
    )
