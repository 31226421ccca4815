# SPDX-License-Identifier: Apache-2.0
"""The line that vLLM's engine logs about this build when it starts."""

from __future__ import annotations

from typing import Any

from vllm.dsa import features, log, metrics, provenance, switches


def log_startup(config: Any | None = None) -> None:
    """Check all switches and log one line: build, and the state of each feature with its reason.

    Also tells the workers that start behind this where their counters are collected (`metrics.announce`).
    Called by ``EngineCore.__init__`` right after vLLM logs its own version and configuration, only when
    ``VLLM_DSA`` is on. Later calls in the same process say nothing.

    Args:
        config: the engine's VllmConfig.

    Raises:
        ValueError: a switch holds a value that is not among its choices; the message names both.
    """
    switches.validate(features.all_switches())
    if config is not None:
        metrics.announce(config)
    build = provenance.read()
    parts = [f"{known.name} {features.status(known, config)}" for known in features.KNOWN]
    log.info_once(
        "startup",
        "vllm.dsa %s (line %s, series %s, upstream %s): %s",
        build.version,
        build.line,
        build.series_version,
        build.upstream_commit[:9],
        "; ".join(parts),
    )
