# SPDX-License-Identifier: Apache-2.0
"""The registry entry of ``overlap``: the indexer on a side stream beside the path to attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.dsa import provenance
from vllm.dsa.features import Feature, State, Status
from vllm.dsa.overlap import auto, gates
from vllm.dsa.overlap.mode import DISABLE, SWITCH, Mode, requested

_MODELS = Path(__file__).parents[2]

#: Where the patches of the lines call this feature.
_HOOKED_FILES = (
    _MODELS / "models" / "deepseek_v32" / "attention.py",  # 0.33.0
    _MODELS / "model_executor" / "layers" / "mla.py",  # 0.28.0
)


def hooked(files: tuple[Path, ...] = _HOOKED_FILES) -> bool:
    """Whether this build's patches call the feature: all lines carry its files, not all its hooks."""
    return any(file.is_file() and "vllm.dsa.overlap" in file.read_text(encoding="utf-8") for file in files)


def compiled_line() -> bool:
    """Whether this is the line whose DSA models run under torch.compile (the only one with ``native``)."""
    return provenance.read().line == "0.28.0"


def probe(config: Any | None) -> Status:
    """Judge switches, card and configuration. What each batch does is only known when it runs."""
    if not hooked():
        return Status(State.UNAVAILABLE, "this line does not call it")
    request = requested()
    if request.mode is Mode.OFF:
        return Status(State.OFF, request.reason)
    if request.mode is Mode.NATIVE and not compiled_line():
        return Status(State.OFF, NATIVE_IS_OFF)
    reason = gates.config_reason(config)
    if reason is not None:
        return Status(State.DECLINED, reason)
    if request.mode is Mode.AUTO:
        line, card = provenance.read().line, card_here()
        if not auto.has_card(line, card):
            return Status(State.OFF, auto.no_measurement(card))
        unmeasured = auto.unmeasured(config)
        if unmeasured is not None:
            return Status(State.OFF, unmeasured)
        if getattr(config, "model_config", None) is not None and not auto.knows(config, line, card):
            return Status(State.OFF, auto.no_measurement(card))
    return Status(State.ACTIVE, f"mode {request.mode}")


NATIVE_IS_OFF = "native acts as off: this line's DSA models are not compiled"


def card_here() -> str:
    """This machine's card as bench/results names it; empty without one, or where the driver does not say.

    Never raises: ``auto``, the default, asks while layers are built, where upstream asks nothing.
    """
    from vllm.platforms import current_platform

    return _slug(current_platform.get_device_name) if current_platform.is_cuda() else ""


@functools.cache  # upstream's get_device_name starts and stops NVML each time, and each layer asks
def _slug(get_device_name: Callable[[], str]) -> str:
    try:
        return auto.card_slug(get_device_name())
    except Exception:  # NVML's own errors, of a MIG instance for example, have no common base with others
        return ""


FEATURE = Feature("overlap", "overlap of the indexer with the path to attention", (SWITCH, DISABLE), probe)
