# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``fused_q``: query packing in blocks of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.dsa import switches
from vllm.dsa.features import Feature, State, Status

SWITCH = "VLLM_DSA_FUSED_Q"

_VLLM = Path(__file__).parents[2]
_COMPILED = _VLLM / "model_executor" / "models" / "deepseek_v2.py"  # 0.28.0

#: Where the patches of the lines call this feature.
_HOOKED_FILES = (_VLLM / "models" / "deepseek_v32" / "common" / "kernels.py", _COMPILED)

#: Whether ``auto`` uses the op of the compiled line (0.28.0). An engine gained 0.9 % of a prefill, at the one
#: shape that was timed (docs/fused_q.md).
COMPILED_IS_WORTH_IT = False


def hooked(files: tuple[Path, ...] = _HOOKED_FILES) -> bool:
    """Whether this build's patches call the feature: all lines carry its files, not all its hooks."""
    return any(file.is_file() and "vllm.dsa.fused_q" in file.read_text(encoding="utf-8") for file in files)


def off_reason() -> str | None:
    """Why the switch, as it is set, leaves this line's path as upstream's, or None."""
    value = switches.get(SWITCH)
    if value == "auto" and not COMPILED_IS_WORTH_IT and hooked((_COMPILED,)):
        return "auto acts as off: on this line a prefill gains little, and decode was not timed"
    return f"{SWITCH}=off" if value == "off" else None


def probe(config: Any | None) -> Status:
    """Judge line, switch and card. Whether a layer's shapes fit is only known when it runs."""
    if not hooked():
        return Status(State.UNAVAILABLE, "this line does not call it")
    if (reason := off_reason()) is not None:
        return Status(State.OFF, reason)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return Status(State.DECLINED, "needs an NVIDIA GPU")
    return Status(State.ACTIVE, "where upstream would run its Triton kernel")


FEATURE = Feature("fused_q", "query packing at prefill", (SWITCH,), probe)
