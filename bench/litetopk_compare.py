# SPDX-License-Identifier: Apache-2.0
"""Compares what LiteTopK's kernel selects in a running engine with upstream's kernels on the same inputs."""

from __future__ import annotations

import statistics
from typing import Any

SAMPLED_ROWS = 8


class Watch:
    """In place of the engine's kernel: runs it, and compares some rows with upstream's kernels."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.rows: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(
        self, q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any, out: Any, longest: int
    ) -> None:
        """See `vllm.dsa.litetopk.backend.Backend.run`."""
        self.kernel.run(q, k, k_scale, weights, ks, ke, out, longest)
        last = int((ks == ks[-1]).sum())  # rows of the chunk's last request
        few = slice(q.shape[0] - min(SAMPLED_ROWS, last), q.shape[0])
        self.rows.append(
            compared(q[few], k, k_scale, weights[few], ks[few].contiguous(), ke[few].contiguous(), out[few])
        )


def upstream_logits(q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any) -> Any:
    """Upstream's logits with column 0 at the row's first key, on either line."""
    import inspect

    from vllm.utils import deep_gemm

    logits = deep_gemm.fp8_fp4_mqa_logits
    if "max_seqlen_k" in inspect.signature(logits).parameters:
        return logits((q, None), (k, k_scale), weights, ks, ke, int((ke - ks).max()))
    start = int(ks.min())  # rows of one request: all begin at the same key
    return logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=False)[:, start:]


def compared(q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any, ours: Any) -> dict[str, float]:
    """Compare rows of one chunk with upstream's logits and their top-k; and describe these logits."""
    import torch

    logits = upstream_logits(q, k, k_scale, weights, ks, ke).float()
    lengths = (ke - ks)[:, None]
    inside = torch.arange(logits.shape[1], device=logits.device) < lengths
    masked = torch.where(inside, logits, -torch.inf)
    width = min(ours.shape[1], logits.shape[1])
    best = masked.topk(width, 1)
    cut = best.values[:, -1]
    ids = ours[:, :width].long().clamp(min=0)
    lowest = masked.gather(1, ids).amin(1)
    mask = torch.zeros_like(inside).scatter_(1, ids, True)
    differ = (~mask.gather(1, best.indices)).sum(1)
    last = masked[-1, : int(lengths[-1])]
    centred = last - last.mean()
    newest = best.indices[-1] >= int(lengths[-1]) - 4096
    return {
        "members": float(width * ours.shape[0]),
        "differ": float(differ.sum()),
        "below_cut": float(((cut - lowest) / cut.abs().clamp(min=1)).max()),
        "mean": float(last.mean()),
        "deviation": float(last.std()),
        "skew": float((centred**3).mean() / last.std() ** 3),
        "kurtosis": float((centred**4).mean() / last.std() ** 4),
        "from_newest_4096": float(newest.float().mean()),
        "keys": float(lengths.max()),
    }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """All chunks of all layers together; the distribution is that of the longest row of each, averaged."""
    if not rows:
        return {"chunks": 0}
    found: dict[str, Any] = {"chunks": len(rows)}
    found["members"], found["differ"] = (sum(row[name] for row in rows) for name in ("members", "differ"))
    found["below_cut"] = max(row["below_cut"] for row in rows)
    for name in ("mean", "deviation", "skew", "kurtosis", "from_newest_4096"):
        found[name] = statistics.fmean(row[name] for row in rows)
    return found
