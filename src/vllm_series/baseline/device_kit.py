"""Makes the folder that ``device.py`` needs on a GPU machine without network."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import vllm_series
from vllm_series.baseline.device import KERNELS
from vllm_series.baseline.gpu_plan import GpuFile
from vllm_series.baseline.modes import Mode
from vllm_series.envs import find_uv
from vllm_series.errors import FetchFailed, UsageError
from vllm_series.git import Git
from vllm_series.runtime import Site
from vllm_series.workspace import Workspace

#: Pure Python, so they run on the machine's own interpreter whatever its version.
PACKAGES = ("pytest", "pytest-asyncio", "pytest-reportlog", "pytest-timeout", "tblib", "py")


def make_kit(
    ws: Workspace,
    line: str,
    git: Git,
    sites: tuple[Site, Site],
    files: Sequence[GpuFile],
    modes: Sequence[Mode],
    kernels: Path | None,
    out: Path,
) -> Path:
    """Write the kit into ``out``: tests, what the patched tree changes, pytest, this project's runner, a
    plan.

    Args:
        ws: the checkout.
        line: the line.
        git: the object store that holds both trees.
        sites: the pristine and the patched site.
        files: test files to run, in the order in which they are started.
        modes: modes to run; ``upstream`` is added if it is not there.
        kernels: the compiled ``_dsa_C.so``, or None to run without it.
        out: a folder that does not exist or is an older kit.
    """
    if out.exists() and not (out / "plan.json").is_file() and any(out.iterdir()):
        raise UsageError(f"{out} holds other files", fix="give --out a new folder")
    shutil.rmtree(out, ignore_errors=True)
    pristine, patched = sites
    shutil.copytree(pristine.path / "tests", out / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(pristine.path / "pyproject.toml", out / "pyproject.toml")
    removed: dict[str, list[str]] = {"patched": [], "pristine": []}
    for name, status in git.changed(pristine.tree, patched.tree).items():
        if not name.startswith(("vllm/", "tests/")):
            continue
        for side, site, absent in (("patched", patched, "D"), ("pristine", pristine, "A")):
            if status == absent:
                removed[side].append(name)
                continue
            target = out / side / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(site.path / name, target)
    if kernels is not None:
        shutil.copy2(kernels, out / "patched" / KERNELS)
    (out / "removed.json").write_text(json.dumps(removed))
    _packages(ws, out / "packages")
    source = Path(vllm_series.__file__).parent
    keep = out / "packages" / "vllm_series"
    shutil.copytree(source / "baseline", keep / "baseline", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy2(source / name, keep / name)
    every = ["upstream", *(mode.name for mode in modes if mode.patched and not mode.feature)]
    plan = {
        "line": line,
        "files": [{**one.as_dict(), "modes": [*every, *one.features]} for one in files],
        "modes": {"upstream": {}, **{mode.name: mode.env for mode in modes if mode.patched}},
        "trees": {"upstream": pristine.tree, **{mode.name: patched.tree for mode in modes if mode.patched}},
    }
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    return out


def _packages(ws: Workspace, target: Path) -> None:
    argv = [
        str(find_uv(ws)),
        "pip",
        "install",
        "--quiet",
        "--python-version",
        "3.12",
        "--target",
        str(target),
    ]
    done = subprocess.run([*argv, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchFailed(
            f"cannot install pytest for the kit: {done.stderr.strip()}", fix="check the network"
        )
