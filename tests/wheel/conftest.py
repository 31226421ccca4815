"""Fixtures of the wheel tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tiny_upstream import BUILT_FILES, FILENAME, SOURCE_FILES, Upstream, write_upstream_wheel

from vllm_series.wheel.uvtool import Uv, find_uv
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    """A wheel with a comma in a file name, a library, generated files, and the source it was built from."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    write_upstream_wheel(folder / FILENAME, {**SOURCE_FILES, **BUILT_FILES})
    return Upstream(folder / FILENAME, dict(SOURCE_FILES))


@pytest.fixture(scope="session")
def pythons() -> dict[str, Path]:
    """Interpreters of this machine by minor version."""
    uv = Uv(find_uv(Workspace(ROOT)))
    found = uv.interpreters(SpecifierSet(">=3.11,<3.15"))
    assert os.access(found[0].path, os.X_OK)
    return {f"{one.version.major}.{one.version.minor}": one.path for one in found}
