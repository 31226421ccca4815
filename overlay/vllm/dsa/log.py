# SPDX-License-Identifier: Apache-2.0
"""One line per process and key, through vLLM's own logger."""

from __future__ import annotations

import importlib
import logging
import os
import threading

_seen: set[str] = set()
_lock = threading.Lock()


def logger() -> logging.Logger:
    """Return the logger ``vllm.dsa``, set up by vLLM where vLLM can be imported."""
    try:
        init_logger = importlib.import_module("vllm.logger").init_logger
    except ImportError:
        return logging.getLogger("vllm.dsa")
    found: logging.Logger = init_logger("vllm.dsa")
    return found


def info_once(key: str, message: str, *args: object) -> bool:
    """Log at INFO unless ``key`` was logged before in this process. Returns whether it was logged now."""
    return _once(logging.INFO, key, message, args)


def warning_once(key: str, message: str, *args: object) -> bool:
    """Log at WARNING unless ``key`` was logged before in this process. Returns whether it was logged now."""
    return _once(logging.WARNING, key, message, args)


def _once(level: int, key: str, message: str, args: tuple[object, ...]) -> bool:
    with _lock:
        if key in _seen:
            return False
        _seen.add(key)
    # 3: the caller of info_once or warning_once is the place that the line names.
    logger().log(level, message, *args, stacklevel=3)
    return True


def reset() -> None:
    """Forget all keys (a forked process and each test start anew)."""
    global _lock
    _lock = threading.Lock()  # the parent may have held it while forking
    _seen.clear()


os.register_at_fork(after_in_child=reset)
