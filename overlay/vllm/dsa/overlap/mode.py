# SPDX-License-Identifier: Apache-2.0
"""What the switches ask for: the modes of ``VLLM_INDEXER_OVERLAP``, and the switch that overrules them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm.dsa import switches

SWITCH = "VLLM_INDEXER_OVERLAP"
DISABLE = "VLLM_DISABLE_INDEXER_STREAM"


class Mode(str, enum.Enum):
    """What runs on the side stream, by the values of ``VLLM_INDEXER_OVERLAP``."""

    OFF = "off"  # nothing: upstream's path
    WK = "wk"  # F1: wk_weights_proj beside fused_qkv_a_proj
    FULL = "full"  # F1, and F2: the rest of the indexer beside the path to attention
    NATIVE = "native"  # as FULL, by streams that torch.compile traces (compiled line only)
    AUTO = "auto"  # WK, FULL or OFF by token count, from measurements on this card

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Request:
    """The mode that the switches ask for. ``reason`` says why it is OFF and is empty otherwise."""

    mode: Mode
    reason: str = ""


def requested() -> Request:
    """Read both switches. ``VLLM_DISABLE_INDEXER_STREAM=1`` turns every overlap of this project off.

    Raises:
        ValueError, SwitchesMissing: as `vllm.dsa.switches.get`.
    """
    if switches.get(DISABLE):
        return Request(Mode.OFF, f"{DISABLE}=1" if switches.enabled() else "VLLM_DSA=0")
    mode = Mode(switches.get(SWITCH))
    return Request(mode, f"{SWITCH}=off" if mode is Mode.OFF else "")
