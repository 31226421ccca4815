"""Builds here are real: the pinned nvcc is fetched into the cache, and the machine's own is out of reach."""

from __future__ import annotations

import shutil
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
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with g++ and nothing else of interest: no nvcc, cmake or ninja of the machine."""
    folder = tmp_path_factory.mktemp("path")
    for name in ("g++", "env", "sh"):
        found = shutil.which(name)
        assert found, f"the tests of the kernels need {name}"
        (folder / name).symlink_to(found)
    for name in ("nvcc", "cmake", "ninja", "ptxas"):
        assert shutil.which(name, path=str(folder)) is None
    return str(folder)


@pytest.fixture(scope="session")
def built(ws: Workspace, bare_path: str) -> KernelBuild:
    """The library of this checkout, made with the fetched nvcc."""
    # For this build alone: other tests of the same process need the machine's PATH.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", bare_path)
        return kernels.build(ws)


@pytest.fixture
def checkouts(
    ws: Workspace, built: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Checkouts:
    return Checkouts(tmp_path, ws.cache / "toolchain", monkeypatch)
