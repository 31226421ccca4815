"""The selection of LiteTopK, run from its own source in litedsa's emulator and compared with a sort."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "overlay" / "csrc" / "dsa"
EMULATOR = HERE.parent / "litedsa"
#: Warps: one cuts the scan's first scores or a later list, sixteen merge the parts of a range.
FRESH, LIST, MERGE = "0", "1", "16"


@pytest.fixture(scope="session")
def build(build_emulated: Callable[..., None]) -> Callable[[Path, Path], None]:
    def build(sources: Path, target: Path) -> None:
        build_emulated(HERE / "emulate_select.cc", "emulate_warp.h", [HERE, EMULATOR, sources], target)

    return build


@pytest.fixture(scope="module")
def program(build: Callable[[Path, Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("emulated") / "emulate_select"
    build(SOURCES, target)
    return target


def emulate(program: Path, shape: str, n: int, k: int, warps: str, seed: int) -> str:
    done = subprocess.run([program, shape, str(n), str(k), warps, str(seed)], capture_output=True, text=True)
    return done.stdout.strip() + (f" [exit code {done.returncode}]" if done.returncode else "")


SHAPES = ("iid", "heavy", "positive", "rising", "hot", "holes", "equal", "coarse", "infinite", "tiny")


@pytest.mark.parametrize("warps", [FRESH, LIST, MERGE])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_selection_is_exact(program: Path, shape: str, warps: str) -> None:
    assert emulate(program, shape, 4096, 2048, warps, 3) == "ok"


@pytest.mark.parametrize("seed", range(3))
def test_sizes_around_k(program: Path, seed: int) -> None:
    """One key too few, exactly k, one more; odd lengths, a nearly empty list."""
    for shape in ("iid", "coarse", "infinite", "holes"):
        for n, k in ((63, 64), (64, 64), (65, 64), (1, 2), (777, 128)):
            for warps in (LIST, MERGE) if n % 4 else (FRESH, LIST, MERGE):
                said = emulate(program, shape, n, k, warps, 100 * seed + n)
                assert said == "ok", (shape, n, k, warps, said)


def test_a_defect_is_found(build: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Of the keys of the last bin one too few is taken."""
    for path in SOURCES.glob("litetopk*.cuh"):
        text = path.read_text(encoding="utf-8")
        if path.name == "litetopk_select.cuh":
            assert "rank < boundary.need" in text
            text = text.replace("rank < boundary.need", "rank + 1 < boundary.need")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    build(tmp_path, tmp_path / "broken")
    said = [emulate(tmp_path / "broken", "iid", 3001, 512, LIST, seed) for seed in range(6)]
    assert any("wrong: another set" in line for line in said), said
