"""Builds here are real: the pinned nvcc is fetched into the cache, and the machine's own is out of reach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_series import kernels
from vllm_series.kernels import KernelBuild
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("CMakeLists.txt", "dsa.h", "common.cuh", "abi.cu", "topk_compare.cu")


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
def small_checkout(
    ws: Workspace, built: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Workspace]:
    """Makes other checkouts that hold the build and the small kernels, with a cache of their own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "toolchain").symlink_to(ws.cache / "toolchain")
    monkeypatch.setenv("VLLM_SERIES_CACHE", str(cache))

    def make(name: str) -> Workspace:
        root = tmp_path / name
        shutil.copytree(ROOT / "cmake", root / "cmake")
        shutil.copytree(ROOT / "pins" / "toolchain", root / "pins" / "toolchain")
        (root / "patches").mkdir()
        csrc = root / "overlay" / "csrc" / "dsa"
        csrc.mkdir(parents=True)
        for file in SMALL:
            shutil.copy2(ROOT / "overlay" / "csrc" / "dsa" / file, csrc)
        return Workspace(root)

    return make
