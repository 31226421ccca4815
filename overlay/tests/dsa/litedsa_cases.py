# SPDX-License-Identifier: Apache-2.0
"""Selections for the LiteDSA tests: how much neighbours share, and where the -1 entries stand."""

import torch

SELECTIONS = (
    "random",
    "identical",
    "disjoint",
    "one_shared",
    "sliding",
    "single",
    "empty",
    "first_empty",
    "only_last_has",
    "holes",
    "short",
)


def select(
    name: str, tokens: int, k: int, rows: int, generator: torch.Generator, group: int = 8
) -> torch.Tensor:
    """Return int32 ``[tokens, k]`` on the CPU: distinct rows of ``range(rows)`` per token, any order, and -1.

    ``disjoint`` needs ``rows >= group * k``: tokens less than ``group`` apart share nothing. ``one_shared``
    is the same except for one row that all tokens have.
    """

    def some(n: int, most: int = rows) -> torch.Tensor:
        return torch.randperm(most, generator=generator)[:n]

    out = torch.full((tokens, k), -1, dtype=torch.int32)
    same = some(k)
    for t in range(tokens):
        if name in ("random", "holes", "short"):
            ids = some(k)
        elif name == "identical":
            ids = same[torch.randperm(k, generator=generator)]
        elif name in ("disjoint", "one_shared"):
            ids = t % group * k + some(k, k)
            if name == "one_shared":
                ids = torch.cat([ids[ids != 0][: k - 1], torch.zeros(1, dtype=torch.long)])
        elif name == "sliding":
            ids = (torch.arange(k) + 3 * t) % rows
        elif name == "single":
            ids = some(1)
        elif name == "empty":
            ids = some(0)
        elif name == "first_empty":
            ids = some(0 if t % group == 0 else k)
        else:
            ids = some(k if t % group == group - 1 else 0)
        if name == "short":
            ids = ids[: 1 + t % k]
        ids = ids.to(torch.int32)
        if name == "holes":  # -1 entries between the others
            keep = torch.rand(ids.numel(), generator=generator) < 0.6
            ids = torch.where(keep, ids, -1)
        out[t, : ids.numel()] = ids
    return out


def overlapping(
    tokens: int, k: int, rows: int, ratio: float, group: int, generator: torch.Generator
) -> torch.Tensor:
    """Return a selection whose groups of ``group`` neighbours have unions of about ``ratio * k`` rows.

    Each group draws a pool of ``ratio * k`` rows, each of its tokens k of them: ``ratio`` 1 gives identical
    sets, ``group`` disjoint ones.
    """
    out = torch.empty(tokens, k, dtype=torch.int32)
    size = round(ratio * k)
    for first in range(0, tokens, group):
        pool = torch.randperm(rows, generator=generator)[:size]
        n = min(group, tokens - first)
        # Token i takes a window of the pool, so that all of the pool is taken when the windows cover it.
        step = (size - k) / max(1, group - 1)
        for i in range(n):
            lo = round(i * step)
            out[first + i] = pool[lo : lo + k].to(torch.int32)
    return out
