"""Gets a DeepGEMM source into a work folder: a copy of the user's, or a clone of the pinned commit."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from vllm_series.deepgemm.patchfile import DeepGemmPatch
from vllm_series.errors import CheckFailed, FetchFailed, UsageError
from vllm_series.git import clean_env, require_git
from vllm_series.ui import say

#: What the build needs of a source, told before minutes of compilation.
NEEDED = ("csrc/python_api.cpp", "csrc/apis/attention.hpp", "third-party/cutlass/include")
_SUBMODULES = re.compile(r"GIT_SUBMODULES((?:\s+\"[^\"]+\")+)")


def submodules(cmake: str) -> list[str]:
    """Return the submodules that vLLM's ``deepgemm.cmake`` fetches."""
    found = _SUBMODULES.search(cmake)
    return re.findall(r'"([^"]+)"', found[1]) if found else []


def copied(source: Path, target: Path) -> Path:
    """Copy a source of the user's, which is never changed, without its history.

    Raises:
        UsageError: it is no DeepGEMM source, or its submodules were not fetched.
    """
    missing = [name for name in NEEDED if not (source / name).exists()]
    if missing:
        raise UsageError(
            f"{source} is not a whole DeepGEMM source: {', '.join(missing)} is missing",
            fix=f"git -C {source} submodule update --init --recursive, or name another folder with --source",
        )
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", "build", "*.so", "__pycache__"))
    return target


def cloned(patch: DeepGemmPatch, modules: list[str], target: Path) -> Path:
    """Clone the commit of a patch with the submodules of the build; one that is there already is kept.

    Raises:
        FetchFailed: git could not get it.
    """
    if all((target / name).exists() for name in NEEDED) and _git(target, "rev-parse", "HEAD") == patch.id:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    say(f"fetching {patch.what} {patch.id[:12]}")
    try:
        _git(target, "init", "-q")
        _git(target, "fetch", "-q", "--depth", "1", patch.what, patch.id)
        _git(target, "checkout", "-q", "FETCH_HEAD")
        if modules:
            _git(target, "submodule", "-q", "update", "--init", "--depth", "1", "--", *modules)
    except CheckFailed as error:
        raise FetchFailed(
            f"{patch.what} {patch.id[:12]} cannot be fetched: {error.message}",
            fix="name a folder that has it: --source DIR, or DEEPGEMM_SRC_DIR in the environment",
        ) from error
    return target


def _git(folder: Path, *argv: str) -> str:
    env = clean_env({"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)})
    done = subprocess.run(
        [require_git(), *argv], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckFailed(done.stderr.strip() or f"git {argv[0]} failed ({done.returncode})")
    return done.stdout.strip()
