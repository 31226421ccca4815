# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled line's indexer query packing, upstream's kernel and ours, in Triton's interpreter.

A script, see test_fused_q_compiled.py. Prints one JSON row per case: bytes in which the kernels differ, and
how far the op is from the same arithmetic in PyTorch. NaN is left to the GPU test, as in
fused_q_interpreted.py.
"""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fused_q_interpreted import convert_as_the_card, fill, unequal
from triton.runtime import interpreter
from vllm.dsa.fused_q import compiled
from vllm.dsa.fused_q.reference import rope
from vllm.model_executor.layers import sparse_attn_indexer as upstream

FP8 = torch.float8_e4m3fn
HEADS, MAX_POS = 5, 32


def reference(positions, q, cache, weights, softmax_scale, head_scale, is_neox):
    """What upstream's kernel computes, one step a line."""
    turned = rope(q.float(), cache[positions], not is_neox)
    turned = torch.cat((turned[..., :64].bfloat16().float(), turned[..., 64:]), -1)
    scale = turned.abs().amax(-1).clamp_min(1e-10) * (1.0 / 448.0)
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    packed = (turned / scale[..., None]).clamp(-448.0, 448.0).to(FP8)
    return packed, weights.float() * scale * softmax_scale * head_scale


def run(tokens, kind, is_neox, cache_dtype):
    g = torch.Generator().manual_seed(tokens)
    angle = torch.rand(MAX_POS, 32, generator=g) * 6.3
    cache = torch.cat((angle.cos(), angle.sin()), -1).to(cache_dtype)
    q = fill(torch.empty(tokens, HEADS, 128, dtype=torch.bfloat16), kind, g)
    q.masked_fill_(q.isinf(), 3e38)  # rotated, an infinity is NaN
    kw = torch.randn(tokens, 128 + HEADS, generator=g).bfloat16()
    positions = torch.randint(0, MAX_POS, (tokens,), generator=g)
    arguments = (positions, q, cache, kw[:, 128:], 128**-0.5, HEADS**-0.5, is_neox)
    theirs = upstream.fused_indexer_q_rope_quant(*arguments)
    ours = torch.ops.vllm.dsa_pack_index_q(*arguments)
    wanted, pairs = reference(*arguments), list(zip(ours, theirs, strict=True))
    in_double = torch.ops.vllm.dsa_pack_index_q(*arguments, True)
    scaled = reference(*arguments[:4], 1.0, 1.0, is_neox)[1].double() * arguments[4] * arguments[5]
    return {
        "kind": kind,
        "tokens": tokens,
        "is_neox": is_neox,
        "same_layout": [a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs],
        "differ": [unequal(a, b) for a, b in pairs],
        "in_double": [unequal(in_double[0], ours[0]), unequal(in_double[1], scaled.float())],
        "from_reference": [unequal(ours[0], wanted[0]), float((ours[1] - wanted[1]).abs().max())],
    }


def main():
    interpreter._convert_float = convert_as_the_card
    # The function asks for CUDA; the interpreter is none.
    platform = SimpleNamespace(is_cuda=lambda: True, fp8_dtype=lambda: FP8)
    upstream.current_platform = compiled.current_platform = platform
    launches = []
    real = compiled.launch.launch_index_q
    compiled.launch.launch_index_q = lambda *args: launches.append(1) or real(*args)
    kinds = ("random", "zeros", "huge", "tiny")
    for is_neox, kind in itertools.product((False, True), kinds):
        dtype = torch.bfloat16 if kind == "huge" else torch.float32
        print(json.dumps(run(4, kind, is_neox, dtype)), flush=True)
    print(json.dumps(run(7, "random", True, torch.bfloat16)), flush=True)
    assert len(launches) == 18
    # Too few tokens: upstream's kernel, which has the factors in float32.
    print(json.dumps(run(3, "random", True, torch.float32)), flush=True)
    assert len(launches) == 19


if __name__ == "__main__":
    main()
