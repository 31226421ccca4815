# SPDX-License-Identifier: Apache-2.0
"""Calls of what stands beside the query packing at prefill, with the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fused_q_cases import Shape, call_ours, make_inputs, poisoned_outputs

WORKING_SET = 256 << 20  # as in fused_q.py


def cases(kernels: Any, launch: Any, caches: Any) -> Iterator[tuple[str, int, list[Callable[[], Any]]]]:
    """Name, fewest bytes of a call, and calls on tensors of their own.

    Upstream's ``_fused_norm_rope_kernel``, and our packing kernel where a layer has no indexer, so that only
    the rotary part of the MLA query is left.
    """
    for tokens in (1, 64, 512, 4096, 16384):
        calls, nbytes = norm_rope_calls(kernels, tokens, caches)
        yield f"neighbour _fused_norm_rope_kernel T={tokens}", nbytes, calls
    for shape in (Shape(16, 64, False, has_indexer=False), Shape(128, 64, False, has_indexer=False)):
        for tokens in (4096, 8192, 16384):
            calls = []
            for _ in range(max(4, min(64, -(-WORKING_SET // shape.bytes(tokens))))):
                inputs = make_inputs(shape, tokens, caches)
                outputs = poisoned_outputs(shape, inputs)
                calls.append(
                    lambda inputs=inputs, outputs=outputs, shape=shape: call_ours(
                        launch, shape, inputs, outputs
                    )
                )
            yield f"ours T={tokens} heads={shape.heads} indexer=no", shape.bytes(tokens), calls


def copies_of(nbytes: int, number: int) -> list[Callable[[], Any]]:
    """As many elementwise kernels that read half of the bytes and write as many, each on its own tensors."""
    calls = []
    for _ in range(number):
        src = torch.zeros(nbytes // 16, dtype=torch.int64, device="cuda")
        dst = torch.empty_like(src)
        calls.append(lambda src=src, dst=dst: torch.bitwise_not(src, out=dst))
    return calls


def norm_rope_calls(kernels: Any, tokens: int, caches: Any) -> tuple[list[Callable[[], Any]], int]:
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = tokens // 64 + 2
    # Read and write the latents, rotate, write both caches, clear the top-k rows.
    nbytes = tokens * (2 * 2 * (1536 + 512 + 64) + 576 * 2 + 128 * 2 + 132 + 4 * 2048 + 2 * 256 + 24)
    calls = []
    for _ in range(max(4, min(32, WORKING_SET // nbytes))):
        qkv = torch.randn(tokens, 1536 + 512 + 64, **bf16)
        q_c, kv_c, k_pe = qkv.split([1536, 512, 64], dim=-1)
        kw = torch.randn(tokens, 192, **bf16)
        slots = torch.randperm(blocks * 64, device="cuda")[:tokens]
        args: dict[str, Any] = dict(  # noqa: C408 - parameters of the function below
            positions=torch.arange(tokens, device="cuda"),
            q_c=q_c,
            q_rms_norm_w=torch.ones(1536, **bf16),
            q_rms_eps=1e-6,
            kv_c=kv_c,
            kv_rms_norm_w=torch.ones(512, **bf16),
            kv_rms_eps=1e-6,
            k_pe=k_pe,
            k_rope_cos_sin_cache=caches[0],
            index_k=kw[:, :128],
            index_k_layer_norm_w=torch.ones(128, device="cuda"),
            index_k_layer_norm_bias=torch.zeros(128, device="cuda"),
            index_k_layer_norm_eps=1e-6,
            index_k_rope_cos_sin_cache=caches[1],
            topk_indices_buffer=torch.empty(tokens, 2048, dtype=torch.int32, device="cuda"),
            slot_mapping=slots,
            indexer_k_cache=torch.zeros(blocks, 64, 132, dtype=torch.uint8, device="cuda"),
            mla_kv_cache=torch.zeros(blocks, 64, 576, **bf16),
            mla_k_scale=torch.ones(1, device="cuda"),
            q_c_out=torch.empty_like(q_c),
            kv_c_out=torch.empty_like(kv_c),
            k_pe_out=torch.empty_like(k_pe),
        )
        calls.append(lambda args=args: kernels.fused_norm_rope(**args))
    return calls, nbytes
