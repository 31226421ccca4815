# SPDX-License-Identifier: Apache-2.0
"""Inputs for the LiteTopK tests: score distributions that strain a streaming top-k, and ragged requests."""

import random

import torch

DISTRIBUTIONS = (
    "iid",
    "equal",
    "zero",
    "ascending",
    "descending",
    "recency",
    "clustered",
    "heavy",
    "hot",
    "negative",
    "coarse",
    "nan",
    "nan_inputs",
)


def make(
    queries: int, keys: int, heads: int, distribution: str = "iid", requests: int = 1, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return ``q, k, k_scale, weights, ks, ke`` on the GPU; requests share the keys in random proportions."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=g)

    q, weights = randn(queries, heads, 128), randn(queries, heads) * 0.1
    k, scale = randn(keys, 128), torch.rand(keys, device="cuda", generator=g) * 0.5 + 0.5
    at = torch.arange(keys, device="cuda", dtype=torch.float32)
    if distribution == "equal":
        k.fill_(1.0)
        scale.fill_(1.0)
    elif distribution == "zero":  # every head's product is negative: all scores are 0 or -0
        q.fill_(-1.0)
        k.fill_(1.0)
    elif distribution in ("ascending", "descending"):
        k[:] = k[:1].clone()
        ramp = (at + 1) / keys
        scale, weights = (ramp if distribution == "ascending" else 1 + 1 / keys - ramp), weights.abs()
    elif distribution == "recency":
        scale, weights = scale * (1 + 3 * torch.exp((at - keys) / (0.1 * keys))), weights.abs()
    elif distribution == "clustered":
        centres = randn(64, 128)
        k, weights = centres[(at.long() // 64) % 64] + 0.2 * k, weights.abs()
    elif distribution == "heavy":
        scale = torch.exp(2.5 * randn(keys))
    elif distribution == "hot":
        scale.fill_(1e-3)
        scale[keys // 3] = 1e6
    elif distribution == "negative":
        weights = -weights.abs()
    elif distribution == "coarse":  # integers: many ties
        q, k, weights = q.sign(), k.sign(), weights.sign()
        scale.fill_(1.0)
    elif distribution == "nan":
        scale[torch.randint(0, keys, (max(1, keys // 7),), device="cuda", generator=g)] = torch.nan
        scale[torch.randint(0, keys, (max(1, keys // 50),), device="cuda", generator=g)] = torch.inf
        weights[::3] *= -1
        weights[1::5, 0] = torch.nan
    elif distribution == "nan_inputs":
        k[torch.randint(0, keys, (max(1, keys // 50),), device="cuda", generator=g)] = torch.nan
        q[1::7, 5] = torch.nan
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.randint(0, keys) for _ in range(requests - 1)), keys]
    rows = [0, *sorted(rng.randint(0, queries) for _ in range(requests - 1)), queries]
    ks, ke = torch.zeros(queries, dtype=torch.int32), torch.zeros(queries, dtype=torch.int32)
    for i in range(requests):
        n = rows[i + 1] - rows[i]
        ks[rows[i] : rows[i + 1]] = cuts[i]
        ends = torch.arange(n, dtype=torch.int32) + (cuts[i + 1] - n + 1)
        ke[rows[i] : rows[i + 1]] = ends.clamp(min=cuts[i], max=cuts[i + 1])
    fp8 = torch.float8_e4m3fn
    return q.to(fp8), k.to(fp8), scale.float().contiguous(), weights.contiguous(), ks.cuda(), ke.cuda()
