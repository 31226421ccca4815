# SPDX-License-Identifier: Apache-2.0
"""A top-k of line 0.33.0 whose result is determined: of equal scores the ones of the lowest ids win.

Upstream's kernels take equal scores at the last place in the order in which threads arrive, so two passes
may select different keys. Where `on` is set, their result is replaced here, after they ran, on the stream
they ran on. What still differs between two passes has another cause. Rows with such a tie are counted.
"""

from __future__ import annotations

from typing import Any

#: Rows that are sorted at once.
ROWS = 512

on = False
_counts: Any = None  # int64 [3] on the device, see `take`


def install() -> None:
    """Put this behind upstream's top-k of prefill and decode; call once, before an engine starts."""
    import functools

    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import sparse_attn_indexer as module

    prefill, decode = ops.top_k_per_row_prefill, module.get_indexer_topk

    @functools.wraps(prefill)
    def after_prefill(logits: Any, starts: Any, ends: Any, ids: Any, rows: int, *rest: Any) -> None:
        prefill(logits, starts, ends, ids, rows, *rest)
        settle(logits, ends, ids, rest[-1])  # line 0.33.0 starts every row at 0

    def after_decode(backend: str) -> Any:
        real = decode(backend)

        def run(logits: Any, seq_lens: Any, next_n: int, ids: Any, k: int, longest: int) -> None:
            real(logits, seq_lens, next_n, ids, k, longest)
            settle(logits, real._row_ends(seq_lens, next_n, logits.shape[0]), ids, k)

        return run

    ops.top_k_per_row_prefill = after_prefill
    module.get_indexer_topk = after_decode


def settle(logits: Any, ends: Any, ids: Any, k: int) -> None:
    """Where `on` is set, write the determined selection and count ties at the last place.

    Args:
        logits: [rows, keys] float32; what lies behind a row's end is garbage.
        ends: [rows] int32, number of keys of each row.
        ids: [rows, k] int32, written in place; -1 where a row has fewer keys than k.
        k: how many are selected.
    """
    import torch

    if not on:
        return
    columns = torch.arange(logits.shape[1], device=logits.device)
    kept = min(k, logits.shape[1])
    for first in range(0, logits.shape[0], ROWS):
        end = ends[first : first + ROWS, None]
        part = logits[first : first + ROWS].masked_fill(columns >= end, float("-inf"))
        scores, order = part.sort(dim=-1, descending=True, stable=True)
        theirs = ids[first : first + ROWS, :kept]
        selected = part.gather(1, theirs.clamp(0, logits.shape[1] - 1).long())
        selected = selected.masked_fill(theirs < 0, float("-inf")).sort(dim=-1, descending=True).values
        counts()[2].add_((selected != scores[:, :kept]).any(-1).sum())
        chosen = order[:, :kept].int().masked_fill(columns[:kept] >= end, -1)
        ids[first : first + ROWS, :kept] = chosen
        ids[first : first + ROWS, kept:] = -1
        if kept < logits.shape[1]:
            more = end[:, 0] > k
            tied = (scores[:, k - 1] == scores[:, k]) & more
            counts()[0].add_(tied.sum())
            counts()[1].add_(more.sum())


def counts() -> Any:
    """The counters, which captured graphs add to as well."""
    global _counts
    if _counts is None:
        import torch

        _counts = torch.zeros(3, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
    return _counts


def take() -> dict[str, int]:
    """Rows counted since the last call.

    Returns:
        ``rows`` with more keys than k, ``tied`` (those with equal scores at the last place), and ``other``:
        rows of which upstream's kernel selected other scores, which no tie explains.
    """
    tied, rows, other = counts().tolist()
    counts().zero_()
    return {"tied": tied, "rows": rows, "other": other}
