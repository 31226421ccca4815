"""Fixtures of the rebase tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rebase_lab import Index, Lab, new_lab, serve


@pytest.fixture
def index() -> Iterator[Index]:
    """A package index on this machine, empty."""
    made = Index()
    server = serve(made)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def lab(tmp_path: Path, index: Index) -> Lab:
    """A checkout of the series without lines."""
    return new_lab(tmp_path, index)
