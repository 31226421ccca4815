# SPDX-License-Identifier: Apache-2.0
"""Compares the LiteTopK kernel with the reference on small random cases, on the card at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.dsa.litetopk import kernel, reference

if TYPE_CHECKING:
    import torch

#: FP8 tensor cores add products with fewer bits than FP32 has; relative to the row's largest score.
TOLERANCE = 2e-3


def random_case(
    queries: int, keys: int, heads: int, seed: int, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Return ``q, k, k_scale, weights, ks, ke`` of two uneven requests; some weights are negative."""
    import torch

    # An engine may have set other defaults; the same numbers on every card, so they are drawn on the CPU.
    g = torch.Generator(device="cpu").manual_seed(seed)
    drawn: dict[str, Any] = {"generator": g, "dtype": torch.float32, "device": "cpu"}
    whole: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
    fp8 = torch.float8_e4m3fn
    q = torch.randn(queries, heads, 128, **drawn).to(fp8)
    k = torch.randn(keys, 128, **drawn).to(fp8)
    k_scale = torch.rand(keys, **drawn) * 0.5 + 0.5
    weights = torch.randn(queries, heads, **drawn) * 0.1
    cut, border = queries // 3, keys // 4
    ks = torch.zeros(queries, **whole)
    ks[cut:] = border
    ke = torch.empty(queries, **whole)
    ke[:cut] = border - torch.arange(cut, 0, -1, **whole) + 1
    ke[cut:] = keys - torch.arange(queries - cut, 0, -1, **whole) + 1
    return tuple(t.to(device) for t in (q, k, k_scale, weights, ks, torch.maximum(ks, ke)))


def check(device: torch.device | str, heads: int, k: int, seed: int = 0) -> str:
    """Return what is wrong with the kernel's result on ``device``, '' if nothing is. Waits for the device.

    Two cases: one whose lists are cut several times, and one that is shorter. Scores are compared with the
    float64 reference, positions with the reference's top-k of the kernel's own scores, which must be equal.
    """
    import torch

    for queries, keys in ((21, 20011), (9, 3001)):
        q, keys_, k_scale, weights, ks, ke = random_case(queries, keys, heads, seed, device)
        scores = torch.full((queries, keys), -torch.inf, dtype=torch.float32, device=device)
        out = torch.full((queries, k), -7, dtype=torch.int32, device=device)
        kernel.litetopk_scores(q, keys_, k_scale, weights, ks, ke, scores)
        kernel.litetopk(q, keys_, k_scale, weights, ks, ke, out)
        column = torch.arange(keys, device=device)
        inside = (column >= ks[:, None]) & (column < ke[:, None])
        exact = reference.indexer_scores(q, keys_, k_scale, weights)
        error = torch.where(inside, (scores - exact).abs(), 0).amax(1)
        largest = torch.where(inside, exact.abs(), 0).amax(1)
        if not bool((error <= TOLERANCE * largest).all()):
            worst = float((error / largest.clamp(min=1e-30)).max())
            return (
                f"scores of {heads} heads differ by {worst:.1e} of the largest score (limit {TOLERANCE:.0e})"
            )
        wanted = reference.top_positions(scores, ks, ke, k)
        wrong = int((out.sort(1).values != wanted.sort(1).values).any(1).sum())
        if wrong:
            return f"top-{k} of {heads} heads is wrong in {wrong} of {queries} rows"
    return ""
