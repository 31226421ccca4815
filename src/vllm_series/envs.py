"""Python environment with torch in which a line's tests run: made once, kept in the cache, found by digest.

The exact versions are in ``pins/<line>.cpu.lock``, so two machines and two days run the same code. The lock
is made from upstream's own ``requirements/common.txt``, the pin's torch and the pytest plugins, and dated by
upstream's release: newer packages break older releases. vLLM itself is not in the environment; a *site*
folder (see ``runtime.py``) goes in front by ``PYTHONPATH``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_series.errors import FetchFailed, UsageError
from vllm_series.workspace import Workspace

#: What the runs need beside upstream's own requirements. tblib and pytest-asyncio are imported by upstream's
#: conftest; setuptools is what triton imports; the rest is ours.
TEST_TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-forked",
    "pytest-reportlog",
    "pytest-timeout",
    "setuptools<81",
    "tblib",
)


#: What a CPU build of torch has no use for.
_CUDA_PACKAGES = re.compile(r"(torch|torchvision|nvidia-[\w-]+|cuda-[\w-]+)==")


def lock_file(ws: Workspace, line: str) -> Path:
    """The pinned requirements of a line's CPU environment."""
    return ws.pins / f"{line}.cpu.lock"


def find_uv(ws: Workspace) -> Path:
    """Return the uv that the scripts made (``VLLM_SERIES_UV``, ``.tools/``) or the one on ``PATH``.

    Raises:
        UsageError: there is none.
    """
    named = os.environ.get("VLLM_SERIES_UV")
    candidates = [Path(named)] if named else []
    candidates += sorted((ws.root / ".tools").glob("uv-*/uv"), reverse=True)
    found = shutil.which("uv")
    candidates += [Path(found)] if found else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UsageError(
        "no uv found: it installs the test environment", fix="run through scripts/, or pip install uv"
    )


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock: two checkouts that share the cache make an environment once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(*argv: str) -> str:
    """Run an installer without the caller's Python environment; returns its output."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    env.update(UV_PYTHON_DOWNLOADS="never", PIP_DISABLE_PIP_VERSION_CHECK="1")
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise FetchFailed(
            f"`{Path(argv[0]).name} {' '.join(argv[1:4])}` failed with {done.returncode}:\n{tail}",
            fix="mend what it names (network, index, up to 8 GB of disk) and run again",
        )
    return done.stdout


def env_digest(ws: Workspace, line: str) -> str:
    """Digest of everything the environment depends on: the lock, the interpreter, the machine."""
    path = lock_file(ws, line)
    if not path.is_file():
        raise UsageError(
            f"{path.name} is missing from pins/: no versions to install for {line}",
            fix=f"series baseline env {line} --relock YYYY-MM-DD   (the day of upstream's release)",
        )
    pinned = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    text = f"{pinned}\n{sys.version}\n{platform.machine()}\n{Path(sys.base_prefix).resolve()}"
    return hashlib.sha256(text.encode()).hexdigest()


def torch_env(ws: Workspace, line: str) -> Path:
    """Return the Python of the line's torch environment, making it when it is not in the cache.

    torch comes by pip, which also takes a CPU build that a machine offers beside the index; the rest by uv.
    A CPU build of torch gets neither the CUDA libraries nor torchvision (whose build on the index needs
    them). Safe to interrupt and to call from several processes: a half-made environment has no ``complete``
    mark and is made anew. 3 to 8 GB and 1.5 to 4 minutes the first time.

    Raises:
        UsageError: no lock file for the line, or no uv.
        FetchFailed: pip or uv could not install it.
    """
    root = ws.cache / "envs" / f"{line}-{env_digest(ws, line)[:16]}"
    python, mark = root / "bin" / "python", root / "complete"
    if mark.exists() and python.exists():
        return python
    with exclusive(root.with_name(root.name + ".lock")):
        if mark.exists() and python.exists():  # made by the run that we waited for
            return python
        print(f"making the torch environment of {line} in {root} (some minutes)", file=sys.stderr, flush=True)
        shutil.rmtree(root, ignore_errors=True)
        uv, lock = str(find_uv(ws)), lock_file(ws, line)
        _run(uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(root))
        rows = [row for row in lock.read_text().splitlines() if row and not row.startswith("#")]
        torch = next(row for row in rows if row.startswith("torch=="))
        pinned = root / "constraints.txt"
        pinned.write_text("\n".join(rows) + "\n")
        _run(str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pinned), torch)
        built = _run(str(python), "-c", "import torch; print(torch.version.cuda)").strip()
        beside = _CUDA_PACKAGES if built == "None" else re.compile("torch==")
        rest = root / "rest.txt"
        rest.write_text("\n".join(row for row in rows if not beside.match(row)) + "\n")
        _run(uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), "-r", str(rest))
        mark.touch()
    return python


def common_requirements(sdist: Path) -> str:
    """Upstream's ``requirements/common.txt`` plus its numba pin, read from the sdist."""
    wanted: list[str] = []
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if name not in ("requirements/common.txt", "requirements/cuda.txt"):
                continue
            handle = archive.extractfile(member)
            text = handle.read().decode() if handle else ""
            wanted += (
                text.splitlines() if name.endswith("common.txt") else re.findall(r"^numba.*$", text, re.M)
            )
    if not wanted:
        raise UsageError(f"{sdist.name} has no requirements/common.txt", fix="check the pin's sdist")
    return "\n".join(wanted) + "\n"


def relock(ws: Workspace, line: str, sdist: Path, before: str) -> Path:
    """Write ``pins/<line>.cpu.lock`` from upstream's requirements, as packages stood on the day ``before``.

    ``before`` is an ISO date a few days after upstream's release.
    """
    pin = tomllib.loads((ws.pins / f"{line}.toml").read_text())
    scratch = ws.work / "relock"
    scratch.mkdir(parents=True, exist_ok=True)
    source = scratch / f"{line}.in"
    tools = "\n".join((f"torch~={pin['torch']['version']}", "torchvision", *TEST_TOOLS))
    source.write_text(common_requirements(sdist) + tools + "\n")
    resolved = scratch / f"{line}.out"
    _run(
        str(find_uv(ws)), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
        "--universal", "--python-version", "3.11",
        "--exclude-newer", before, "-o", str(resolved), str(source),
    )  # fmt: skip
    head = (
        f"# Environment that runs upstream's tests and the overlay's tests for line {line} without a GPU.\n"
        f"# Written by `series baseline env {line} --relock`: upstream's requirements/common.txt,\n"
        f"# torch of the pin, the pytest plugins; resolved as of {before}. Any Python from 3.11 on Linux.\n"
    )
    target = lock_file(ws, line)
    fresh = target.with_suffix(".new")
    fresh.write_text(head + resolved.read_text())
    fresh.replace(target)
    return target
