# SPDX-License-Identifier: Apache-2.0
"""What the LiteTopK kernel computes, in plain PyTorch: slow, exact and on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Elements of a temporary: 64 MiB of float64, so that the start-up check needs less than a call allocates.
_CHUNK = 1 << 23


def indexer_scores(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return ``score[i, j] = k_scale[j] * sum_h weights[i, h] * max(0, q[i, h] . k[j])`` in float64.

    Args:
        q: e4m3 (or any float type) ``[queries, heads, 128]``.
        k: the same type, ``[keys, 128]``.
        k_scale: float32 ``[keys]``.
        weights: float32 ``[queries, heads]``; the scale of q is folded in.

    Returns:
        float64 ``[queries, keys]``.
    """
    import torch

    queries, heads, _ = q.shape
    q64, w64 = q.double(), weights.double()
    step = max(1, _CHUNK // max(1, queries * heads))
    parts = []
    for lo in range(0, k.shape[0], step):
        dots = torch.einsum("qhd,kd->qhk", q64, k[lo : lo + step].double()).clamp_(min=0)
        parts.append(torch.einsum("qhk,qh->qk", dots, w64) * k_scale[lo : lo + step].double())
    return torch.cat(parts, 1) if parts else q64.new_empty((queries, 0))


def top_positions(scores: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions, relative to ``ks``, of each row's ``k`` best scores in ``[ks, ke)``.

    Equal scores prefer the lower position, -0 equals +0, and NaN counts as -infinity, so there is one result.
    Rows with at most ``k`` columns list all of them, and a row's list ends with -1 up to ``k``.

    Args:
        scores: float ``[rows, columns]``; columns out of range may hold anything.
        ks: int32 ``[rows]``, first column of each row.
        ke: int32 ``[rows]``, one past the last column.
        k: how many.

    Returns:
        int32 ``[rows, k]``.
    """
    import torch

    rows, columns = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    width = min(k, columns)
    if width == 0:
        return out
    column = torch.arange(columns, device=scores.device)
    inside = (column >= ks[:, None]) & (column < ke[:, None])
    finite = torch.where(torch.isnan(scores), torch.full_like(scores, -torch.inf), scores)
    # Stable sorts: first everything by score, then what is out of range to the end.
    order = finite.sort(dim=1, descending=True, stable=True).indices
    outside = ~inside.gather(1, order)
    order = order.gather(1, outside.to(torch.int8).sort(dim=1, stable=True).indices)[:, :width]
    valid = torch.arange(width, device=scores.device) < inside.sum(1, keepdim=True)
    out[:, :width] = torch.where(valid, order - ks[:, None], -1).to(torch.int32)
    short = (ke - ks)[:, None] <= k
    identity = torch.arange(k, device=scores.device, dtype=torch.int32).expand(rows, k)
    identity = torch.where(identity < (ke - ks)[:, None], identity, -1)
    return torch.where(short, identity, out).to(torch.int32)
