# SPDX-License-Identifier: Apache-2.0
"""Compares both query packing kernels on the tensors of a running engine, at every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import decode_engine
import e2e_prefill


def use(value: str) -> None:
    e2e_prefill.apply({"VLLM_DSA_FUSED_Q": value})


def differing_bytes(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that differ between two tuples of tensors, and bytes compared."""
    import torch

    differ = total = 0
    for x, y in zip(a, b, strict=True):
        x, y = (t.contiguous().view(torch.uint8) for t in (x, y))
        differ += int((x != y).sum())
        total += x.numel()
    return differ, total


class Live:
    """Runs both kernels at every packing of a query. Counts calls, launches of ours, and bytes."""

    def __init__(self) -> None:
        from vllm.dsa.fused_q import launch

        self.found = {"calls": 0, "launches": 0, "bytes": 0, "differ": 0, "poisoned": 0}
        self._undo: list[tuple[Any, str, Any]] = []
        self._late: list[tuple[Any, ...]] = []
        if decode_engine.compiled_line():
            self._replace(launch, "launch_index_q", self._compiled(launch.launch_index_q))
            return
        from vllm.models.deepseek_v32 import attention

        self._replace(launch, "launch", self._counted(launch.launch))
        self._replace(attention, "fused_q", self._both(attention.fused_q))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _counted(self, real: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.found["launches"] += 1
            real(*args, **kwargs)

        return launch

    def _both(self, real: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def fused_q(*args: Any, **kwargs: Any) -> Any:
            use("off")
            theirs = real(*args, **kwargs)
            # What is not written must not be equal by an older result in the same memory.
            poison = [torch.full((t.nbytes,), 0xA5, dtype=torch.uint8, device=t.device) for t in theirs]
            places = {p.data_ptr() for p in poison}
            del poison
            use("on")
            ours = real(*args, **kwargs)
            self.found["calls"] += 1
            self.found["poisoned"] += all(t.data_ptr() in places for t in ours)
            self._count(theirs, ours)
            return ours

        return fused_q

    def _compiled(self, real: Callable[..., None]) -> Callable[..., None]:
        def launch_index_q(*args: Any, **kwargs: Any) -> None:
            *inputs, q_fp8, weights_out, in_double = (*args, *kwargs.values())
            real(*args, **kwargs)
            self.found["calls"] += 1
            self.found["launches"] += 1
            kept = [x.clone() if hasattr(x, "clone") else x for x in (*inputs, q_fp8, weights_out)]
            self._late.append((kept, in_double))

        return launch_index_q

    def _count(self, theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> None:
        differ, total = differing_bytes(theirs, ours)
        self.found["differ"] += differ
        self.found["bytes"] += total

    def finish(self) -> dict[str, int]:
        """Restore what was replaced, compare what is left to compare, and return the counts."""
        for owner, name, value in self._undo:
            setattr(owner, name, value)
        if self._late:
            import torch
            from vllm.model_executor.layers.sparse_attn_indexer import fused_indexer_q_rope_quant as upstream

            factors = self._late[0][0][4:7]

            def traced(*tensors: Any) -> Any:
                return upstream(*tensors, *factors)

            inductor = torch.compile(traced, fullgraph=True, dynamic=True)
            for (*inputs, q_fp8, weights_out), in_double in self._late:
                self._count((inductor if in_double else traced)(*inputs[:4]), (q_fp8, weights_out))
            self._late = []
        return self.found
