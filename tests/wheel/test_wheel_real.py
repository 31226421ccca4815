"""The real 0.28.0 and 0.33.0: reproducible, installable, verifiable, and refusing what it cannot carry."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_series.files import sha256_file
from vllm_series.wheel.archive import Source

pytestmark = pytest.mark.slow
LINES = ("0.33.0", "0.28.0")
Run = Callable[..., subprocess.CompletedProcess[str]]


def checkout(root: Path, target: Path) -> Path:
    """A second checkout of the series: what decides a wheel, nothing generated."""
    for name in ("pins", "patches", "overlay", "cmake"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def series(place: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_series.cli", "--root", place, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def build(place: Path, line: str, *args: str) -> Path:
    done = series(place, "wheel", line, "--no-kernels", "--json", *args)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["wheel"])


@pytest.fixture(scope="module")
def place(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(root, tmp_path_factory.mktemp("one") / "series")


@pytest.fixture(scope="module")
def wheels(place: Path) -> dict[str, Path]:
    """The kernel-less wheel of each line."""
    return {line: build(place, line) for line in LINES}


@pytest.mark.parametrize("line", LINES)
def test_two_checkouts_build_the_same_bytes(
    wheels: dict[str, Path], root: Path, tmp_path: Path, line: str
) -> None:
    second = build(checkout(root, tmp_path / "elsewhere"), line)
    assert second != wheels[line] and sha256_file(second) == sha256_file(wheels[line])


@pytest.mark.parametrize("line", LINES)
def test_only_what_the_series_changes_differs_from_upstream(
    wheels: dict[str, Path], place: Path, line: str
) -> None:
    """Member by member against upstream's wheel, not trusting our own bookkeeping."""
    upstream = json.loads(series(place, "fetch", line, "--wheel", "x86_64", "--json").stdout)["files"][-1][
        "path"
    ]
    touched = set()
    for patch in (place / "patches" / line).glob("*.patch"):
        touched |= set(re.findall(r"^diff --git a/\S+ b/(vllm/\S+)$", patch.read_text(), re.MULTILINE))
    overlay = {
        path.relative_to(place / "overlay").as_posix()
        for path in (place / "overlay/vllm").rglob("*")
        if path.is_file()
    }
    own = {"vllm/_version.py", "vllm/dsa/_provenance.json"}
    with zipfile.ZipFile(wheels[line]) as new, zipfile.ZipFile(upstream) as old:
        mine = {name: new.getinfo(name).CRC for name in new.namelist() if name.startswith("vllm/")}
        theirs = {name: old.getinfo(name).CRC for name in old.namelist() if name.startswith("vllm/")}
    differs = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    assert differs == touched | overlay | own
    assert touched and overlay


def test_verify_accepts_it_and_finds_a_flipped_byte(
    wheels: dict[str, Path], place: Path, tmp_path: Path
) -> None:
    wheel = wheels["0.33.0"]
    done = series(place, "wheel", "--verify", wheel)
    assert done.returncode == 0 and "byte for byte" in done.stdout, done.stderr
    copy = tmp_path / wheel.name
    shutil.copy(wheel, copy)
    with Source(copy) as source:
        offset, size = source.raw_span(source.members["vllm/_C_stable_libtorch.abi3.so"])
    with copy.open("r+b") as handle:
        handle.seek(offset + size // 2)
        byte = handle.read(1)[0]
        handle.seek(offset + size // 2)
        handle.write(bytes([byte ^ 4]))
    done = series(place, "wheel", "--verify", copy)
    assert done.returncode == 1
    assert "vllm/_C_stable_libtorch.abi3.so has other bytes" in done.stderr and "fix:" in done.stderr


@pytest.mark.parametrize("line", LINES)
def test_pip_installs_it(
    wheels: dict[str, Path], line: str, pythons: dict[str, Path], tmp_path: Path
) -> None:
    """pip itself, another Python for each line, without a warning; what it lists as installed is there."""
    minors = sorted(pythons)
    minor = minors[LINES.index(line) % len(minors)]
    python = tmp_path / "env/bin/python"
    subprocess.run([pythons[minor], "-m", "venv", tmp_path / "env"], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    command = [python, "-I", "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", wheels[line]]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower().replace("running pip as the 'root' user", "")
    shown = subprocess.check_output(
        [python, "-I", "-m", "pip", "show", "-f", "vllm"], text=True, stderr=subprocess.STDOUT, env=env
    )
    assert f"Version: {wheels[line].name.split('-')[1]}\n" in shown and "vllm/dsa/_provenance.json" in shown
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    assert json.loads((site / "vllm/dsa/_provenance.json").read_text())["line"] == line


def test_wheel_for_the_other_platform(place: Path) -> None:
    """aarch64 is repacked on any machine; on another one it has no kernels and says so."""
    done = series(place, "wheel", "0.33.0", "--platform", "aarch64", "--no-kernels", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    path = Path(data["wheel"])
    assert path.name.endswith("-0nokernels-cp38-abi3-manylinux_2_28_aarch64.whl")
    with zipfile.ZipFile(path) as wheel:
        library = next(name for name in wheel.namelist() if name.endswith(".abi3.so"))
        assert wheel.read(library)[18:20] == b"\xb7\x00"  # e_machine: AArch64
        record = json.loads(wheel.read("vllm/dsa/_provenance.json"))
    assert record["platform"] == "aarch64" and record["kernels"] == "none"
    path.unlink()


def test_killed_in_the_middle_then_run_again(wheels: dict[str, Path], place: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from vllm_series import cli
from vllm_series.wheel import archive
write = archive.write
def half(target, source, members):
    write(target, source, list(members)[:2000])
    os.kill(os.getpid(), signal.SIGKILL)
archive.write = half
cli.main(sys.argv[1:])
"""
    options = ("--root", place, "wheel", "0.28.0", "--no-kernels", "--output", tmp_path)
    killed = subprocess.run([sys.executable, "-c", code, *options], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(tmp_path.glob(".*.part")) and not list(tmp_path.glob("*.whl"))
    again = build(place, "0.28.0", "--output", str(tmp_path))
    assert sha256_file(again) == sha256_file(wheels["0.28.0"])
    assert [path.name for path in tmp_path.iterdir()] == [again.name]


def test_disk_full_in_the_middle(wheels: dict[str, Path], place: Path, tmp_path: Path) -> None:
    """A limit of 100 MB for files of the process stands in for the disk."""
    program = "ulimit -f 100000; trap '' XFSZ; exec \"$@\""
    command = [
        "bash", "-c", program, "-", sys.executable, "-m", "vllm_series.cli", "--root", str(place),
        "wheel", "0.33.0", "--no-kernels", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "no space left" in done.stderr and "fix:" in done.stderr
    assert not list((tmp_path / "out").iterdir())
    assert build(place, "0.33.0") == wheels["0.33.0"]


def test_refuses_a_patch_of_compiled_code(root: Path, tmp_path: Path) -> None:
    """A real patch of a real CUDA source, made with the tool's own edit workflow."""
    other = checkout(root, tmp_path / "series")
    assert series(other, "apply", "0.33.0").returncode == 0
    tree = other / "build/0.33.0"
    source = tree / "csrc/cuda_utils.h"
    source.write_text(source.read_text() + "// changed\n")
    message = "Change a header\n\nFeature: core\nOrigin: none\nUpstream-Status: Inappropriate [test]\n"
    git = ["git", "-C", tree, "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "commit", "-q", "-am", message], check=True)
    done = series(other, "export", "0.33.0")
    assert done.returncode == 0, done.stderr
    done = series(other, "wheel", "0.33.0", "--no-kernels")
    assert done.returncode == 1, done.stderr
    assert "csrc/cuda_utils.h is changed by change-a-header.patch" in done.stderr and "fix:" in done.stderr
    assert not list((other / "dist").glob("*"))
