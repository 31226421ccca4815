"""Runs uv: scratch environments and installs into them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.workspace import Workspace


@dataclass(frozen=True)
class Interpreter:
    """A Python that is installed on this machine."""

    version: Version
    path: Path


def find_uv(ws: Workspace) -> Path:
    """Return uv: ``VLLM_SERIES_UV``, the one that the bootstrap fetched, or the one on PATH.

    Raises:
        UsageError: there is none.
    """
    named = os.environ.get("VLLM_SERIES_UV")
    if named and Path(named).is_file():
        return Path(named)
    fetched = sorted((ws.root / ".tools").glob("uv-*/uv"))
    found = fetched[-1] if fetched else shutil.which("uv")
    if not found:
        raise UsageError("uv is not there", fix="run scripts/build.sh, which fetches it")
    return Path(found)


@dataclass(frozen=True)
class Uv:
    """uv with a cache of its own or the user's."""

    path: Path
    cache: Path | None = None

    def run(self, *args: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run uv and return its stdout.

        Raises:
            CheckFailed: it failed; its message is kept.
        """
        settings = {
            k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
        }
        settings["UV_PYTHON_DOWNLOADS"] = "never"
        if self.cache:
            settings["UV_CACHE_DIR"] = str(self.cache)
        settings.update(env or {})
        done = subprocess.run([self.path, *args], capture_output=True, text=True, env=settings, check=False)
        if done.returncode:
            words = " ".join(str(arg) for arg in args[:2])
            raise CheckFailed(f"uv {words} failed: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def interpreters(self, wanted: SpecifierSet) -> list[Interpreter]:
        """Return the installed CPythons that ``wanted`` allows: one a minor version, this one first."""
        # pyenv puts stubs on PATH that fail for versions that are not selected: show uv the real ones.
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        folders = [str(folder) for folder in sorted(pyenv.glob("versions/3.*/bin"))]
        folders += [one for one in os.get_exec_path() if Path(one) != pyenv / "shims"]
        env = {"PATH": os.pathsep.join(folders)}
        text = self.run("python", "list", "--only-installed", "--output-format", "json", env=env)
        found: dict[tuple[int, ...], Interpreter] = {}
        running = Interpreter(Version(".".join(map(str, sys.version_info[:3]))), Path(sys.executable))
        others = [
            Interpreter(Version(row["version"]), Path(row["path"]))
            for row in json.loads(text)
            if row.get("implementation") == "cpython" and row.get("variant", "default") == "default"
        ]
        for one in [running, *sorted(others, key=lambda one: one.version, reverse=True)]:
            if one.version in wanted and not one.version.is_prerelease:
                found.setdefault(one.version.release[:2], one)
        return list(found.values())

    def venv(self, folder: Path, python: Path) -> Path:
        """Make an environment in ``folder`` and return its interpreter."""
        self.run("venv", "--quiet", "--clear", "--no-project", "--python", python, folder)
        return folder / "bin" / "python"

    def install(self, python: Path, *args: str | Path) -> None:
        self.run("pip", "install", "--quiet", "--python", python, *args)
