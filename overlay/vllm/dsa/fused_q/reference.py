# SPDX-License-Identifier: Apache-2.0
"""Query packing in plain PyTorch: what both kernels compute, one step a line. For tests only."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def rope(x: torch.Tensor, cos_sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Rotate the first ``cos_sin.shape[-1]`` columns.

    Args:
        x: float32 [T, heads, dim].
        cos_sin: [T, rope]: cosines of each pair, then sines.
        interleave: pairs are neighbours (GLM-5.x, MLA query); otherwise the two halves (NeoX).
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = (part.float()[:, None] for part in cos_sin.split(half, dim=-1))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleave:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        pair = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    else:
        x1, x2 = turned[..., :half], turned[..., half:]
        pair = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return torch.cat((pair, rest), dim=-1)


def pack_index_q(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    interleave: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 indexer query [T, heads, dim] and the float32 head weights [T, heads].

    Each row is divided by the power of two that brings its largest magnitude to at most 448; the scale is
    folded into the head's weight.
    """
    q = rope(index_q.float(), cos_sin_cache[positions], interleave)
    amax = q.abs().amax(dim=-1)
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(1e-4) / FP8_MAX)))
    q_fp8 = (q / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q_fp8, weights.float() * scale * softmax_scale * head_scale


def pack_mqa_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    quantize: bool,
) -> torch.Tensor:
    """Return ``[ql_nope; rotated q_pe] / q_scale`` in FP8, or the rotated ``q_pe`` in its own type."""
    turned = rope(q_pe.float(), cos_sin_cache[positions], interleave=True)
    if not quantize:
        return turned.to(q_pe.dtype)
    both = torch.cat((ql_nope.float(), turned), dim=-1) / q_scale
    return both.clamp(-FP8_MAX, FP8_MAX).to(FP8)
