# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.dsa.litedsa`` on the CPU: the reference behind the op's signature, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.dsa.litedsa import plan, reference

if TYPE_CHECKING:
    import torch


def cache_rows(
    topk: torch.Tensor,
    requests: torch.Tensor | None,
    table: torch.Tensor | None,
    block_size: int,
    block_rows: int,
    span: int,
    rows: int,
) -> torch.Tensor:
    """Return the cache row of each position, int64 ``[tokens, k]``; -1 for what is no key.

    Args:
        topk: int32 ``[tokens, k]``, positions.
        requests: int32 ``[tokens]``, row of the table; None: row 0.
        table: int32 ``[requests, blocks]``; None: a position is its row.
        block_size: positions of a block.
        block_rows: cache rows from a block to the next.
        span: positions from here on are no keys.
        rows: of the cache, the bound where there is no table.
    """
    import torch

    position = topk.long()
    limit = min(span, rows if table is None else table.shape[1] * block_size)
    valid = (position >= 0) & (position < limit)
    if table is None:
        return torch.where(valid, position, -1)
    at = torch.where(valid, position, 0)
    mine = table[requests.long()] if requests is not None else table[:1].expand(topk.shape[0], -1)
    found = mine.long().gather(1, at // block_size) * block_rows + at % block_size
    return torch.where(valid, found, -1)


def litedsa(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor | None,
    table: torch.Tensor | None,
    block_size: int,
    block_rows: int,
    span: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    """Write ``out`` and ``lse`` of all tokens from ``starts[0]`` to ``starts[-1]``; see `kernel.litedsa`."""
    import torch

    lo, hi = int(starts[0]), int(starts[-1])
    mine = requests[lo:hi] if requests is not None else None
    selected = cache_rows(topk[lo:hi], mine, table, block_size, block_rows, span, kv.shape[0])
    rows = reference.unpack_fp8(kv) if kv.shape[1] == plan.FP8_ROW_BYTES else kv
    q = torch.cat([q_nope[lo:hi], q_rope[lo:hi]], 2)
    value, total = reference.attend(q, rows, selected, scale)
    out[lo:hi] = value.to(out.dtype)
    if lse is not None:
        lse[lo:hi] = total.to(lse.dtype)
    if counts is not None:
        found = reference.unions(selected, [start - lo for start in starts.tolist()])
        counts.copy_(torch.tensor([union.keys.numel() for union in found], dtype=counts.dtype))
