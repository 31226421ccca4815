# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``logits_slab``: one reused buffer for the indexer's prefill logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.dsa import switches
from vllm.dsa.features import Feature, State, Status
from vllm.dsa.logits_slab import extension

SWITCH = "VLLM_INDEXER_LOGITS_SLAB"
#: Compute capabilities of which bench/results/deepgemm holds a measurement: there ``auto`` means on.
MEASURED: frozenset[tuple[int, int]] = frozenset({(9, 0)})
#: Compute capabilities whose kernel writes float32 logits, which the top-k kernels read as they are.
SUPPORTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})

UNPATCHED = "the DeepGEMM of this build cannot write to a given buffer (docs/deepgemm.md)"

_HOOKED_FILE = Path(__file__).parents[2] / "model_executor" / "layers" / "sparse_attn_indexer.py"


def hooked(file: Path = _HOOKED_FILE) -> bool:
    """Whether this build's patches call the feature."""
    return file.is_file() and "vllm.dsa.logits_slab" in file.read_text(encoding="utf-8")


def card_status(capability: tuple[int, int] | None, switch: str) -> Status:
    """Judge the card: ``auto`` uses a supported card once it was measured, ``on`` at once."""
    if capability not in SUPPORTED:
        found = (
            "no NVIDIA GPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        )
        return Status(State.DECLINED, f"needs compute capability 9.0, found {found}")
    if switch == "auto" and capability not in MEASURED:
        return Status(State.OFF, f"not measured on this card yet; {SWITCH}=on uses it")
    return Status(State.ACTIVE, "prefill logits share one buffer, once it was checked against DeepGEMM's own")


def probe(config: Any | None) -> Status:
    """Judge line, switch, build and card. Whether the check at start-up holds shows in the profile run."""
    if not hooked():
        return Status(State.UNAVAILABLE, "this line does not call it")
    switch = switches.get(SWITCH)
    if switch == "off":
        return Status(State.OFF, f"{SWITCH}=off")
    if not extension.patched():
        return Status(State.UNAVAILABLE, UNPATCHED)
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return card_status(None if capability is None else (capability.major, capability.minor), switch)


FEATURE = Feature("logits_slab", "one reused buffer for the indexer's logits", (SWITCH,), probe)
