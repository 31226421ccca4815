# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel runs here: loaded and checked once, with one answer for all tensor-parallel ranks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm.dsa.litetopk import backend
from vllm.dsa.litetopk.eligible import Indexer

if TYPE_CHECKING:
    import torch

CAPTURING = "not checked before the first graph capture"

_known: dict[tuple[Indexer, str], str] = {}
_lock = threading.Lock()


def why_not(shape: Indexer, device: torch.device) -> str:
    """Return why the kernel is not used for this indexer on this device, '' if it is.

    The first call checks: it waits for the device and, with tensor parallelism, for the other ranks. Each of
    them makes it at the same place, in the profile run or at the first step that could use the kernel.
    """
    key = (shape, str(device))
    with _lock:
        if key not in _known:
            if _capturing(device):
                return CAPTURING
            _known[key] = _agree(_check(shape, device))
        return _known[key]


def _check(shape: Indexer, device: torch.device) -> str:
    try:
        reason = backend.current.why_not(shape.heads, shape.dim, shape.k, device)
        if reason:
            return reason
        wrong = backend.current.check(shape.heads, shape.k, device)
        return f"the self-check failed: {wrong}" if wrong else ""
    except Exception as error:
        return f"the self-check failed: {type(error).__name__}: {error}"


def _capturing(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _agree(reason: str) -> str:
    """Return this rank's reason, or that another rank has one, so that no rank uses the kernel alone."""
    import torch
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return reason
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return reason
    usable = torch.tensor([0 if reason else 1], dtype=torch.int32)
    torch.distributed.all_reduce(usable, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return reason or ("" if usable.item() else "another tensor-parallel rank cannot use the kernel")


def reset() -> None:
    """Forget what was checked (for tests)."""
    with _lock:
        _known.clear()
