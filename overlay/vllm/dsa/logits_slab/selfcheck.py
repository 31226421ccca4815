# SPDX-License-Identifier: Apache-2.0
"""The check before the buffer is used: DeepGEMM into it must give what DeepGEMM gives by itself.

Few small cases, run once per process and head count in the profile run, with the kernel that the engine then
uses. It is what keeps a DeepGEMM with another layout from being used with this one's sizes.
"""

from __future__ import annotations

import torch
from vllm.dsa.logits_slab.layout import START_ALIGNMENT, Layout
from vllm.utils import deep_gemm

#: (queries, keys): less than a tile, whole tiles, and odd sizes over several.
CASES = ((1, 5), (128, 1024), (37, 1301))
POISON = -12345.0
#: Elements before and behind the buffer that must stay as they are.
GUARD = 4096


def failure(layout: Layout, head_dim: int, device: torch.device) -> str | None:
    """Return why the buffer must not be used, or None.

    Args:
        layout: heads and layout as the engine will use them.
        head_dim: dimension of an index head.
        device: a CUDA device.
    """
    try:
        for queries, keys in CASES:
            wrong = compare(layout, queries, keys, head_dim, device)
            if wrong is not None:
                return f"the check at start-up failed: {queries} queries, {keys} keys: {wrong}"
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the check at start-up failed: {first}"
    return None


def compare(layout: Layout, queries: int, keys: int, head_dim: int, device: torch.device) -> str | None:
    """Run both ways on one random case and return what differs, or None."""
    generator = torch.Generator(device=device).manual_seed(queries * 100003 + keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = normal(queries, layout.heads, head_dim).to(torch.float8_e4m3fn)
    kv = (normal(keys, head_dim).to(torch.float8_e4m3fn), normal(keys).abs())
    weights = normal(queries, layout.heads)
    bounds = torch.randint(0, keys + 1, (2, queries), generator=generator, device=device, dtype=torch.int32)
    ks, ke = bounds.amin(0).contiguous(), bounds.amax(0).contiguous()
    rest = (keys,) if layout.compressed else (False,)

    expected = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, ks, ke, *rest)
    rows, stride = layout.shape(queries, keys)
    if expected.dtype != torch.float32 or expected.stride(0) != stride:
        return f"row stride {expected.stride(0)} of {expected.dtype}, expected {stride} of float32"
    whole = torch.full((2 * GUARD + rows * stride,), POISON, device=device)
    start = -whole.data_ptr() % START_ALIGNMENT // 4 + GUARD
    out = whole[start : start + rows * stride].view(rows, stride)
    deep_gemm.fp8_fp4_mqa_logits_out((q, None), kv, weights, ks, ke, *rest, out=out)

    column = torch.arange(keys, device=device)
    first, last = (ks - ks, ke - ks) if layout.compressed else (ks, ke)
    valid = (column >= first[:, None]) & (column < last[:, None])
    if not torch.equal(out[:queries, :keys][valid], expected[valid]):
        return "other logits"
    if not (whole[:start] == POISON).all() or not (whole[start + rows * stride :] == POISON).all():
        return "it wrote outside of the buffer"
    return None
