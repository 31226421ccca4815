"""What the tests of several folders share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def build_emulated() -> Callable[..., None]:
    """Compile a kernel's own source, with a header that plays the GPU, to a program for the CPU."""
    compiler = shutil.which("g++")
    assert compiler, "the tests of the kernels need g++"

    def build(program: Path, header: str, includes: Sequence[Path], target: Path) -> None:
        command = [
            *(compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
            *(f"-I{folder}" for folder in includes),
            *(f'-DDSA_HOST_EMULATION="{header}"', str(program), "-o", str(target)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return build
