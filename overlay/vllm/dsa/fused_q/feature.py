# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``fused_q``: query packing in blocks of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.dsa import switches
from vllm.dsa.features import Feature, State, Status

SWITCH = "VLLM_DSA_FUSED_Q"

#: Where the patch of line 0.33.0 calls `vllm.dsa.fused_q.launch.try_launch`.
_HOOKED_FILE = Path(__file__).parents[2] / "models" / "deepseek_v32" / "common" / "kernels.py"


def hooked(file: Path = _HOOKED_FILE) -> bool:
    """Whether this build's patches call the feature: all lines carry its files, not all its hook."""
    return file.is_file() and "vllm.dsa.fused_q" in file.read_text(encoding="utf-8")


def probe(config: Any | None) -> Status:
    """Judge line, switch and card. Whether a layer's shapes fit is only known when it runs."""
    if not hooked():
        return Status(State.UNAVAILABLE, "this line does not call it")
    if switches.get(SWITCH) == "off":
        return Status(State.OFF, f"{SWITCH}=off")
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return Status(State.DECLINED, "needs an NVIDIA GPU")
    return Status(State.ACTIVE, "where upstream would run its Triton kernel")


FEATURE = Feature("fused_q", "query packing at prefill", (SWITCH,), probe)
