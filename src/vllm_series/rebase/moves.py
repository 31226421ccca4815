"""What upstream did to files between two releases: diffstat, renames, and its commits where a history is at
hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from vllm_series.git import Git
from vllm_series.rebase.model import Target

MOST_COMMITS = 20
_RENAME = ("--find-renames=50%", "-l10000")


@dataclass(frozen=True)
class History:
    """A clone of upstream in which both releases are known; ``old`` and ``new`` are commits there."""

    git: Git
    old: str
    new: str

    def commits(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return ``<id> <subject>`` of upstream's commits that touched ``paths``, newest first."""
        rows = self.git.lines("log", "--format=%h %s", "--abbrev=12", f"{self.old}..{self.new}", "--", *paths)
        if len(rows) > MOST_COMMITS:
            rows = [*rows[:MOST_COMMITS], f"... and {len(rows) - MOST_COMMITS} more"]
        return tuple(rows)


@dataclass(frozen=True)
class Moves:
    """Compares two imported releases ``old`` and ``new`` (commits in ``git``); ``version`` is the new
    one's."""

    git: Git
    old: str
    new: str
    version: str = ""
    history: History | None = None
    _seen: dict[str, Target] = field(default_factory=dict, repr=False)

    @cached_property
    def names(self) -> dict[str, str]:
        """``{path: A, M, D or T}`` without rename detection."""
        return self.git.changed(self.old, self.new)

    @cached_property
    def renamed(self) -> dict[str, str]:
        """``{old path: new path}`` by git's similarity of at least 50 %; one search for the whole tree."""
        fields = self.git.paths(
            "diff-tree", "-r", "-z", *_RENAME, "--diff-filter=R", "--name-status", self.old, self.new
        )
        return dict(zip(fields[1::3], fields[2::3], strict=True))

    def target(self, path: str) -> Target:
        """Return what became of ``path``, which the old release has or not."""
        if path not in self._seen:
            self._seen[path] = self._target(path)
        return self._seen[path]

    def _target(self, path: str) -> Target:
        letter = self.names.get(path)
        if letter is None:
            there = self.git.run("cat-file", "-e", f"{self.old}:{path}", check=False).returncode == 0
            return Target(path, "same" if there else "new")
        if letter == "A":
            return Target(path, "new", *self._numbers(path), commits=self._commits(path))
        if letter != "D":
            return Target(path, "changed", *self._numbers(path), commits=self._commits(path))
        now = self.renamed.get(path, "")
        if not now:
            return Target(path, "gone", *self._numbers(path), commits=self._commits(path))
        return Target(path, "renamed", *self._numbers(path, now), now=now, commits=self._commits(path, now))

    def _numbers(self, *paths: str) -> tuple[int, int]:
        find = _RENAME if len(paths) > 1 else ("--no-renames",)
        added = removed = 0
        for row in self.git.lines("diff", "--numstat", *find, self.old, self.new, "--", *paths):
            plus, minus, _ = row.split("\t", 2)
            if plus != "-":
                added, removed = added + int(plus), removed + int(minus)
        return added, removed

    def _commits(self, *paths: str) -> tuple[str, ...]:
        return self.history.commits(paths) if self.history else ()
