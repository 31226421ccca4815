"""Compares what two versions of a patch change, so that no hunk and no line is lost without a word."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unidiff.patch import PatchedFile, PatchSet

from vllm_series.git import Git

Line = tuple[str, str, str]  # path, "+" or "-", text


@dataclass(frozen=True)
class Effect:
    """Net changed lines as a multiset (a line that only moves counts as nothing), number of hunks, and
    files."""

    lines: Counter[Line]
    hunks: int
    paths: frozenset[str]

    def without(self, other: Effect) -> tuple[str, ...]:
        """Return the changed lines that ``other`` lacks, as ``path: +text``."""
        return tuple(
            f"{path}: {sign}{text}" for path, sign, text in sorted((self.lines - other.lines).elements())
        )


def of_diff(diff: bytes, names: Mapping[str, str] | None = None) -> Effect:
    """Read a diff; ``names`` translates old paths to the ones that it is compared under."""
    net: Counter[tuple[str, str]] = Counter()
    hunks, paths = 0, set[str]()
    for file in PatchSet(_text(diff)):
        path = (names or {}).get(file.path, file.path)
        paths.add(path)
        hunks += len(file)
        for hunk in file:
            for row in hunk:
                if row.is_added or row.is_removed:
                    net[path, row.value.rstrip("\n")] += 1 if row.is_added else -1
    lines = Counter({(path, "+" if n > 0 else "-", text): abs(n) for (path, text), n in net.items() if n})
    return Effect(lines, hunks, frozenset(paths))


def is_present(diff: bytes, old: Callable[[str], str], new: Callable[[str], str]) -> bool:
    """Say whether a release has a change in other surroundings: every run of added lines is there and was
    not before, every run of removed lines is gone. ``old`` and ``new`` give a file's text before the patch
    and in the release.
    """
    runs = [(file.path, sign, text) for file in PatchSet(_text(diff)) for sign, text in _runs(file)]
    for path, sign, text in runs:
        before, now = f"\n{text}" in f"\n{old(path)}", f"\n{text}" in f"\n{new(path)}"
        if (before, now) != ((False, True) if sign == "+" else (True, False)):
            return False
    return bool(runs)


def _runs(file: PatchedFile) -> Iterator[tuple[str, str]]:
    """Yield ``(+ or -, text)`` for each run of added or removed lines."""
    for hunk in file:
        for sign, rows in itertools.groupby(hunk, key=lambda row: row.line_type):
            if sign in {"+", "-"}:
                yield sign, "".join(row.value for row in rows)


def _text(diff: bytes) -> str:
    return diff.decode("utf-8", "surrogateescape")


def of_commit(git: Git, before: str, after: str) -> Effect:
    """Read the change between two commits."""
    return of_diff(diff_between(git, before, after))


def diff_between(git: Git, before: str, after: str, *paths: str) -> bytes:
    return git.raw("diff-tree", "-r", "-p", "--full-index", "--no-renames", before, after, "--", *paths)


_OFFSET = re.compile(r"Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)")
_FILE = re.compile(r"Checking patch (.+?)\.\.\.")


def offsets(said: str) -> list[str]:
    """Read from ``git apply --verbose`` which hunks moved: ``path hunk 2: +14``."""
    found, path = [], ""
    for row in said.splitlines():
        if match := _FILE.search(row):
            path = match[1].rsplit("=> ", 1)[-1]
        if match := _OFFSET.search(row):
            found.append(f"{path} hunk {match[1]}: {int(match[2]):+d} lines")
    return found
