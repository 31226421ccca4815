# SPDX-License-Identifier: Apache-2.0
"""bench/litetopk_pipes: the program compiles for Hopper, and its output becomes rows."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_series.kernels import toolchain
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("litetopk_pipes")


def test_the_program_compiles(bench: Any, tmp_path: Path) -> None:
    tools = toolchain.pinned(Workspace(ROOT))
    bench.build(str(tools.nvcc), tmp_path / "pipes")
    ran = subprocess.run([tmp_path / "pipes"], capture_output=True, text=True, check=False)
    if ran.returncode:  # no card: it says so, and prints no cycles
        assert ran.returncode == 1 and ran.stderr.strip() and not ran.stdout
    else:
        assert len(bench.parse(ran.stdout)) == 7


def test_cycles_become_rows(bench: Any) -> None:
    text = "3 warpgroups, products\t256.0\t0.0\n3 warpgroups, both in turn\t320.0\t320.0\n"
    rows = bench.rows_of(bench.parse(text), {"commit": "abc"})
    assert [(row["case"], row["metric"], row["ours"], row["ratio"]) for row in rows] == [
        ("pipes 3 warpgroups, products", "products of half a tile", 256.0, 1.0),
        ("pipes 3 warpgroups, both in turn", "products of half a tile", 320.0, 0.8),
        ("pipes 3 warpgroups, both in turn", "sums of half a tile", 320.0, 0.8),
    ]
    assert all(
        row["unit"] == "cycles" and row["baseline"] == 256.0 and row["commit"] == "abc" for row in rows
    )
    with pytest.raises(ValueError, match="not enough"):
        bench.parse("no CUDA device\n")
