# SPDX-License-Identifier: Apache-2.0
"""Runs both query packing kernels in Triton's interpreter and compares them; a script, see test_fused_q.py.

Prints one JSON row per case: how many bytes differ between the kernels for each output, and the distance from
the PyTorch reference. NaN is left to the GPU test: numpy's maximum keeps NaN, the card's drops it.
"""

import itertools
import json

import numpy as np
import torch
from triton.runtime import interpreter
from vllm.dsa.fused_q import launch, reference
from vllm.models.deepseek_v32.common import kernels

FP8 = torch.float8_e4m3fn
ROUNDED = {"fp8e4nv": (FP8, torch.uint8), "bf16": (torch.bfloat16, torch.int16)}
convert_float = interpreter._convert_float
MAX_POS = 64


def convert_as_the_card(values, from_type, to_type, mode):
    """The interpreter loses the carry when a mantissa rounds up to a power of two, and subnormal bfloat16."""
    if from_type.name == "bf16" and to_type.name == "fp32":
        return (values.astype(np.uint32) << 16).view(np.uint32)
    if from_type.name != "fp32" or to_type.name not in ROUNDED:
        return convert_float(values, from_type, to_type, mode)
    x, (rounded, bits) = torch.from_numpy(np.ascontiguousarray(values)), ROUNDED[to_type.name]
    if rounded is FP8:
        x = x.clamp(-448.0, 448.0)  # NaN stays NaN
    return x.to(rounded).view(bits).numpy().view(f"uint{8 * rounded.itemsize}").reshape(values.shape)


def poisoned(*size, dtype):
    out = torch.empty(*size, dtype=dtype)
    out.view(torch.uint8).fill_(0x7F)
    return out


def fill(x, kind, generator):
    if kind == "zeros":
        x.zero_()[..., ::2] = -0.0
        return x
    x.normal_(generator=generator)
    if kind == "huge":
        x.mul_(1e37)
        x[0, 0] = float("inf")
    if kind == "tiny":
        x.mul_(1e-39)
    return x


def steps(a, b):
    """Largest distance in representable values; for the float32 weights the largest relative difference."""
    if a.dtype == torch.float32:
        return float(((a - b).abs() / b.abs().clamp_min(1e-30)).max())
    size = torch.int8 if a.dtype == FP8 else torch.int16
    top = torch.iinfo(size).max

    def order(x):
        bits = x.contiguous().view(size).long()
        return torch.where(bits < 0, -(bits & top), bits)

    return int((order(a) - order(b)).abs().max())


def unequal(a, b):
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def index_alone(positions, cache, index_q, weights, q_scale, softmax_scale, head_scale, interleave):
    """The indexer's outputs of both kernels when the MLA query has no heads, as the overlap calls them."""
    no_heads = index_q[:, :0]
    arguments = (positions, no_heads[..., : cache.shape[-1]], cache)
    upstream = kernels.fused_q(
        *arguments,
        index_q,
        cache,
        no_heads,
        q_scale,
        weights,
        softmax_scale,
        head_scale,
        has_indexer=True,
        index_rope_interleave=interleave,
        quantize_mqa=False,
    )
    ours = poisoned(*index_q.shape, dtype=FP8), poisoned(*index_q.shape[:2], dtype=torch.float32)
    launch.launch(
        *arguments,
        no_heads,
        q_scale,
        torch.empty_like(arguments[1]),
        index_q,
        cache,
        weights,
        softmax_scale,
        head_scale,
        *ours,
        has_indexer=True,
        index_rope_interleave=interleave,
        quantize_mqa=False,
        use_pdl=False,
    )
    return upstream[:2], ours


def run(
    tokens, heads, index_heads, rope, index_dim, nope, kind, interleave, fp8_query, has_indexer, cache_dtype
):
    g = torch.Generator().manual_seed(tokens)
    angle = torch.rand(MAX_POS, rope // 2, generator=g) * 6.3
    cache = torch.cat((angle.cos(), angle.sin()), -1).to(cache_dtype)
    # The layouts of the model: q_pe a slice, ql_nope a transposed product, the weights a slice.
    q = fill(torch.empty(tokens, heads, nope + rope, dtype=torch.bfloat16), kind, g)
    absorbed = fill(torch.empty(heads, tokens, nope, dtype=torch.bfloat16), kind, g).transpose(0, 1)
    index_q = fill(torch.empty(tokens, index_heads, index_dim, dtype=torch.bfloat16), kind, g)
    kw = torch.randn(tokens, index_dim + index_heads, generator=g).bfloat16()
    positions = torch.randint(0, MAX_POS, (tokens,), generator=g)
    q_scale = torch.tensor([0.37])
    softmax_scale, head_scale = index_dim**-0.5, index_heads**-0.5
    q_pe, weights = q[..., nope:], kw[:, index_dim:]
    ql_nope = absorbed if fp8_query else q[..., :nope]
    upstream = kernels.fused_q(
        positions,
        q_pe,
        cache,
        index_q if has_indexer else None,
        cache if has_indexer else None,
        ql_nope,
        q_scale,
        weights if has_indexer else None,
        softmax_scale,
        head_scale,
        has_indexer=has_indexer,
        index_rope_interleave=interleave,
        quantize_mqa=fp8_query,
    )
    ours = (
        poisoned(tokens, index_heads, index_dim, dtype=FP8),
        poisoned(tokens, index_heads, dtype=torch.float32),
        poisoned(tokens, heads, nope + rope, dtype=FP8) if fp8_query else torch.full_like(q_pe, float("nan")),
    )
    launch.launch(
        positions,
        q_pe,
        cache,
        ql_nope,
        q_scale,
        ours[2],
        index_q,
        cache,
        weights,
        softmax_scale,
        head_scale,
        ours[0],
        ours[1],
        has_indexer=has_indexer,
        index_rope_interleave=interleave,
        quantize_mqa=fp8_query,
        use_pdl=False,
    )
    alone = index_alone(positions, cache, index_q, weights, q_scale, softmax_scale, head_scale, interleave)
    wanted = [None, None, reference.pack_mqa_q(positions, q_pe, cache, ql_nope, q_scale, fp8_query)]
    if has_indexer:
        wanted[:2] = reference.pack_index_q(
            positions, index_q, cache, weights, softmax_scale, head_scale, interleave
        )
    row = {"kind": kind, "interleave": interleave, "fp8_query": fp8_query, "has_indexer": has_indexer}
    row |= {"tokens": tokens, "cache": str(cache_dtype), "differ": {}, "from_reference": {}}
    if has_indexer:
        pairs = [pair for made in alone for pair in zip(made, upstream[:2], strict=True)]
        row["index_alone"] = sum(unequal(mine, both) for mine, both in pairs)
    for name, mine, theirs, want in zip(("index_q", "weights", "mqa_q"), ours, upstream, wanted, strict=True):
        if want is None:
            continue
        row["differ"][name] = unequal(mine, theirs)
        if kind != "huge":  # infinities: the reference keeps NaN where the kernels drop it
            row["from_reference"][name] = steps(mine, want)
    return row


def main():
    interpreter._convert_float = convert_as_the_card
    options = itertools.product((False, True), (False, True), (True, False))
    for interleave, fp8_query, has_indexer in options:
        if interleave and not has_indexer:
            continue
        for kind, tokens, dtype in (
            ("random", 3, torch.float32),
            ("zeros", 2, torch.float32),
            ("huge", 2, torch.bfloat16),
            ("tiny", 2, torch.float32),
        ):
            # Head counts that divide no block, half a block of rows left over.
            args = (tokens, 5, 12, 32, 64, 48, kind, interleave, fp8_query, has_indexer, dtype)
            print(json.dumps(run(*args)), flush=True)
    # The model's own dimensions, and an indexer head that is rotary throughout.
    print(json.dumps(run(2, 8, 32, 64, 128, 128, "random", True, True, True, torch.bfloat16)), flush=True)
    print(json.dumps(run(2, 4, 8, 64, 64, 64, "random", False, False, True, torch.float32)), flush=True)


if __name__ == "__main__":
    main()
