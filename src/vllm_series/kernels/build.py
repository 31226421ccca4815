"""Builds the kernel library and caches it under a digest of everything that can change its bytes."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed, FetchFailed, SeriesError
from vllm_series.files import sha256_file, sha256_of, write_atomic
from vllm_series.kernels import host, toolchain
from vllm_series.kernels.inspect import check, inspect
from vllm_series.lock_file import held, locked
from vllm_series.overlay import is_junk
from vllm_series.ui import say
from vllm_series.workspace import Workspace

LIBRARY = "_dsa_C.so"
#: Raised when this module changes how the library is built in a way that its inputs do not show.
RECIPE = 1
_SOURCES = (("cmake", {"*.txt", "*.cmake"}), ("overlay/csrc/dsa", {"*.cu", "*.cuh", "*.h", "CMakeLists.txt"}))
_TAIL = 60  # lines of a failed compilation that are shown


@dataclass(frozen=True)
class KernelBuild:
    """A built library. ``provenance`` has no machine path and no time: equal provenance means equal bytes."""

    library: Path
    sha256: str
    provenance: dict[str, Any]
    reused: bool = False


def source_files(ws: Workspace) -> dict[str, Path]:
    """Return the files that the library is made of: posix path in the checkout -> path."""
    found: dict[str, Path] = {}
    for folder, patterns in _SOURCES:
        for pattern in patterns:
            for path in (ws.root / folder).rglob(pattern):
                name = path.relative_to(ws.root).as_posix()
                if path.is_file() and not is_junk(name):
                    found[name] = path
    return dict(sorted(found.items()))


def build(
    ws: Workspace,
    *,
    system_nvcc: bool = False,
    jobs: int | None = None,
    force: bool = False,
    sources: Iterable[Path] = (),
) -> KernelBuild:
    """Return the library for this machine's architecture, from the cache when no input changed.

    Args:
        ws: the checkout whose ``cmake/`` and ``overlay/csrc/dsa/`` are built.
        system_nvcc: use the machine's nvcc instead of the pinned one.
        jobs: compilations at a time (default: one per processor).
        sources: folders that may hold the packages of the pinned nvcc; asked before the index.
        force: compile even if the cache has the result, from an empty folder.

    Raises:
        NeedsPerson: a program is missing; ``fix`` is the line to type.
        IntegrityError: a downloaded compiler package is not the pinned one.
        FetchFailed: network, index or disk did not deliver.
        CheckFailed: the sources do not compile, or the result breaks a promise.
    """
    pin_gcc = 0 if system_nvcc else toolchain.load(ws).newest_gcc
    tools = host.find(pin_gcc)  # before 100 MB are fetched: it may need a person
    nvcc = toolchain.system() if system_nvcc else toolchain.pinned(ws, sources)
    inputs = {name: sha256_file(path) for name, path in source_files(ws).items()}
    provenance: dict[str, Any] = {
        "recipe": RECIPE,
        "machine": platform.machine(),
        "nvcc": nvcc.record,
        "host": tools.record,
        "sources": inputs,
    }
    key = sha256_of(json.dumps(provenance, sort_keys=True).encode())
    kept = ws.cache / "kernels" / key[:32]
    try:
        with locked(kept.parent / f".{kept.name}.lock"):
            done = None if force else _kept(kept)
            return done or _make(ws, nvcc, tools, provenance, kept, jobs, clean=force)
    except OSError as err:
        raise FetchFailed(
            f"cannot build the kernels: {err}", fix="free some disk space, then run again"
        ) from err


def _kept(folder: Path) -> KernelBuild | None:
    """Return the cached result if it is whole."""
    library, record = folder / LIBRARY, folder / "provenance.json"
    try:
        provenance = json.loads(record.read_text(encoding="utf-8"))
        digest = sha256_file(library)
    except (OSError, ValueError):
        return None
    if not isinstance(provenance, dict) or provenance.get("sha256") != digest:
        say(f"{library}: the cached library is damaged, building it again")
        return None
    return KernelBuild(library, digest, provenance, reused=True)


def _make(
    ws: Workspace,
    nvcc: toolchain.Toolchain,
    tools: host.HostTools,
    provenance: dict[str, Any],
    kept: Path,
    jobs: int | None,
    *,
    clean: bool,
) -> KernelBuild:
    start = time.monotonic()
    # One folder per toolchain and checkout: after an edit ninja compiles only what changed. Paths count too:
    # CMake drops settings (CMAKE_BUILD_TYPE for one) when a folder meets another compiler.
    parts = [
        provenance["nvcc"],
        provenance["host"],
        *map(str, (nvcc.nvcc, tools.cxx, tools.cmake, tools.ninja)),
    ]
    tool_key = sha256_of(json.dumps(parts, sort_keys=True).encode())[:12]
    folder = ws.work / "kernels" / tool_key
    with locked(folder.parent / f".{tool_key}.lock"):
        if clean and folder.exists():
            shutil.rmtree(folder)
        say(f"building {LIBRARY} with nvcc {nvcc.record['nvcc']} and {tools.record['c++']}")
        made = _compile(ws, nvcc, tools, folder, jobs or os.cpu_count() or 1)
        facts = inspect(made)
        check(facts)
        digest = sha256_file(made)
        record = json.dumps({**provenance, "sha256": digest, "library": facts.as_dict()}, indent=2) + "\n"
        kept.mkdir(parents=True, exist_ok=True)
        library = kept / LIBRARY
        write_atomic(library, made.read_bytes(), mode=0o755)
        write_atomic(kept / "provenance.json", record)
    took, size = time.monotonic() - start, library.stat().st_size / 1024
    say(f"built {LIBRARY} in {took:.1f} s: {size:.0f} KiB, needs glibc {facts.glibc} or newer")
    return KernelBuild(library, digest, json.loads(record))


def _compile(
    ws: Workspace, nvcc: toolchain.Toolchain, tools: host.HostTools, folder: Path, jobs: int
) -> Path:
    scratch, configured = folder / "tmp", folder / "configured"
    if not configured.exists() and folder.exists():
        shutil.rmtree(folder)  # a run was killed while CMake looked at the compilers
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    env = host.environment(tools.cxx, tools.ninja) | {"TMPDIR": str(scratch)}
    setup: list[str | Path] = [
        *(tools.cmake, "-G", "Ninja", "-S", ws.root / "cmake", "-B", folder),
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_COMPILER={tools.cxx}",
        f"-DCMAKE_CUDA_HOST_COMPILER={tools.cxx}",
        f"-DCMAKE_CUDA_COMPILER={nvcc.nvcc}",
    ]
    _run(setup, env, "cmake cannot set up the build", folder)
    configured.touch()
    work: list[str | Path] = [tools.cmake, "--build", folder, "--parallel", str(jobs)]
    _run(work, env, "the kernels do not compile", folder)
    return folder / "csrc" / LIBRARY


def _run(command: list[str | Path], env: dict[str, str], what: str, folder: Path) -> None:
    log, terminal = folder / "log.txt", sys.stderr.isatty()
    # The child keeps our locks: if this process is killed, the next run waits for the compilers.
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=held(),
            text=True,
            errors="replace",
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            out.write(line)
            if terminal and line.startswith("["):  # ninja's "[3/14] Building ..."
                print(f"\r\x1b[K{line.rstrip()[:76]}", end="", file=sys.stderr, flush=True)
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not child.returncode:
        return
    said = log.read_text(encoding="utf-8", errors="replace")
    if os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    raise CheckFailed(
        f"{what}:\n" + "\n".join(said.splitlines()[-_TAIL:]),
        fix=f"correct overlay/csrc/dsa (whole output: {log}), or make the wheel with --no-kernels",
    )


def export(build: KernelBuild, path: Path) -> None:
    """Copy the library to ``path``.

    Raises:
        SeriesError: the place cannot be written.
    """
    try:
        write_atomic(path, build.library.read_bytes(), mode=0o755)
    except OSError as err:
        raise SeriesError(f"cannot write {path}: {err}", fix="name another place") from err
