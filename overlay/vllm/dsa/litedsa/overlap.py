# SPDX-License-Identifier: Apache-2.0
"""Leaves a layer's prefills to upstream while the unions of their groups are too large to gain anything.

How much neighbours share is only known on the device. Each grouped batch leaves the sum of its unions' sizes
in pinned memory; a later batch reads it if it has arrived and never waits. It reads that of two batches ago,
which has arrived on every rank when no more than two batches are in flight, so that all ranks decide alike;
with more in flight they may differ for a batch, which changes no result beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.dsa.litedsa import plan

if TYPE_CHECKING:
    import torch

#: Batches left to upstream before unions are looked at again.
PAUSE = 16
#: Newest measurements that are not read yet.
DELAY = 1


@dataclass(frozen=True)
class Measured:
    """Sizes of a batch's unions, perhaps still on their way.

    Attributes:
        entries: int64 scalar in pinned memory, their sum.
        groups: how many unions.
        arrived: CUDA event behind the copy; None on the CPU.
    """

    entries: torch.Tensor
    groups: int
    arrived: torch.cuda.Event | None


class Meter:
    """The unions of one layer."""

    def __init__(self, heads: int, k: int) -> None:
        self.k = k
        self.limit = plan.BREAK_EVEN.get(heads)
        self.ratio = 0.0
        self._pending: list[Measured] = []
        self._skipped = 0

    def too_large(self) -> str:
        """Return why the next batch is left to upstream, '' if it can be grouped; nothing is waited for."""
        if self.limit is None:
            return ""
        while len(self._pending) > DELAY:
            oldest = self._pending[0]
            if oldest.arrived is not None and not oldest.arrived.query():
                break
            self.ratio = int(oldest.entries) / (max(1, oldest.groups) * self.k)
            del self._pending[0]
        if self.ratio <= self.limit:
            return ""
        self._skipped += 1
        if self._skipped > PAUSE:  # look again
            self._skipped, self.ratio = 0, 0.0
            self._pending.clear()
            return ""
        return f"unions above {self.limit:g} times the top-k"

    def buffer(self, groups: int, device: torch.device) -> torch.Tensor | None:
        """Return where the next batch's kernel shall leave its counts; None: not wanted."""
        import torch

        if self.limit is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return torch.empty(groups, dtype=torch.int32, device=device)

    def take(self, counts: torch.Tensor | None) -> None:
        """Send the sizes of a batch's unions (`buffer`, filled) on their way to the host."""
        import torch

        if counts is None or counts.numel() == 0:
            return
        total = counts.clamp(min=0).sum(dtype=torch.int64)
        arrived = None
        if counts.device.type == "cuda":
            entries = torch.empty((), dtype=torch.int64, pin_memory=True)
            entries.copy_(total, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            total = entries
        self._pending.append(Measured(total, counts.numel(), arrived))
