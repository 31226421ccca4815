"""`series wheel`: wrong calls end with exit code 2 and name what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["9.9.9"], "the lines are: 0.33.0"),
        ([], "LINE is missing"),
        (["0.33.0", "--verify", "x.whl"], "give only --verify FILE"),
        (["--verify", "dist/nowhere.whl"], "does not exist"),
        (["0.33.0", "--platform", "riscv64"], "pins no wheel for riscv64"),
    ],
)
def test_wrong_calls(root: Path, args: list[str], message: str) -> None:
    command = [sys.executable, "-m", "vllm_series.cli", "--root", str(root), "wheel", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and "fix:" in done.stderr


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("build.sh", ["--with-deepgemm"], "not in this release"),
        ("build.sh", ["--nonsense"], "unknown option --nonsense"),
        ("build.sh", ["0.33.0", "0.28.0"], "one line at a time"),
        ("build.sh", ["9.9.9"], "the lines are: 0.33.0"),
        ("test.sh", ["--only", "nonsense"], "unknown stage nonsense"),
        ("test.sh", ["--gpu"], "fix: on a machine with the GPU"),
    ],
)
def test_wrong_calls_of_the_scripts(root: Path, script: str, args: list[str], message: str) -> None:
    done = subprocess.run(["bash", root / "scripts" / script, *args], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_stage_budgets_add_up_to_45_minutes_at_most(root: Path) -> None:
    done = subprocess.run(["bash", root / "scripts/test.sh", "--list"], capture_output=True, text=True)
    minutes = [int(row.split()[1]) for row in done.stdout.splitlines() if " min " in row]
    assert len(minutes) >= 4 and sum(minutes) <= 45
