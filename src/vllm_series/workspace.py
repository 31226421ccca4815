"""Where things are: one object that knows the repository's folders, so that nothing else joins paths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import UsageError


@dataclass(frozen=True)
class Workspace:
    """The checkout of this project and its generated folders."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Workspace:
        """Return the workspace that holds ``start`` (default: the current folder).

        Raises:
            UsageError: no parent folder holds ``pins/`` and ``patches/``.
        """
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / "pins").is_dir() and (folder / "patches").is_dir():
                return cls(folder)
        raise UsageError(
            f"{here} is not inside a checkout of the series (no pins/ and patches/ above it)",
            fix="cd into the checkout, or pass --root PATH",
        )

    @property
    def pins(self) -> Path:
        return self.root / "pins"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def work(self) -> Path:
        """Object store and saved states of the tool; safe to delete when nothing is in progress."""
        return self.root / ".work"

    @property
    def odb(self) -> Path:
        """Bare repository that holds the imported commits of all pins."""
        return self.work / "odb.git"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    @property
    def cache(self) -> Path:
        """Downloads, shared by all checkouts of a user; ``VLLM_SERIES_CACHE`` overrides."""
        override = os.environ.get("VLLM_SERIES_CACHE")
        if override:
            return Path(override)
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(base) / "vllm-series"

    def patches(self, line: str) -> Path:
        return self.root / "patches" / line

    def build(self, line: str) -> Path:
        """The patched tree of a line: a git work tree with one commit per patch."""
        return self.root / "build" / line
