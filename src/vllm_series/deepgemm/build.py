"""Builds the extension of a line's patched DeepGEMM with vLLM's own driver, ``tools/build_deepgemm_C.py``.

C++ alone: DeepGEMM compiles its CUDA kernels when they are first used. The driver needs a Python with a CUDA
build of the line's torch, a CUDA toolkit (``CUDA_HOME``) and a g++ with ``<format>`` (13 or newer).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_series import importer, lock, stack
from vllm_series.deepgemm import bundle, patchfile, source
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.lock_file import locked
from vllm_series.pins import Pin
from vllm_series.ui import say
from vllm_series.workspace import Workspace

DRIVER = "tools/build_deepgemm_C.py"
CMAKE = "cmake/external_projects/deepgemm.cmake"
_ABI3 = "_C_extension.abi3.so"  # in a driver that builds one extension for all Python versions

_ASK_TORCH = """
import json, torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}))
"""


def folder(ws: Workspace, line: str) -> Path:
    """Where a line's built files lie unless the caller names a folder."""
    return ws.work / "deepgemm" / line / "built"


def build(
    ws: Workspace,
    pin: Pin,
    *,
    given: Path | None,
    torch_python: Path,
    pythons: Sequence[Path],
    output: Path,
) -> dict[str, Any]:
    """Build into ``output`` and return its manifest (see `bundle.save`).

    Args:
        ws: the checkout.
        pin: of the line.
        given: a DeepGEMM source of the line's commit; None to clone it.
        torch_python: the Python whose torch the extension is compiled against.
        pythons: on a line with one extension per Python version, the interpreters to build for.
        output: replaced as a whole when the build succeeded.

    Raises:
        UsageError: what the build needs is missing.
        CheckFailed: the patch does not apply, or the compilation failed.
        FetchFailed: the source could not be fetched.
    """
    patch = patchfile.patch_of(ws, pin)
    facts = torch_facts(torch_python, pin)
    made = stack.current(ws, pin)
    lock.check(ws, made)
    git = importer.odb(ws)
    driver, cmake = (git.raw("show", f"{made.top}:{name}").decode() for name in (DRIVER, CMAKE))
    work = ws.work / "deepgemm" / pin.line
    with locked(work.parent / f".{pin.line}.lock"):
        tree = work / "src"
        if given is not None:
            source.copied(given, tree)
        else:
            source.copied(source.cloned(patch, source.submodules(cmake), work / "clone"), tree)
        patch.apply(tree)
        script, built = work / "build_deepgemm_C.py", work / "new"
        script.write_text(driver, encoding="utf-8")
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir(parents=True)
        targets = [[]] if _ABI3 in driver else [[os.fspath(python)] for python in pythons]
        if not targets:
            raise UsageError(
                f"line {pin.line} has one extension per Python version", fix="name them: --python PATH ..."
            )
        for extra in targets:
            _compile([os.fspath(torch_python), os.fspath(script), os.fspath(tree), os.fspath(built), *extra])
        record = bundle.save(built, pin.line, patch, facts)
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        built.rename(output)
    return record


def torch_facts(python: Path, pin: Pin) -> dict[str, str]:
    """Return torch's and CUDA's version in an interpreter.

    Raises:
        UsageError: it has no CUDA build of the line's torch.
    """
    done = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    wanted = f"pip install torch=={pin.torch} there, or name another Python with --torch-python"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"{python} has no usable torch: {last}", fix=wanted)
    facts: dict[str, str | None] = json.loads(done.stdout)
    version = str(facts["torch"])
    if version.split("+")[0].split(".")[:2] != pin.torch.split(".")[:2] or not facts["cuda"]:
        raise UsageError(
            f"{python} has torch {version}, line {pin.line} needs {pin.torch} for CUDA", fix=wanted
        )
    return {"torch": version, "cuda": str(facts["cuda"])}


def _compile(argv: list[str]) -> None:
    say(f"compiling: {' '.join(argv[1:])}")
    try:
        code = subprocess.run(argv, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be run: {error.strerror}", fix="name a Python") from error
    if code:
        raise CheckFailed(
            f"DeepGEMM's extension did not compile (exit code {code}, output above)",
            fix="it needs g++ 13 or newer (CXX), a CUDA toolkit (CUDA_HOME) and libdw-dev; then run again",
        )
