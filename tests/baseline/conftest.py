"""Fixtures of the baseline's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from synthetic_tree import Runs, lay


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path / "scratch")
    yield made
    for pool in made.pools:
        pool.close()


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Path]:
    """``site("a", {"test_x.py": "..."})`` writes a synthetic tree."""

    def make(name: str, files: Mapping[str, str]) -> Path:
        return lay(tmp_path / "sites" / name, files)

    return make
