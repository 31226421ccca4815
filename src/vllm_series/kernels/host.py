"""The host side of the toolchain: g++ (installed where possible), CMake, ninja, and a clean environment."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from vllm_series.errors import NeedsPerson
from vllm_series.ui import say

_INSTALL = {
    "apt-get": "apt-get update && apt-get install -y --no-install-recommends g++",
    "dnf": "dnf install -y gcc-c++",
    "yum": "yum install -y gcc-c++",
    "zypper": "zypper install -y gcc-c++",
    "pacman": "pacman -S --noconfirm gcc",
    "apk": "apk add g++",
}


@dataclass(frozen=True)
class HostTools:
    """Programs beside nvcc; ``record`` is what the provenance says about them."""

    cxx: Path
    cmake: Path
    ninja: Path
    record: dict[str, str]


def find(newest_gcc: int = 0) -> HostTools:
    """Return the host tools; a missing g++ is installed through apt-get when this process may do that.

    ``CXX`` names another g++ than the first on PATH. ``newest_gcc`` is the newest major version that nvcc
    accepts (0: any).

    Raises:
        NeedsPerson: g++, CMake or ninja is missing or unusable; ``fix`` is the line to type.
    """
    cxx = _compiler()
    first, major = _describe(cxx)
    if newest_gcc and major > newest_gcc:
        raise NeedsPerson(
            f"{cxx} is version {major}; the pinned nvcc accepts g++ up to {newest_gcc}",
            fix=f"install g++-{newest_gcc} and set CXX=g++-{newest_gcc}, or make the wheel with --no-kernels",
        )
    cmake, ninja = _packaged("cmake"), _packaged("ninja")
    linker = subprocess.run(
        [cxx, "-Wl,--version"], capture_output=True, text=True, check=False, env=environment(cxx)
    )
    record = {
        "c++": first,
        "linker": (linker.stdout.splitlines() or ["unknown"])[0],
        "c library": " ".join(platform.libc_ver()),
        "cmake": version("cmake"),
        "ninja": version("ninja"),
    }
    return HostTools(cxx, cmake, ninja, record)


def environment(*programs: Path) -> dict[str, str]:
    """Return the only variables that the build sees: no CXXFLAGS, CPATH or NVCC_APPEND_FLAGS of the user."""
    folders = dict.fromkeys([*(str(p.parent) for p in programs), "/usr/bin", "/bin"])
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": os.pathsep.join(folders), "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def _compiler() -> Path:
    named = os.environ.get("CXX", "").strip()
    found = shutil.which(named or "g++")
    if found is None and named:
        raise NeedsPerson(f"CXX={named} is not a program on PATH", fix="unset CXX, or name an existing g++")
    if found is None:
        _install()
        found = shutil.which("g++")
    if found is None:
        raise NeedsPerson(
            "g++ is still not on PATH after its installation",
            fix="set CXX=/path/to/g++, or make the wheel with --no-kernels",
        )
    return Path(found).absolute()


def _install() -> None:
    """Install g++ through apt-get, or raise with the line for this machine's package manager."""
    manager = next((name for name in _INSTALL if shutil.which(name)), None)
    line = _INSTALL[manager] if manager else "install g++ with this system's package manager"
    root = os.geteuid() == 0
    if manager and not root:
        line = f"sudo sh -c '{line}'"
    fix = f"{line}\n       or make the wheel with --no-kernels"
    missing = NeedsPerson("the kernels need g++, which is not installed", fix=fix)
    if manager != "apt-get" or not root:
        raise missing
    say(f"g++ is missing, installing it: {line}")
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=2,
        check=False,
    )
    if done.returncode:
        raise NeedsPerson("installing g++ through apt-get failed (its messages are above)", fix=fix)


def _describe(cxx: Path) -> tuple[str, int]:
    """Return the first line of ``g++ --version`` and the major version."""
    try:
        text = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
        major = subprocess.run([cxx, "-dumpversion"], capture_output=True, text=True, check=True).stdout
        return text.splitlines()[0], int(re.split(r"\D", major.strip())[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as err:
        raise NeedsPerson(
            f"{cxx} does not work as a C++ compiler: {err}",
            fix="set CXX=/path/to/g++, or make the wheel with --no-kernels",
        ) from err


def _packaged(name: str) -> Path:
    """Return the program that the Python package ``name`` brings; the machine's own is never used."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.name == name]
    paths = [path for path in paths if os.access(path, os.X_OK)]
    if not paths:
        raise NeedsPerson(
            f"the Python package {name} is not in this environment",
            fix="make it anew: rm -r .venv, then scripts/build.sh",
        )
    # cmake brings the program and a Python launcher of the same name: take the program.
    return max(paths, key=lambda path: path.stat().st_size).resolve()
