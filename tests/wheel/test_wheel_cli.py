"""`series wheel`: wrong calls end with exit code 2 and name what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_series.errors import UsageError
from vllm_series.wheel import install
from vllm_series.wheel.uvtool import Interpreter


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["9.9.9"], "the lines are: 0.33.0"),
        ([], "LINE is missing"),
        (["0.33.0", "--verify", "x.whl"], "give only --verify FILE"),
        (["--verify", "dist/nowhere.whl"], "does not exist"),
        (["0.33.0", "--platform", "riscv64"], "pins no wheel for riscv64"),
        (["0.33.0", "--system-nvcc", "--no-kernels"], "exclude each other"),
        (["0.33.0", "--python", "3.12"], "add --full-check --python 3.12"),
    ],
)
def test_wrong_calls(root: Path, args: list[str], message: str) -> None:
    command = [sys.executable, "-m", "vllm_series.cli", "--root", str(root), "wheel", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and "fix:" in done.stderr


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("build.sh", ["--with-deepgemm"], "has no usable torch"),
        ("build.sh", ["--nonsense"], "unknown option --nonsense"),
        ("build.sh", ["0.33.0", "0.28.0"], "one line at a time"),
        ("build.sh", ["9.9.9"], "the lines are: 0.33.0"),
        ("build.sh", ["--system-nvcc", "--no-kernels"], "--system-nvcc and --no-kernels exclude each other"),
        ("build.sh", ["--python"], "--python needs a value"),
        ("test.sh", ["--only", "nonsense"], "unknown stage nonsense"),
        ("test.sh", ["--gpu"], "PYTHON=/path/to/python scripts/test.sh --gpu"),
    ],
)
def test_wrong_calls_of_the_scripts(root: Path, script: str, args: list[str], message: str) -> None:
    done = subprocess.run(["bash", root / "scripts" / script, *args], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_stage_budgets_add_up_to_45_minutes_at_most(root: Path) -> None:
    done = subprocess.run(["bash", root / "scripts/test.sh", "--list"], capture_output=True, text=True)
    minutes = [int(row.split()[1]) for row in done.stdout.splitlines() if " min " in row]
    assert len(minutes) >= 4 and sum(minutes) <= 45


def test_the_system_nvcc_reaches_the_kernels(root: Path, tmp_path: Path) -> None:
    """Through scripts/build.sh, with no nvcc to be found: the message is that of the kernels' own option."""
    env = {**os.environ, "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", root / "scripts/build.sh", "--system-nvcc"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 2, done.stderr
    assert f"--system-nvcc: there is no nvcc in {tmp_path}/bin (CUDA_HOME)" in done.stderr


def test_the_python_of_the_full_check() -> None:
    there = [Interpreter(Version(text), Path(text)) for text in ("3.11.4", "3.13.1", "3.12.9")]
    assert install.choose(there, "").version == Version("3.11.4")
    assert install.choose(there, "3.12").version == Version("3.12.9")
    for missing in ("3.10", "3.1", "3"):
        with pytest.raises(UsageError, match=r"3\.11\.4, 3\.13\.1, 3\.12\.9") as caught:
            install.choose(there, missing)
        assert f"uv python install {missing}" in caught.value.fix
