"""Other checkouts that hold no more than the build of the kernels needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("CMakeLists.txt", "dsa.h", "common.cuh", "abi.cu", "topk_compare.cu")


class Checkouts:
    """Makes checkouts that hold the build and the small kernels, with a cache of their own."""

    def __init__(self, root: Path, toolchains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        cache = root / "cache"
        cache.mkdir()
        (cache / "toolchain").symlink_to(toolchains)
        monkeypatch.setenv("VLLM_SERIES_CACHE", str(cache))

    def __call__(self, name: str, **more: str) -> Workspace:
        """Return the checkout in folder ``name``; ``more`` are further sources by name without ``.cu``."""
        root = self.root / name
        shutil.copytree(ROOT / "cmake", root / "cmake")
        shutil.copytree(ROOT / "pins" / "toolchain", root / "pins" / "toolchain")
        (root / "patches").mkdir()
        csrc = root / "overlay" / "csrc" / "dsa"
        csrc.mkdir(parents=True)
        for file in SMALL:
            shutil.copy2(ROOT / "overlay" / "csrc" / "dsa" / file, csrc)
        for file, text in more.items():
            (csrc / f"{file}.cu").write_text(text)
        return Workspace(root)
