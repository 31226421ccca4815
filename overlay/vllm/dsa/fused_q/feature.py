# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``fused_q``: query packing in blocks of rows."""

from __future__ import annotations

from typing import Any

from vllm.dsa import switches
from vllm.dsa.features import Feature, State, Status

SWITCH = "VLLM_DSA_FUSED_Q"


def probe(config: Any | None) -> Status:
    """Judge switch and card. Whether a layer's shapes fit is only known when it runs."""
    if switches.get(SWITCH) == "off":
        return Status(State.OFF, f"{SWITCH}=off")
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return Status(State.DECLINED, "needs an NVIDIA GPU")
    return Status(State.ACTIVE, "where upstream would run its Triton kernel")


FEATURE = Feature("fused_q", "query packing at prefill", (SWITCH,), probe)
