"""Finds the vLLM that a Python has, without importing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_series.errors import UsageError

PROBE = """
import importlib.metadata, json, pathlib, sys
said = {"python": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix}
try:
    found = importlib.metadata.distribution("vllm")
except importlib.metadata.PackageNotFoundError:
    found = None
if found is not None:
    try:
        direct = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        direct = {}
    try:
        version = found.version
    except Exception:
        version = None
    said["vllm"] = {
        "version": version or "",
        "site": str(pathlib.Path(str(found.locate_file(""))).resolve()),
        "dist_info": str(pathlib.Path(found._path).resolve()) if hasattr(found, "_path") else "",
        "editable": bool(direct.get("dir_info", {}).get("editable")),
    }
print("RESULT " + json.dumps(said))
"""


@dataclass(frozen=True)
class Installed:
    """An installed vLLM: its version, site-packages, ``.dist-info`` folder, and whether it is editable.

    ``version`` is that of the folder's name where an installer that was interrupted left no METADATA.
    """

    version: str
    site: Path
    dist_info: Path
    editable: bool = False

    @property
    def upstream(self) -> str:
        """The version without a local part, such as ``0.33.0`` of ``0.33.0+dsa.1``."""
        try:
            return Version(self.version).public
        except InvalidVersion:
            return self.version

    @property
    def ours(self) -> bool:
        """Whether the wheel itself is one of this project."""
        return "+dsa." in self.version


@dataclass(frozen=True)
class Environment:
    """A Python and the vLLM in it, if any."""

    python: Path
    version: str
    vllm: Installed | None


def default_python(given: Path | None) -> Path:
    """Return the absolute path of the given Python, else of that of the active environment.

    Raises:
        UsageError: none is given or active, or it is the tool's own.
    """
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    python = given or (Path(active) / "bin" / "python" if active else None)
    fix = "activate the environment that has vLLM, or pass --python /path/to/its/bin/python"
    if python is None:
        raise UsageError("no environment is named", fix=fix)
    if not python.is_file() or not os.access(python, os.X_OK):
        raise UsageError(f"{python} is no Python", fix=fix)
    if python.absolute().parent == Path(sys.executable).absolute().parent:
        raise UsageError(f"{python} is the environment of this tool, which has no vLLM", fix=fix)
    return (
        python.absolute()
    )  # it is run in other folders; a link to it must stay one, or its environment is lost


def look(python: Path) -> Environment:
    """Ask ``python`` which vLLM it has; imports nothing of it.

    Raises:
        UsageError: it is no working Python.
    """
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-I", "-c", PROBE], capture_output=True, text=True, env=settings, check=False
    )
    answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not answers:
        raise UsageError(f"{python} does not run: {done.stderr.strip()[-300:]}", fix="pass another --python")
    said = json.loads(answers[-1])
    row = said.get("vllm")
    vllm = None
    if row:
        place = Path(row["dist_info"])
        version = row["version"] or place.name.removesuffix(".dist-info").partition("-")[2]
        vllm = Installed(version or "of an unknown version", Path(row["site"]), place, row["editable"])
    return Environment(python, said["python"], vllm)
