"""Fixtures of the overlay's tests that need neither torch nor a vLLM tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture
def alone() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with the overlay as the only ``vllm`` there is, and no site packages."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
        env |= {"PYTHONPATH": str(ROOT / "overlay"), "PYTHONDONTWRITEBYTECODE": "1"} | variables
        return subprocess.run([sys.executable, "-S", *arguments], capture_output=True, text=True, env=env)

    return run
