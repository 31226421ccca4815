"""A patch that breaks upstream's code is caught on the real tree: exit code 7, the node, and the patch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_series import apply, lock, pins, stack
from vllm_series.importer import odb
from vllm_series.scratch import work_tree
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]
LINE = "0.33.0"
TARGET = "vllm/v1/attention/backends/mla/indexer.py"
TEST = "tests/v1/attention/test_indexer_native_next_n.py"
NODE = f"{TEST}::test_native_decode_gate_without_deepgemm[False-True]"


def plant(ws: Workspace, name: str, old: str, new: str) -> None:
    """Append a patch that replaces ``old`` by ``new`` in TARGET to the line's series, and lock it."""
    pin = pins.load_pin(ws, LINE)
    made = stack.current(ws, pin)
    with work_tree(odb(ws), ws, made.top, "plant", [TARGET]) as git:
        path = git.cwd / TARGET
        text = path.read_text()
        assert old in text, "upstream moved: pick another place to break"
        path.write_text(text.replace(old, new))
        git.run("add", TARGET)
        git.run("commit", "-q", "-m", f"{name}: planted by a test\n\nFeature: planted\n")
        form = ("--stdout", "--zero-commit", "--full-index", "--no-signature", "-1", "-N")
        (ws.patches(LINE) / f"{name}.patch").write_bytes(git.raw("format-patch", *form))
    series = ws.patches(LINE) / "series"
    series.write_text(series.read_text() + f"{name}.patch\n")
    with apply.line_lock(ws, LINE):
        lock.write(ws, lock.lock_of(ws, stack.current(ws, pin)))


@pytest.fixture
def checkout(tmp_path: Path) -> Workspace:
    """A copy of this checkout's pins, patches and overlay, with an object store of its own."""
    for name in ("pins", "patches", "overlay", "bench/results/upstream-tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
    return Workspace(tmp_path)


def series(ws: Workspace, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "vllm_series.cli", "--root", str(ws.root), *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ws.root)


@pytest.mark.upstream
def test_planted_regression_is_caught_and_bisected(checkout: Workspace) -> None:
    plant(checkout, "harmless", "next_n in (1, 2)", "next_n in (1, 2, )")
    plant(checkout, "breaks", "next_n in (1, 2, )", "next_n in (1, 2, 3)")
    plant(checkout, "later", "next_n in (1, 2, 3)", "next_n in {1, 2, 3}")
    done = series(checkout, "baseline", "diff", LINE, "--modes", "on", "--select", TEST, "--json")
    assert done.returncode == 7, done.stderr
    # The error object follows the result on stdout; the reports say the same.
    report = json.loads((checkout.root / f"build/baseline/reports/{LINE}-on.json").read_text())
    assert NODE in report["failing"] and report["counts"]["REGRESSION"] == len(report["failing"])
    assert all(row["again"] == [["passed", "failed"]] * 3 for row in report["rows"])
    assert "series bisect" in done.stderr

    command = (sys.executable, "-m", "vllm_series.cli", "baseline", "try", LINE, NODE)
    found = series(checkout, "bisect", LINE, "--json", "--", *command)
    assert found.returncode == 1, found.stderr
    assert json.loads(found.stdout[found.stdout.index("{") :])["guilty"] == "breaks.patch"
