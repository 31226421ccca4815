# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``litetopk``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.dsa import kernels
from vllm.dsa.features import Feature, State, Status
from vllm.dsa.litetopk import controls, eligible, kernel

#: The two files that the patch of each line hooks into.
_VLLM = Path(__file__).parents[2]
_HOOKED_FILES = (
    _VLLM / "model_executor" / "layers" / "sparse_attn_indexer.py",
    _VLLM / "v1" / "attention" / "backends" / "mla" / "indexer.py",
)


def hooked(files: tuple[Path, ...] = _HOOKED_FILES) -> bool:
    """Whether this build's patches call the feature."""
    return all(file.is_file() and "vllm.dsa.litetopk" in file.read_text(encoding="utf-8") for file in files)


def probe(config: Any | None) -> Status:
    """Judge line, switch, card, kernels and configuration; sizes and the self-check are known at run time."""
    if not hooked():
        return Status(State.UNAVAILABLE, "this line does not call it")
    if not controls.read().on:
        return Status(State.OFF, f"{controls.MAIN}=0")
    if config is not None:
        reason = eligible.why_not(config)
        if reason:
            return Status(State.DECLINED, reason)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return Status(State.DECLINED, "needs an NVIDIA GPU")
    found = current_platform.get_device_capability()
    capability = (found.major, found.minor) if found is not None else (0, 0)
    if capability != kernel.CAPABILITY:
        return Status(State.DECLINED, kernel.wrong_card(capability))
    missing = kernels.why_not(capability)
    if missing:
        return Status(State.UNAVAILABLE, missing)
    return Status(State.ACTIVE, "at the sizes of its table")


FEATURE = Feature("litetopk", "indexer scoring and top-k in one kernel", controls.ALL, probe)
