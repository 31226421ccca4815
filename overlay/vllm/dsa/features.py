# SPDX-License-Identifier: Apache-2.0
"""The registry of features: what exists, whether it is in this release, and its state in this process.

A feature ships as a subpackage ``vllm/dsa/<name>/`` whose module ``feature.py`` defines
``FEATURE = Feature(...)`` without importing torch. A name listed here whose subpackage does not exist is
reported as unavailable, never as something that works.
"""

from __future__ import annotations

import enum
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.dsa import counters, log, switches


class State(str, enum.Enum):
    """What a feature does in this process. (Line 0.28.0 supports Python 3.10, which has no StrEnum.)"""

    ACTIVE = "active"  # used wherever it applies
    OFF = "off"  # its switch, or VLLM_DSA, says so
    DECLINED = "declined"  # switched on, but this model, card or configuration takes the upstream path
    UNAVAILABLE = "unavailable"  # not in this build, or it cannot be loaded

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Status:
    """A state and why. The reason is a short clause without a full stop; it may be empty for ACTIVE."""

    state: State
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else str(self.state)


#: Tells the state before any run-time decision. The argument is the engine's VllmConfig, or None when there
#: is no engine (then only switches, card and kernels can be judged).
Probe = Callable[[Any | None], Status]


@dataclass(frozen=True)
class Feature:
    """One feature of this project.

    Attributes:
        name: registry name and name of the subpackage.
        title: what it is, in a few words.
        switches: variables of ``vllm.envs`` that control it, the main one first.
        probe: see `Probe`; None for a feature that this release lacks.
    """

    name: str
    title: str
    switches: tuple[str, ...]
    probe: Probe | None = None


#: Every feature of the project, in the order in which it is reported.
KNOWN: tuple[Feature, ...] = (
    Feature(
        "overlap",
        "overlap of the indexer with the path to attention",
        ("VLLM_INDEXER_OVERLAP", "VLLM_DISABLE_INDEXER_STREAM"),
    ),
    Feature("litetopk", "indexer scoring and top-k in one kernel", ("VLLM_LITETOPK",)),
    Feature("litedsa", "grouped masked sparse attention", ("VLLM_LITEDSA",)),
    Feature("fused_q", "query packing at prefill", ("VLLM_DSA_FUSED_Q",)),
    Feature("logits_slab", "one reused buffer for the indexer's logits", ("VLLM_INDEXER_LOGITS_SLAB",)),
)

MASTER = "VLLM_DSA"
NOT_IN_RELEASE = "not in this release"
NO_INDEXER = "this model has no indexer"

_reported: dict[str, Status] = {}
_lock = threading.Lock()


def registry() -> dict[str, Feature]:
    """Return all known features by name, replaced by their own definition where the subpackage exists.

    Raises:
        Exception: whatever importing a shipped feature raises; `status` turns it into a state.
    """
    return {known.name: load(known) for known in KNOWN}


def load(known: Feature) -> Feature:
    """Return the shipped definition of a known feature, or the given one if it is not in this release."""
    module = f"vllm.dsa.{known.name}.feature"
    try:
        found: Feature = importlib.import_module(module).FEATURE
    except ModuleNotFoundError as error:
        # Only the feature itself may be missing; a module that the feature needs is an error of this build.
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return known
        raise
    return found


def all_switches() -> tuple[str, ...]:
    """Return the names of all switches of all features, the master switch first."""
    names = [MASTER]
    for known in KNOWN:
        try:
            names.extend(load(known).switches)
        except Exception:  # a feature that cannot be loaded says so in its status
            names.extend(known.switches)
    return tuple(dict.fromkeys(names))


def status(known: Feature, config: Any | None = None) -> Status:
    """Return the state of a feature in this process; never raises.

    What `report_active` or `report_declined` said at run time wins over the feature's probe.

    Args:
        known: an entry of `KNOWN`.
        config: the engine's VllmConfig where there is one.
    """
    try:
        feature = load(known)
    except Exception as error:
        return Status(State.UNAVAILABLE, f"cannot be loaded: {error}")
    if feature.probe is None:
        return Status(State.UNAVAILABLE, NOT_IN_RELEASE)
    try:
        if not switches.enabled():
            return Status(State.OFF, f"{MASTER}=0")
        switches.validate(feature.switches)
        if config is not None and not has_indexer(config):
            return Status(State.OFF, NO_INDEXER)
        return _reported.get(feature.name) or feature.probe(config)
    except (ValueError, switches.SwitchesMissing) as error:
        return Status(State.UNAVAILABLE, str(error))
    except Exception as error:
        return Status(State.UNAVAILABLE, f"probe failed: {type(error).__name__}: {error}")


def has_indexer(config: Any) -> bool:
    """Whether the engine's model selects keys by an indexer, told as upstream tells it: by ``index_topk``.

    Args:
        config: a VllmConfig; one without a model counts as having an indexer.
    """
    model = getattr(config, "model_config", None)
    return model is None or hasattr(model.hf_text_config, "index_topk")


def report_active(name: str, detail: str = "") -> None:
    """Record that a feature is used in this process: one INFO line, one count."""
    with _lock:
        _reported[name] = Status(State.ACTIVE, detail)
    counters.count(name, State.ACTIVE.value, detail)
    log.info_once(f"{name}:active", "vllm.dsa %s: active%s", name, f" ({detail})" if detail else "")


def report_declined(name: str, reason: str) -> None:
    """Record that a feature takes the upstream path and why: one WARNING line per reason, one count.

    A feature that was active before stays active in the report; its counters say what it declined.
    """
    with _lock:
        before = _reported.get(name)
        if before is None or before.state is not State.ACTIVE:
            _reported[name] = Status(State.DECLINED, reason)
    counters.count(name, State.DECLINED.value, reason)
    log.warning_once(
        f"{name}:declined:{reason}", "vllm.dsa %s: declined (%s), upstream's path is used", name, reason
    )


def reset() -> None:
    """Forget what was reported (for tests)."""
    with _lock:
        _reported.clear()
