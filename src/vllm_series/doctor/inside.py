"""Runs on the Python that is asked, with what is installed there; prints one JSON object.

Each question is answered by itself: what cannot be answered is a reason in words.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from typing import Any

UPSTREAM = "upstream's vLLM, without this series"


def torch_of() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a torch that does not load says why in many ways
        return {"error": f"{type(error).__name__}: {error}"}
    cards = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            cards.append({"name": torch.cuda.get_device_name(number), "capability": f"{major}.{minor}"})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "cards": cards}


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def deepgemm() -> dict[str, Any]:
    """Where DeepGEMM would come from; it is found, not imported."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            found = importlib.util.find_spec(name)
        except Exception as error:  # importing the parent package may fail
            return {"error": f"{type(error).__name__}: {error}"}
        if found is not None:
            return {"module": name}
    return {"error": "not installed"}


def plugins() -> list[dict[str, str]]:
    """Installed packages that require vllm, with what they require."""
    rows = []
    for one in importlib.metadata.distributions():
        try:
            wanted = one.requires or []
        except Exception:  # an installer that was interrupted left no metadata
            continue
        for requirement in wanted:
            name = requirement.split(";")[0].strip()
            rest = name[4:].lstrip()
            if name.lower().startswith("vllm") and (not rest or rest[0] in "=<>!~("):
                rows.append({"name": str(one.metadata["Name"]), "requires": name})
    return rows


def dsa() -> dict[str, Any]:
    try:
        return dict(importlib.import_module("vllm.dsa").info())
    except ModuleNotFoundError as error:
        return {"error": UPSTREAM if error.name == "vllm.dsa" else str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    said: dict[str, Any] = {"python": platform.python_version(), "torch": torch_of(), "driver": driver()}
    said["plugins"] = plugins()
    if importlib.util.find_spec("vllm") is not None:
        said |= {"deepgemm": deepgemm(), "dsa": dsa()}
    print("RESULT " + json.dumps(said))


if __name__ == "__main__":
    main()
