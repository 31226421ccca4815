# SPDX-License-Identifier: Apache-2.0
"""Counts what each feature did in this process, by outcome and reason.

A count is a dictionary update under a lock, cheap enough to be taken per layer and step. It is a side effect
that torch.compile cannot trace: call it from eager code, planning code or the body of a custom op.
"""

from __future__ import annotations

import os
import threading

from vllm.dsa import log

#: Different reasons kept per process; further ones are counted under OTHER, so that a reason built
#: from run-time values cannot grow without bound.
MAX_KEYS = 512
OTHER = "(other reasons)"

_counts: dict[tuple[str, str, str], int] = {}
_lock = threading.Lock()
_summary_at_exit = False
_first = True  # of this process: a fork starts anew


def count(feature: str, outcome: str, reason: str = "", n: int = 1) -> None:
    """Add ``n`` to the counter of (feature, outcome, reason).

    Args:
        feature: name in the registry of `vllm.dsa.features`.
        outcome: what happened, such as ``active`` or ``declined``.
        reason: why, empty when the outcome says all.
        n: how many times.
    """
    global _summary_at_exit, _first
    key = (feature, outcome, reason)
    with _lock:
        if key not in _counts and len(_counts) >= MAX_KEYS:
            key = (feature, outcome, OTHER)
        _counts[key] = _counts.get(key, 0) + n
        register, _summary_at_exit = not _summary_at_exit, True
        first, _first = _first, False
    if register:
        # Not atexit: a forked worker of multiprocessing ends without it, and vLLM's are such by default.
        from multiprocessing import util

        util.Finalize(None, log_summary, exitpriority=0)
    if first:
        from vllm.dsa import metrics

        metrics.start()


def snapshot(feature: str | None = None) -> list[dict[str, str | int]]:
    """Return the counters, of one feature or all, as rows ``feature, outcome, reason, count``, sorted."""
    with _lock:
        items = sorted(_counts.items())
    return [
        {"feature": name, "outcome": outcome, "reason": reason, "count": total}
        for (name, outcome, reason), total in items
        if feature in (None, name)
    ]


def log_summary() -> None:
    """Log all counters of this process in one line; nothing was counted: no line. Runs at exit by itself."""
    rows = snapshot()
    if not rows:
        return
    parts = []
    for row in rows:
        why = f" ({row['reason']})" if row["reason"] else ""
        parts.append(f"{row['feature']} {row['outcome']}{why}: {row['count']}")
    log.logger().info("vllm.dsa did in this process: %s", "; ".join(parts))


def reset() -> None:
    """Set all counters to zero (a forked process and each test start anew)."""
    global _lock, _first, _summary_at_exit
    _first = True
    _lock = threading.Lock()  # the parent may have held it while forking
    _counts.clear()
    _summary_at_exit = False


os.register_at_fork(after_in_child=reset)
