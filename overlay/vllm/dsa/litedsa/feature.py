# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``litedsa``: sparse attention of prefills by groups of neighbouring queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.dsa import switches
from vllm.dsa.features import Feature, State, Status

SWITCH = "VLLM_LITEDSA"

_VLLM = Path(__file__).parents[2]
#: Where the patch of a line calls `vllm.dsa.litedsa.engine.grouped`.
HOOKED = ("models/deepseek_v32/attention.py", "model_executor/layers/attention/mla_attention.py")


def hooked(root: Path = _VLLM) -> bool:
    """Whether this build's patches call the feature."""
    files = [root / name for name in HOOKED if (root / name).is_file()]
    return any("vllm.dsa.litedsa" in file.read_text(encoding="utf-8") for file in files)


def probe(config: Any | None) -> Status:
    """Judge line, switch and card. Whether a layer and a batch fit is only known when they run."""
    if not hooked():
        return Status(State.UNAVAILABLE, "operator only: the patches of this build do not call it")
    if not switches.get(SWITCH):
        return Status(State.OFF, f"{SWITCH}=0")
    from vllm.dsa.litedsa import engine, kernel

    reason = kernel.why_not(16, 576, 512, 2048, engine.capability())
    if reason:
        return Status(State.DECLINED, reason)
    return Status(State.ACTIVE, "prefills with 8, 16 or 32 heads on a rank")


FEATURE = Feature("litedsa", "grouped masked sparse attention", (SWITCH,), probe)
