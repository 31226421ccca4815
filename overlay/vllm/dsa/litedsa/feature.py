# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``litedsa``: an operator that no engine path calls yet."""

from __future__ import annotations

from typing import Any

from vllm.dsa.features import Feature, State, Status

SWITCH = "VLLM_LITEDSA"


def probe(config: Any | None) -> Status:
    """Say what this release has, whatever the switch is set to."""
    return Status(State.UNAVAILABLE, "operator only, not run on a GPU")


FEATURE = Feature("litedsa", "grouped masked sparse attention", (SWITCH,), probe)
