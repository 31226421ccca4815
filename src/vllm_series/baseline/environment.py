"""Environment variables of a test run: nothing of the user's, no network, no GPU unless asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_KEEP = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "CC",
    "CXX",
)

#: The CUDA driver's entry points that vLLM's compiled parts link to. Each answers CUDA_ERROR_STUB_LIBRARY:
#: the libraries load and register their operators' schemas, and no kernel can run.
_DRIVER = (
    "cuTensorMapEncodeTiled",
    "cuPointerGetAttribute",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuMemMap",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuGetProcAddress_v2",
    "cuGetErrorString",
    "cuDriverGetVersion",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceGetAttribute",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
)
_STUB_ERROR = 34


def driver_stub(folder: Path) -> Path | None:
    """Return a folder with a stand-in for ``libcuda.so.1``, or None when no C compiler is there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    target = folder / "libcuda.so.1"
    if target.exists():
        return folder
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return {_STUB_ERROR}; }}\n" for name in _DRIVER))
    fresh = folder / f"stub.{os.getpid()}.so"
    argv = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(fresh), str(source)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        return None
    fresh.replace(target)
    return folder


def run_env(
    site: Path, scratch: Path, mode_env: Mapping[str, str], *, stub: Path | None, gpu: bool
) -> dict[str, str]:
    """Return the whole environment of a run. Caches lie in ``scratch``, so runs do not feed each other."""
    env = {name: os.environ[name] for name in _KEEP if name in os.environ}
    home = scratch / "home"
    for folder in (home, scratch / "vllm-cache", scratch / "inductor", scratch / "triton"):
        folder.mkdir(parents=True, exist_ok=True)
    env.update(
        HOME=str(home),
        LANG="C.UTF-8",
        TZ="UTC",
        TERM="dumb",
        COLUMNS="120",
        PYTHONPATH=str(site),
        PYTHONHASHSEED="0",
        PYTHONFAULTHANDLER="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CACHE_ROOT=str(scratch / "vllm-cache"),
        TORCHINDUCTOR_CACHE_DIR=str(scratch / "inductor"),
        TRITON_CACHE_DIR=str(scratch / "triton"),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        OMP_NUM_THREADS="1",
    )
    if not gpu:
        env.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
        if stub is not None:
            env["SERIES_LOAD_OPS"] = "1"
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(stub), env.get("LD_LIBRARY_PATH", ""))))
    env.update(mode_env)
    return env
