"""Read access to the files of a commit, without a work tree."""

from __future__ import annotations

from functools import cached_property

from vllm_series.git import Git
from vllm_series.pysource import Source


class Tree:
    """The files of one commit or tree; what was read is kept."""

    def __init__(self, git: Git, treeish: str) -> None:
        self.git, self.treeish = git, treeish
        self._read: dict[str, bytes | None] = {}
        self._sources: dict[str, Source] = {}

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(self.git.paths("ls-tree", "-r", "-z", "--name-only", "--full-tree", self.treeish))

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, None if there is none."""
        if path not in self._read:
            self._read[path] = self.git.blob(self.treeish, path) if path in self.paths else None
        return self._read[path]

    def source(self, path: str) -> Source | None:
        """Return a Python file, None if there is none.

        Raises:
            SyntaxError: it is not Python.
        """
        if path not in self._sources:
            data = self.read(path)
            if data is None:
                return None
            self._sources[path] = Source(data, path)
        return self._sources[path]

    def module_files(self, module: str) -> list[str]:
        """Return the files of a module: one file, or all Python files of a package; empty if there is
        none."""
        base = module.replace(".", "/")
        if f"{base}.py" in self.paths:
            return [f"{base}.py"]
        if f"{base}/__init__.py" in self.paths:
            return sorted(p for p in self.paths if p.startswith(f"{base}/") and p.endswith(".py"))
        return []
