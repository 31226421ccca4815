"""The selection of LiteTopK, run from its own source in litedsa's emulator and compared with a sort."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "overlay" / "csrc" / "dsa"
EMULATOR = HERE.parent / "litedsa"
#: Warps: one cuts the first scores of a scan or a later list, sixteen merge a range's parts; or a whole scan.
FRESH, LIST, MERGE, SCAN = "0", "1", "16", "2"
#: Of the choice of bins: made from samples.
SAMPLED = ("0", "0")


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


def emulate(program: Path, shape: str, n: int, k: int, warps: str, seed: int, *bins: str) -> str:
    command = [program, shape, str(n), str(k), warps, str(seed), *bins]
    done = subprocess.run(command, capture_output=True, text=True)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_bins_are_exact_where_they_do(program: Path, shape: str) -> None:
    """Scores that differ are cut by bins; with many ties, or few keys, bins say that they do not do."""
    spread = shape in ("iid", "heavy", "positive", "rising", "hot")
    for n, k, warps, *bins in (
        (4096, 2048, FRESH, *SAMPLED),
        (8192, 2048, MERGE, *SAMPLED),
        (20480, 512, MERGE, *SAMPLED),
        (6001, 2048, LIST, "0", "1"),
        (6001, 2048, LIST, "0.5", "1e-6"),
    ):
        said = emulate(program, shape, n, k, warps, 5, *bins)
        assert said == "ok" or (said == "no bins" and (not spread or bins[1] == "1e-6")), (n, k, warps, said)


@pytest.mark.parametrize("shape", [*SHAPES, "falling", "shifting"])
def test_a_scan_keeps_the_best(program: Path, shape: str) -> None:
    for n, k in ((8192, 256), (16384, 64), (511, 256), (512, 510), (1000, 16), (100, 64)):
        said = emulate(program, shape, n, k, SCAN, n)
        assert said == "ok", (n, k, said)


DEFECTS = {
    "one of the boundary's keys is left out": ("better < need", "better + 1 < need", "another set"),
    "the gate is a bin too high": ("cut.low - 1)", "cut.high + 1)", "refuses|another set"),
    "ties are refused too early": ("key_position(bound) < next", "true", "another set"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(build: Callable[[Path, Path], None], tmp_path: Path, defect: str) -> None:
    right, wrong, words = DEFECTS[defect]
    sources = {path.name: path.read_text(encoding="utf-8") for path in SOURCES.glob("litetopk*.cuh")}
    assert sum(text.count(right) for text in sources.values()) == 1, defect
    for name, text in sources.items():
        (tmp_path / name).write_text(text.replace(right, wrong), encoding="utf-8")
    build(tmp_path, tmp_path / "broken")
    said = [emulate(tmp_path / "broken", "iid", 3000, 512, LIST, seed, "0", "1") for seed in range(4)]
    said += [emulate(tmp_path / "broken", shape, 3000, 256, SCAN, 5) for shape in ("iid", "equal")]
    assert any(re.search(f"wrong: .*({words})", line) for line in said), said
