"""The GPU of this machine and the interpreter with vLLM that can use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.errors import UsageError

_ASK = """
import importlib.metadata as m, importlib.util as u, json
out = {"torch": None, "gpu": None, "vllm": None, "why": ""}
try:
    import torch
    out["torch"] = torch.__version__
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name(0)
except Exception as error:
    out["why"] = f"{type(error).__name__}: {error}"
try:
    if u.find_spec("vllm"):
        out["vllm"] = m.version("vllm")
except m.PackageNotFoundError:
    out["vllm"] = "unknown"
print("series:" + json.dumps(out))
"""


@dataclass(frozen=True)
class Machine:
    """An interpreter that sees a GPU and has a vLLM of the line."""

    python: Path
    gpu: str
    vllm: str


def find_python(given: str | None) -> Path:
    """Return the interpreter that was named (option or ``PYTHON``), else the first ``python3`` on PATH.

    The tool's own environment is no candidate.

    Raises:
        UsageError: there is none.
    """
    named = given or os.environ.get("PYTHON")
    if named:
        found = shutil.which(named)
        if found is None:
            raise UsageError(f"{named} is no program", fix="give --python the interpreter that has vLLM")
        return Path(found)
    for folder in os.get_exec_path():
        candidate = Path(folder) / "python3"
        if os.access(candidate, os.X_OK) and candidate.parent != Path(sys.prefix) / "bin":
            return candidate
    raise UsageError("no python3 on PATH", fix="give --python the interpreter that has vLLM")


def _ask(python: Path) -> dict[str, Any]:
    done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=False, cwd="/")
    answers = [row for row in done.stdout.splitlines() if row.startswith("series:")]
    if not answers:
        raise UsageError(
            f"{python} does not run: {done.stderr.strip()[-300:]}",
            fix="give --python an interpreter with vLLM",
        )
    found: dict[str, Any] = json.loads(answers[-1].removeprefix("series:"))
    return found


def line_of(python: Path, lines: Sequence[str]) -> str:
    """Return the line of the vLLM that is installed, the first of ``lines`` if it is none of them."""
    base = str(_ask(python)["vllm"]).partition("+")[0]
    return base if base in lines else lines[0]


def require(python: Path, line: str) -> Machine:
    """Return what this machine has, or say what it lacks.

    Raises:
        UsageError: no GPU answers, or the interpreter has no torch or no vLLM of the line.
    """
    kit = f"or make a kit for a machine that has one: series baseline gpu-kit {line}"
    said = _ask(python)
    if not said["torch"]:
        raise UsageError(
            f"{python} has no torch ({said['why']}), so no GPU can be used from it",
            fix=f"give --python the interpreter in which vLLM {line} is installed, {kit}",
        )
    if not said["gpu"]:
        raise UsageError(
            f"no NVIDIA GPU answers torch {said['torch']} of {python} on this machine",
            fix=f"run it on a machine with a card, {kit}",
        )
    version = said["vllm"]
    if version is None or (version != "unknown" and version.partition("+")[0] != line):
        has = "no vLLM" if version is None else f"vLLM {version}"
        raise UsageError(
            f"{python} has {has}, and these are tests of {line}",
            fix=f"{python} -m pip install vllm=={line} (or the wheel in dist/), or give --python another one",
        )
    return Machine(python, said["gpu"], version)
