"""Builds here are real: the pinned nvcc is fetched into the cache, and the machine's own is out of reach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_checkouts import ROOT, Checkouts

from vllm_series import kernels
from vllm_series.kernels import KernelBuild
from vllm_series.workspace import Workspace


@pytest.fixture(scope="session")
def ws() -> Workspace:
    return Workspace(ROOT)


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PATH with g++ and nothing else of interest: no nvcc, cmake or ninja of the machine."""
    folder = tmp_path_factory.mktemp("path")
    for name in ("g++", "env", "sh"):
        found = shutil.which(name)
        assert found, f"the tests of the kernels need {name}"
        (folder / name).symlink_to(found)
    before = os.environ["PATH"]
    os.environ["PATH"] = str(folder)
    for name in ("nvcc", "cmake", "ninja", "ptxas"):
        assert shutil.which(name) is None
    yield str(folder)
    os.environ["PATH"] = before


@pytest.fixture(scope="session")
def built(ws: Workspace, bare_path: str) -> KernelBuild:
    """The library of this checkout, made with the fetched nvcc."""
    return kernels.build(ws)


@pytest.fixture
def checkouts(
    ws: Workspace, built: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Checkouts:
    return Checkouts(tmp_path, ws.cache / "toolchain", monkeypatch)
