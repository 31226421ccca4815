# SPDX-License-Identifier: Apache-2.0
"""What LiteDSA computes, in plain PyTorch: slow, exact and on any device.

`attend` is the definition, one query at a time. `attend_grouped` is the kernel's algorithm: unions, masks and
an online softmax over tiles of the union. Both give the same up to rounding, on any input that is not
refused.

The log-sum-exp is natural and of the scaled scores, as flash_mla_sparse_fwd and FlashAttention return it. A
query without a key gives 0 and -inf, the neutral element of a merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.dsa.litedsa import plan

if TYPE_CHECKING:
    import torch


def refuse_duplicates(topk: torch.Tensor) -> None:
    """Raise if a query names a key twice: a set has no room for it, so the result would not be upstream's.

    Raises:
        ValueError: names the first such query.
    """
    import torch

    if topk.shape[1] < 2:
        return
    ordered = topk.sort(1).values
    again = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if bool(again.any()):
        row = int(torch.nonzero(again)[0])
        raise ValueError(f"litedsa: query {row} selects a key twice; an indexer's top-k never does")


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    scale: float,
    v_dim: int = plan.V_DIM,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query to its own keys, in float64.

    Args:
        q: ``[tokens, heads, dim]``, any float type.
        kv: ``[rows, dim]``; a row is the key, its first ``v_dim`` elements are the value.
        topk: integers ``[tokens, k]``, rows of ``kv``; negative entries are no keys and may stand anywhere.
        scale: factor of the scores.
        v_dim: elements of a value.
        sinks: ``[heads]``, an extra logit per head that takes part in the sum of the weights alone, not in
            the returned log-sum-exp.

    Returns:
        float64 ``[tokens, heads, v_dim]`` and ``[tokens, heads]``, the output and the natural log-sum-exp.

    Raises:
        ValueError: a query names a key twice.
    """
    import torch

    refuse_duplicates(topk)
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, v_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for t in range(tokens):
        rows = kv[topk[t][topk[t] >= 0].long()].double()
        if rows.shape[0] == 0:
            continue
        scores = q[t].double() @ rows.T * scale
        lse[t] = scores.logsumexp(1)
        total = lse[t] if sinks is None else torch.logaddexp(lse[t], sinks.double())
        out[t] = (scores - total[:, None]).exp() @ rows[:, :v_dim]
    return out, lse


@dataclass(frozen=True)
class Union:
    """The keys of a group of queries.

    Attributes:
        keys: int64 ``[count]``, ascending, distinct.
        mask: bool ``[count, queries]``: whether the query selects the key.
    """

    keys: torch.Tensor
    mask: torch.Tensor


def unions(topk: torch.Tensor, starts: Sequence[int]) -> list[Union]:
    """Return the union of each group of queries.

    Args:
        topk: integers ``[tokens, k]``; negative entries are no keys.
        starts: `plan.group_starts`.

    Raises:
        ValueError: a query names a key twice.
    """
    import torch

    refuse_duplicates(topk)
    found = []
    for a, b in itertools.pairwise(starts):
        mine = topk[a:b].long()
        keys = mine[mine >= 0].unique()
        mask = torch.zeros(keys.numel(), b - a, dtype=torch.bool, device=topk.device)
        for query in range(b - a):
            mask[:, query] = torch.isin(keys, mine[query][mine[query] >= 0])
        found.append(Union(keys, mask))
    return found


def attend_grouped(
    q: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: Sequence[int],
    scale: float,
    v_dim: int = plan.V_DIM,
    sinks: torch.Tensor | None = None,
    tile: int = plan.TILE_KEYS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `attend` returns, by walking each group's union once, ``tile`` keys at a time.

    Arguments as for `attend`; ``starts`` as for `unions`. Runs in float64 as `attend` does.
    """
    import torch

    tokens, heads, dim = q.shape
    out = torch.zeros(tokens, heads, v_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for (a, b), union in zip(
        itertools.pairwise(starts), unions(topk, starts), strict=True
    ):  # rows of the tile: query-major, head-minor
        rows = q[a:b].double().reshape(-1, dim)
        top = rows.new_full((rows.shape[0],), -torch.inf)
        total, value = torch.zeros_like(top), rows.new_zeros(rows.shape[0], v_dim)
        for lo in range(0, union.keys.numel(), tile):
            keys = kv[union.keys[lo : lo + tile]].double()
            allowed = union.mask[lo : lo + tile].T.repeat_interleave(heads, 0)
            scores = (rows @ keys.T * scale).masked_fill(~allowed, -torch.inf)
            new = torch.maximum(top, scores.amax(1))
            safe = torch.where(new == -torch.inf, 0, new)  # nothing seen yet: exp(-inf - 0) is 0
            weights, decay = (scores - safe[:, None]).exp(), (top - safe).exp()
            total = total * decay + weights.sum(1)
            value = value * decay[:, None] + weights @ keys[:, :v_dim]
            top = new
        seen = total > 0
        if sinks is None:
            weight = total
        else:
            weight = total + torch.where(seen, (sinks.double().repeat(b - a) - top).exp(), 0)
        out[a:b] = torch.where(seen[:, None], value / weight[:, None], 0).reshape(b - a, heads, v_dim)
        lse[a:b] = torch.where(seen, top + total.log(), -torch.inf).reshape(b - a, heads)
    return out, lse


def pack_fp8(kv: torch.Tensor) -> torch.Tensor:
    """Return rows of 576 floats as ``fp8_ds_mla`` rows, uint8 ``[rows, 656]``.

    512 e4m3 values, the float32 scales of their four blocks (largest magnitude / 448), then the last 64
    elements in bfloat16.
    """
    import torch

    blocks = kv[:, :512].float().reshape(-1, 4, 128)
    scales = (blocks.abs().amax(2) / 448).clamp(min=1e-12)
    values = (blocks / scales[..., None]).reshape(-1, 512).to(torch.float8_e4m3fn)
    rope = kv[:, 512:].to(torch.bfloat16).contiguous()
    parts = (values, scales.contiguous(), rope)
    return torch.cat([part.view(torch.uint8).reshape(kv.shape[0], -1) for part in parts], 1)


def unpack_fp8(cache: torch.Tensor) -> torch.Tensor:
    """Return ``fp8_ds_mla`` rows as bfloat16 ``[rows, 576]``: value times scale in float32, rounded once."""
    import torch

    rows = cache.view(torch.uint8).reshape(-1, plan.FP8_ROW_BYTES)
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().reshape(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16)
    nope = (values * scales[..., None]).reshape(-1, 512).to(torch.bfloat16)
    return torch.cat([nope, rope], 1)
