# SPDX-License-Identifier: Apache-2.0
"""Bit comparison of the two query packing kernels on the GPU, on random and on hostile inputs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from fused_q_cases import (
    Shape,
    call_ours,
    call_ours_0_28,
    call_upstream,
    call_upstream_0_28,
    cos_sin_cache,
    extract_kernel,
    make_inputs,
    poisoned_outputs,
)

NAMES = ("index_q_fp8", "index_weights_out", "mqa_q")


def every_bf16(rows: int, cols: int) -> torch.Tensor:
    """Random bf16 bit patterns: all exponents, denormals, both zeros, infinities and NaNs."""
    bits = torch.randint(-32768, 32768, (rows, cols), device="cuda", dtype=torch.int32)
    return bits.to(torch.int16).view(torch.bfloat16)


def every_scale(rows: int, cols: int) -> torch.Tensor:
    """Row r has the bf16 of bit pattern r as its largest magnitude, so every reachable scale occurs."""
    top = (
        torch.arange(rows, device="cuda", dtype=torch.int32)
        .remainder(32768)
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    x = top[:, None] * torch.rand(rows, cols, device="cuda", dtype=torch.float32).mul(2).sub(1).to(
        torch.bfloat16
    )
    place = torch.randint(0, cols, (rows,), device="cuda")
    return x.scatter_(1, place[:, None], top[:, None])


def hostile(shape: Shape, inputs: dict[str, Any], kind: str) -> None:
    def fill(x: torch.Tensor | None) -> None:
        if x is None:
            return
        rows, cols = x.shape[:-1].numel(), x.shape[-1]
        if kind == "patterns":
            new = every_bf16(rows, cols)
        elif kind == "scales":
            new = every_scale(rows, cols)
        elif kind == "zeros":
            new = torch.zeros(rows, cols, device="cuda", dtype=torch.bfloat16)
            new[::2] = -0.0
        elif kind == "denormals":
            new = (every_bf16(rows, cols).view(torch.int16) & -32641).view(
                torch.bfloat16
            )  # exponent bits off
        else:  # "huge"
            new = torch.randn(rows, cols, device="cuda").mul(1.5e38).to(torch.bfloat16)
        x.copy_(new.view(x.shape))

    for name in ("q_pe", "index_q", "ql_nope", "index_weights"):
        fill(inputs[name])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bytes differ."""
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


KINDS = [("random", 1), ("random", 7), ("random", 1000), ("patterns", 513), ("scales", 1024)]
KINDS += [("zeros", 33), ("denormals", 257), ("huge", 257)]


def prepared(shape: Shape, kind: str, tokens: int, caches: Any) -> dict[str, Any]:
    inputs = make_inputs(shape, tokens, caches)
    if kind != "random":
        hostile(shape, inputs, kind)
    elif tokens == 1000:
        inputs["positions"] = torch.randint(0, 163840, (tokens,), device="cuda")
        inputs["positions"][::9] = 0  # padded rows
    return inputs


def report(shape: Shape, kind: str, tokens: int, want: Any, got: Any, compared: Any, note: str = "") -> int:
    wrong = {NAMES[i]: n for i in compared if (n := same_bits(want[i], got[i]))}
    if wrong:
        print(f"DIFFER {shape} {kind} T={tokens} {note}: bytes {wrong}", flush=True)
    return int(bool(wrong))


def run(kernels: Any, launch: Any, line_0_28: Path | None, shard: tuple[int, int] = (0, 1)) -> int:
    """Compare; print each difference. Returns the number of cases that differ."""
    caches = {t: (cos_sin_cache(t), cos_sin_cache(t)) for t in (torch.float32, torch.bfloat16)}
    bad = cases = 0
    shapes = [
        Shape(16, 64, interleave, fp8_query, has_indexer, dtype)
        for interleave, fp8_query, has_indexer, dtype in product(
            (False, True), (False, True), (True, False), caches
        )
        if has_indexer or not interleave  # without an indexer its rotation style has no effect
    ]
    shapes += [Shape(8, 32, True), Shape(8, 32, True, has_indexer=False), Shape(128, 64, False)]
    shapes += [Shape(5, 24, False, fp8_query=True), Shape(5, 24, True)]  # head counts that divide no block
    for shape, (kind, tokens) in product(shapes[shard[0] :: shard[1]], KINDS):
        scales = (
            (0.37, 1.0, 1e-30, 1e38, 0.0, float("inf")) if shape.fp8_query and kind == "patterns" else (0.37,)
        )
        for q_scale in scales:
            inputs = prepared(shape, kind, tokens, caches[shape.cache_dtype])
            inputs["q_scale"].fill_(q_scale)
            want = call_upstream(kernels, shape, inputs)
            got = call_ours(launch, shape, inputs, poisoned_outputs(shape, inputs))
            compared = range(3) if shape.has_indexer else (2,)
            bad += report(shape, kind, tokens, want, got, compared, f"q_scale={q_scale}")
            cases += 1
    if line_0_28 is not None:
        kernel = extract_kernel(line_0_28, "_fused_indexer_q_rope_quant_kernel")
        compiled = [
            Shape(1, heads, inter, cache_dtype=t)
            for heads, inter, t in product((64, 24), (False, True), caches)
        ]
        for shape, (kind, tokens) in product(compiled[shard[0] :: shard[1]], KINDS):
            inputs = prepared(shape, kind, tokens, caches[shape.cache_dtype])
            want, got = poisoned_outputs(shape, inputs), poisoned_outputs(shape, inputs)
            call_upstream_0_28(kernel, shape, inputs, want)
            call_ours_0_28(launch, shape, inputs, got)
            bad += report(shape, kind, tokens, want, got, (0, 1), "line 0.28.0")
            cases += 1
    print(f"check: {cases} cases, {bad} differ")
    return bad
