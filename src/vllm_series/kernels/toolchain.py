"""The CUDA compiler: the pinned one, fetched and unpacked into the cache, or the machine's own."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed, FetchFailed, IntegrityError, NeedsPerson, UsageError
from vllm_series.fetch import fetch
from vllm_series.files import sha256_file, sha256_of
from vllm_series.lock_file import locked
from vllm_series.pins import Artifact
from vllm_series.ui import say
from vllm_series.workspace import Workspace

SCHEMA = 1
PLATFORMS = ("x86_64", "aarch64")
OLDEST_CUDA = (12, 9)  # sm_100a with all features that the kernels may use


@dataclass(frozen=True)
class Toolchain:
    """A usable nvcc. ``record`` is what the provenance says about it; equal records give equal bytes."""

    nvcc: Path
    cuda: str  # "13.0"
    newest_gcc: int  # 0: not known
    record: dict[str, Any]


@dataclass(frozen=True)
class ToolchainPin:
    """``pins/toolchain/nvcc.toml`` for one platform."""

    cuda: str
    nvcc: str
    newest_gcc: int
    packages: tuple[tuple[str, Artifact], ...]  # (version, wheel)


def load(ws: Workspace, machine: str | None = None) -> ToolchainPin:
    """Read the pin for ``machine`` (default: this one's architecture).

    Raises:
        CheckFailed: the file is missing or not valid.
        UsageError: there is no compiler for that architecture.
    """
    machine = machine or platform.machine()
    path = ws.pins / "toolchain" / "nvcc.toml"
    fix = "restore it: git checkout -- pins/toolchain/nvcc.toml"
    if machine not in PLATFORMS:
        raise UsageError(
            f"no pinned nvcc for {machine}, only for {' and '.join(PLATFORMS)}",
            fix="make the wheel with --no-kernels",
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise CheckFailed(f"{path.name}: schema {data['schema']}, this tool reads {SCHEMA}", fix=fix)
        packages = tuple(
            (str(row["version"]), Artifact(row["filename"], row["sha256"], int(row["size"]), row["project"]))
            for row in data["package"]
            if row["platform"] == machine
        )
        pin = ToolchainPin(str(data["cuda"]), str(data["nvcc"]), int(data["newest_gcc"]), packages)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as err:
        raise CheckFailed(f"{path.name} cannot be read: {err!r}", fix=fix) from err
    if not packages:
        raise CheckFailed(f"{path.name} lists no package for {machine}", fix=fix)
    return pin


def pinned(ws: Workspace, sources: Iterable[Path] = ()) -> Toolchain:
    """Return the pinned nvcc; the first call fetches and unpacks it (105 MB to download, 271 MB unpacked).

    ``sources`` are folders that may hold the packages already.

    Raises:
        IntegrityError: a downloaded file is not the pinned one.
        FetchFailed: network, index or disk did not deliver.
    """
    pin = load(ws)
    wheels = [artifact for _, artifact in pin.packages]
    key = sha256_of("\n".join(sorted(a.sha256 for a in wheels)).encode())[:16]
    folder = ws.cache / "toolchain" / f"nvcc-{pin.nvcc}-{key}"
    nvcc = folder / "nvidia" / "cu13" / "bin" / "nvcc"
    with locked(folder.parent / f".{folder.name}.lock"):
        if not _intact(folder):
            _unpack(folder, _fetch(ws, wheels, list(sources)))
    record = {
        "source": "package index",
        "nvcc": pin.nvcc,
        "packages": [
            {"name": a.project, "version": version, "filename": a.filename, "sha256": a.sha256}
            for version, a in pin.packages
        ],
    }
    _version(nvcc, expected=pin.nvcc)
    return Toolchain(nvcc, pin.cuda, pin.newest_gcc, record)


def _fetch(ws: Workspace, wheels: list[Artifact], sources: list[Path]) -> list[Path]:
    try:
        return [fetch(ws, artifact, sources) for artifact in wheels]
    except FetchFailed as err:
        ways = (
            "hand its packages in: series kernels build --source DIR",
            "use --system-nvcc",
            "or --no-kernels",
        )
        raise FetchFailed(f"the pinned nvcc: {err.message}", fix=f"mend that, or {', '.join(ways)}") from err


def system() -> Toolchain:
    """Return the machine's own nvcc: ``$CUDA_HOME/bin/nvcc`` or the first on PATH.

    Raises:
        UsageError: there is none, or it is too old.
    """
    home = os.environ.get("CUDA_HOME", "")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if found is None:
        where = f"in {home}/bin (CUDA_HOME)" if home else "on PATH"
        raise UsageError(
            f"--system-nvcc: there is no nvcc {where}",
            fix="leave --system-nvcc out: the pinned one is fetched",
        )
    nvcc = Path(found).resolve()
    version = _version(nvcc)
    if tuple(int(n) for n in version.split(".")[:2]) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        raise UsageError(
            f"{nvcc} is {version}; the kernels need at least {oldest}",
            fix="leave --system-nvcc out: the pinned one is fetched",
        )
    home_of_nvcc = _programs_of(nvcc)
    parts = {name: home_of_nvcc / name for name in ("nvcc", "cudafe++", "ptxas", "fatbinary")}
    parts["cicc"] = home_of_nvcc.parent / "nvvm" / "bin" / "cicc"
    record = {
        "source": "system",
        "nvcc": version,
        "programs": {name: sha256_file(path) for name, path in sorted(parts.items()) if path.is_file()},
    }
    return Toolchain(nvcc, ".".join(version.split(".")[:2]), 0, record)


def _programs_of(nvcc: Path) -> Path:
    """Return the folder of the real nvcc, which distributions hide behind a script or a link."""
    dry = [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull]
    said = subprocess.run(dry, capture_output=True, text=True, timeout=60, check=False).stderr
    found = re.search(r"^#\$ _HERE_=(.+)$", said, re.MULTILINE)
    return Path(found[1]) if found else nvcc.parent


def _version(nvcc: Path, expected: str = "") -> str:
    """Run ``nvcc --version``: proves that it starts here and says what it is."""
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise NeedsPerson(
            f"{nvcc} does not run: {err}",
            fix="mount the cache folder without noexec, or set VLLM_SERIES_CACHE",
        ) from err
    found = re.search(r"\bV(\d+\.\d+\.\d+)", answer.stdout)
    if answer.returncode or not found:
        raise NeedsPerson(
            f"{nvcc} --version failed: {(answer.stderr or answer.stdout).strip()}",
            fix="make the wheel with --no-kernels",
        )
    if expected and found[1] != expected:
        raise IntegrityError(
            f"{nvcc} says it is {found[1]}, the pin says {expected}", fix=f"rm -r {nvcc.parents[3]}"
        )
    return found[1]


def _intact(folder: Path) -> bool:
    """Whether every file that the wheels list is there with its size (a cache cleaner may take some)."""
    records = list(folder.glob("*.dist-info/RECORD"))
    for record in records:
        with record.open(encoding="utf-8", newline="") as text:
            for name, _, size in csv.reader(text):
                path = folder / name
                if size and not (path.is_file() and path.stat().st_size == int(size)):
                    return False
    return bool(records)


def _unpack(folder: Path, wheels: list[Path]) -> None:
    """Unpack into a temporary neighbour and rename, so that a killed run leaves nothing half-made."""
    say(f"unpacking nvcc into {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for killed in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(killed)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            root = Path(scratch) / "root"
            for wheel in wheels:
                _extract(wheel, root)
            # nvcc.profile and CMake look for lib64; the wheels have lib.
            (root / "nvidia" / "cu13" / "lib64").symlink_to("lib")
            if folder.exists():
                shutil.rmtree(folder)
            root.rename(folder)
    except (OSError, zipfile.BadZipFile) as err:
        raise FetchFailed(
            f"cannot unpack nvcc into {folder}: {err}",
            fix="free 300 MB there or set VLLM_SERIES_CACHE, then run again",
        ) from err


def _extract(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = Path(archive.extract(info, root))
            if not info.is_dir():
                # The wheels let only the owner execute; a cache shared by several users needs it for all.
                path.chmod(0o755 if (info.external_attr >> 16) & 0o100 else 0o644)
