"""`vllm.dsa.kernels` without torch: the real library, and every way in which a library can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_series.kernels import KernelBuild

ROOT = Path(__file__).resolve().parents[2]
REPORT = """
import json, sys
from vllm.dsa import kernels
status = kernels.status()
found = kernels.load()
assert found is kernels.load(), "loaded once"
print(json.dumps({
    "status": status,
    "capabilities": getattr(found, "capabilities", None),
    "why_not": [kernels.why_not(c) for c in ((9, 0), (10, 0), (10, 3), (8, 0))],
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A ``vllm`` package that holds the overlay only; its library is put there by the test."""
    shutil.copytree(
        ROOT / "overlay" / "vllm", tmp_path / "vllm", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def ask(tree: Path, code: str = REPORT) -> Any:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    env |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_library(tree: Path, source: str) -> None:
    code = tree / "other.cpp"
    code.write_text(source)
    library = tree / "vllm" / "_dsa_C.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", library, code], check=True, env={"PATH": os.defpath + ":/usr/bin"}
    )


def test_the_built_library_is_loaded(built: KernelBuild, tree: Path) -> None:
    shutil.copy2(built.library, tree / "vllm" / "_dsa_C.so")
    said = ask(tree)
    assert said["status"] == {
        "loaded": True,
        "reason": "",
        "path": str(tree / "vllm" / "_dsa_C.so"),
        "build": "abi=1;cuda=13.0;arch=sm_90a,sm_100a",
    }
    assert said["capabilities"] == [[9, 0], [10, 0]]
    assert said["why_not"][:2] == ["", ""]
    assert said["why_not"][2] == "the kernels are built for compute capability 9.0, 10.0, this card has 10.3"
    assert "this card has 8.0" in said["why_not"][3]
    assert said["torch"] is False


def test_functions_have_prototypes_and_texts(built: KernelBuild, tree: Path) -> None:
    shutil.copy2(built.library, tree / "vllm" / "_dsa_C.so")
    code = """
import ctypes, json
from vllm.dsa import kernels
lib = kernels.load()
p, i32, i64 = kernels.POINTER, kernels.INT32, kernels.INT64
compare = lib.function("dsa_topk_compare", p, i64, p, i64, p, i64, i32, p)
said = [compare(1, 0, 1, 0, 1, rows, k, 1, None) for rows, k in ((1 << 40, 8), (1, 4096), (0, 8))]
assert compare is lib.function("dsa_topk_compare")
for call in (lambda: lib.function("dsa_nothing"), lambda: compare(1.5, 0, 1, 0, 1, 0, 8, 1, None)):
    try:
        call()
    except (kernels.KernelError, ctypes.ArgumentError) as error:
        said.append(str(error))
print(json.dumps([*said, lib.error_string(-1)]))
"""
    big, wide, none, missing, wrong, text = ask(tree, code)
    assert (big, wide, none) == (-1, -1, 0)
    assert missing == "_dsa_C.so has no function dsa_nothing"
    assert "argument 1" in wrong
    assert text == "invalid argument"


WRONG = {
    "missing": (None, "this build has no kernels (_dsa_C.so is missing)"),
    "garbage": (b"not a library", "_dsa_C.so cannot be loaded: "),
    "truncated": (5000, "_dsa_C.so cannot be loaded: "),
    "foreign": ('extern "C" int f() { return 1; }', "_dsa_C.so is not a kernel library of this project: "),
    "other version": (
        'extern "C" int dsa_abi_version() { return 99; }',
        "_dsa_C.so is of another build: its ABI version is 99, not 1",
    ),
    "half": (
        'extern "C" int dsa_abi_version() { return 1; }',
        "_dsa_C.so is not a kernel library of this project: ",
    ),
    "unresolved": (
        'extern "C" int not_there(); extern "C" int dsa_abi_version() { return not_there(); }\n'
        "int now = not_there();",
        "_dsa_C.so cannot be loaded: ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_library_is_a_reason(name: str, built: KernelBuild, tree: Path) -> None:
    what, reason = WRONG[name]
    if isinstance(what, str):
        make_library(tree, what)
    elif isinstance(what, int):
        (tree / "vllm" / "_dsa_C.so").write_bytes(built.library.read_bytes()[:what])
    elif what is not None:
        (tree / "vllm" / "_dsa_C.so").write_bytes(what)
    said = ask(tree)
    assert said["status"]["loaded"] is False
    assert said["status"]["reason"].startswith(reason)
    assert said["why_not"] == [said["status"]["reason"]] * 4
    assert said["capabilities"] is None and said["torch"] is False
