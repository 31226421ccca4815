"""The reference extension: DeepGEMM as the package index has it, patched and compiled for the tests.

The pins of the lines are in no package index. ``deepinfer-gemm`` is DeepGEMM 2.8.2 with its headers, with a
pybind11 module instead of the stable ABI of line 0.33.0. Its patch is the third in ``patches/deepgemm``; what
it gives is tested here and on a card, and never goes into a wheel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from vllm_series.deepgemm import patchfile
from vllm_series.errors import CheckFailed
from vllm_series.fetch import fetch
from vllm_series.files import sha256_of
from vllm_series.kernels import toolchain
from vllm_series.lock_file import locked
from vllm_series.pins import Artifact
from vllm_series.sdist import members
from vllm_series.ui import say
from vllm_series.workspace import Workspace

SIZE = 2613691  # bytes of the source archive
COMPAT = Path(__file__).parent / "compat"

#: What setup.py of the source puts beside DeepGEMM's own headers for its run-time compiler.
_JIT_HEADERS = ("cute", "cutlass")
_ASK_TORCH = """
import json, pathlib, torch
print(json.dumps({"torch": torch.__version__, "site": str(pathlib.Path(torch.__file__).parents[1])}))
"""
_ASK_PYTHON = """
import json, sysconfig
print(json.dumps({name: sysconfig.get_config_var(name) for name in ("INCLUDEPY", "EXT_SUFFIX")}))
"""


def build(ws: Workspace, torch_python: Path, python: Path | None = None, *, optimise: str = "-O0") -> Path:
    """Return a folder with an importable package ``deep_gemm``, built once and kept in the cache.

    Args:
        ws: the checkout.
        torch_python: an interpreter with a CUDA build of torch and the headers of its CUDA packages.
        python: the interpreter that will import it (default: the same).
        optimise: g++'s level. Host code alone: the kernels are compiled when they run.

    Raises:
        CheckFailed: the patch does not apply, or the compilation failed.
        FetchFailed: the source or the CUDA headers could not be fetched.
    """
    patch = patchfile.reference(ws)
    about = {**_ask(torch_python, _ASK_TORCH), **_ask(python or torch_python, _ASK_PYTHON)}
    compat = {str(file): file.read_bytes() for file in sorted(COMPAT.rglob("*")) if file.is_file()}
    inputs = [patch.digest, about["torch"], about["EXT_SUFFIX"], optimise, Path(__file__).read_text()]
    key = sha256_of("\0".join([*inputs, *map(sha256_of, compat.values())]).encode())[:16]
    done = ws.cache / "deepgemm" / f"reference-{key}"
    with locked(done.parent / f".{done.name}.lock"):
        if not (done / "complete").is_file():
            shutil.rmtree(done, ignore_errors=True)
            _build(ws, patch, about, done, optimise)
            (done / "complete").touch()
    return done


def unpack(ws: Workspace, folder: Path) -> patchfile.DeepGemmPatch:
    """Fetch the source archive, check it and unpack it into ``folder``; returns the patch it belongs to."""
    patch = patchfile.reference(ws)
    name = f"{patch.what.replace('-', '_')}-{patch.id}.tar.gz"
    for member in members(fetch(ws, Artifact(name, patch.sha256, SIZE, patch.what))):
        if member.mode == "120000":
            raise CheckFailed(f"{name} has a link, {member.path}", fix="look at what the index serves")
        target = folder / member.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.data)
    return patch


def _build(
    ws: Workspace, patch: patchfile.DeepGemmPatch, about: dict[str, str], done: Path, optimise: str
) -> None:
    source = done / "source"
    unpack(ws, source)
    patch.apply(source)
    cuda = toolchain.pinned(ws).nvcc.parents[1]
    torch, packages = Path(about["site"]) / "torch", Path(about["site"]) / "nvidia" / "cu13"
    includes = [
        COMPAT,
        Path(about["INCLUDEPY"]),
        torch / "include",
        torch / "include/torch/csrc/api/include",
        packages / "include",
        cuda / "include",
        cuda / "include/cccl",
        *(source / name for name in ("csrc", "deep_gemm/include", "third-party/deep_jit/include")),
        source / "third-party/cutlass/include",
    ]
    library = source / "deep_gemm" / f"_C{about['EXT_SUFFIX']}"
    libraries = ("torch", "torch_python", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
    argv = [
        "g++", "-shared", "-fPIC", "-std=c++20", optimise, "-w", "-DFMT_HEADER_ONLY=1",
        "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C",
        *(f"-I{folder}" for folder in includes), "csrc/python_api.cpp",
        f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries), "-o", str(library),
    ]  # fmt: skip
    say(f"compiling {patch.what} {patch.id} for torch {about['torch']} (a minute of processor time)")
    run = subprocess.run(argv, cwd=source, capture_output=True, text=True, check=False)
    if run.returncode:
        tail = "\n".join([line for line in run.stderr.splitlines() if "error" in line][:12])
        raise CheckFailed(f"the reference DeepGEMM did not compile:\n{tail}", fix="look at its patch")
    for name in _JIT_HEADERS:
        shutil.move(source / "third-party/cutlass/include" / name, source / "deep_gemm/include" / name)
    shutil.move(source / "deep_gemm", done / "deep_gemm")
    shutil.rmtree(source)


def _ask(python: Path, script: str) -> dict[str, str]:
    run = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckFailed(f"{python}: {last}", fix="name a Python that has torch")
    found: dict[str, str] = json.loads(run.stdout)
    return found
