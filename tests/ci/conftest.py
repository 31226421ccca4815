"""Fixtures of the tests of CI, doctor, install and the benchmarks' plots."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "gpu"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
