"""What two runs must have in common to be compared: the machine, the interpreter, the packages, the
settings."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ASK = """
import importlib.metadata as m, json, platform, sys
def v(n):
    try: return m.version(n)
    except m.PackageNotFoundError: return None
gpu = None
import torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    gpu = {"name": p.name, "count": torch.cuda.device_count(), "capability": f"{p.major}.{p.minor}"}
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "gpu": gpu,
    **{n: v(n) for n in ("triton", "transformers", "numpy", "pytest")}}))
"""


def cpu_model() -> str:
    """The processor's name as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The hardware and the kernel's kind."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(pages * size / 2**30),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def packages(python: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Versions inside the torch environment, and the GPU that torch sees there."""
    done = subprocess.run(
        [str(python), "-c", _ASK], env=dict(env), capture_output=True, text=True, check=True, cwd="/"
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what differs, one ``key: a / b`` each; empty when the runs may be compared."""
    keys = sorted({*one, *other})
    return [f"{key}: {one.get(key)} / {other.get(key)}" for key in keys if one.get(key) != other.get(key)]
