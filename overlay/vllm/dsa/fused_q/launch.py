# SPDX-License-Identifier: Apache-2.0
"""Decides between upstream's query packing kernel and the one in blocks of rows, and launches the latter."""

from __future__ import annotations

import torch
from vllm.dsa import features
from vllm.dsa.fused_q.index_kernel import index_q_rope_quant_kernel
from vllm.dsa.fused_q.kernel import fused_q_block_kernel
from vllm.platforms import current_platform
from vllm.triton_utils import triton

#: Token counts from which the block kernel is used, with and without an indexer. Measured on an H200
#: (bench/results/fused_q): with the indexer's rows it is never slower, without them it is 6 % slower at 16
#: tokens and faster from 64 on.
MIN_TOKENS_INDEXER = 1
MIN_TOKENS_NO_INDEXER = 64

#: The same on line 0.28.0, where the indexer's rows have a kernel of their own: up to 2 % slower for one
#: token, from 4 on not slower.
MIN_TOKENS_INDEX_Q = 4

#: Rows (token, head) per program and warps per program. With 4 warps a 32-row block of 32-element chunks
#: gives each thread exactly one 16-byte access per chunk.
INDEX_ROWS = 32
PE_ROWS = 32
NOPE_ROWS = 8
NUM_WARPS = 4

_FP8_MAX = 448.0


_reported = False


def try_launch(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    mqa_q: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_q_fp8: torch.Tensor,
    index_weights_out: torch.Tensor,
    *,
    has_indexer: bool,
    index_rope_interleave: bool,
    quantize_mqa: bool,
) -> bool:
    """Fill the outputs as `launch` does if this call is one for the block kernel, and say whether it was.

    The decision takes host data only: token count, shapes and types. Called with the arguments that
    upstream's ``fused_q`` gives to its CuTeDSL kernel, after that kernel was ruled out.
    """
    if not current_platform.is_cuda():
        return False  # no line per worker: auto is the default, and the start-up line says why
    if positions.shape[0] < (MIN_TOKENS_INDEXER if has_indexer else MIN_TOKENS_NO_INDEXER):
        return False
    reason = unsupported(
        q_pe,
        q_pe_cos_sin_cache,
        index_q,
        index_q_cos_sin_cache,
        ql_nope,
        has_indexer=has_indexer,
        quantize_mqa=quantize_mqa,
    )
    if reason is not None:
        features.report_declined("fused_q", reason)
        return False
    launch(
        positions,
        q_pe,
        q_pe_cos_sin_cache,
        ql_nope,
        q_scale,
        mqa_q,
        index_q,
        index_q_cos_sin_cache,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
        index_q_fp8,
        index_weights_out,
        has_indexer=has_indexer,
        index_rope_interleave=index_rope_interleave,
        quantize_mqa=quantize_mqa,
        use_pdl=current_platform.is_arch_support_pdl(),
    )
    report_use()
    return True


def report_use() -> None:
    """Say that the kernel is used, once: a count per layer would be paid in every eager decode step."""
    global _reported
    if not _reported:
        _reported = True
        features.report_active("fused_q")


def unsupported(
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    ql_nope: torch.Tensor,
    *,
    has_indexer: bool,
    quantize_mqa: bool,
) -> str | None:
    """Why the block kernel does not cover these tensors, or None.

    A row is cut into chunks of half the rotary dimension, so that must be a power of two of at least 16, and
    an indexer head two or four such chunks. As in upstream's kernel the last dimension has unit stride.
    """
    half = q_pe_cos_sin_cache.shape[-1] // 2
    if not _is_chunk(half) or q_pe.shape[-1] != 2 * half:
        return f"rotary dimension {q_pe.shape[-1]} of the query"
    if q_pe.dtype != torch.bfloat16 or ql_nope.dtype != torch.bfloat16:
        return f"query of {q_pe.dtype}"
    if quantize_mqa and ql_nope.shape[-1] > 1024:
        return f"latent dimension {ql_nope.shape[-1]}"
    if not has_indexer:
        return None
    half = index_q_cos_sin_cache.shape[-1] // 2
    if not _is_chunk(half) or index_q.shape[-1] not in (2 * half, 4 * half):
        return f"indexer head of {index_q.shape[-1]} with rotary dimension {2 * half}"
    return None if index_q.dtype == torch.bfloat16 else f"indexer query of {index_q.dtype}"


def _is_chunk(half: int) -> bool:
    return half >= 16 and half & (half - 1) == 0


def launch(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    mqa_q: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_q_fp8: torch.Tensor,
    index_weights_out: torch.Tensor,
    *,
    has_indexer: bool,
    index_rope_interleave: bool,
    quantize_mqa: bool,
    use_pdl: bool,
) -> None:
    """Fill ``mqa_q``, ``index_q_fp8`` and ``index_weights_out`` with the bits upstream's kernel would write.

    Shapes, with T tokens: ``positions`` [T] int64; ``q_pe`` [T, heads, rope]; ``ql_nope`` [T, heads, nope];
    ``mqa_q`` [T, heads, nope + rope] FP8 when ``quantize_mqa``, else [T, heads, rope] in the query's type;
    ``index_q`` and ``index_q_fp8`` [T, index heads, index dim]; ``index_weights`` [T, index heads], output
    float32; the cos/sin caches [positions, rope], cosines first. Strides are free; the last one is 1.
    """
    num_tokens = positions.shape[0]
    num_q_heads = q_pe.shape[1]
    num_index_q_heads = index_q.shape[1]
    nope_dim = ql_nope.shape[2] if quantize_mqa else 0
    index_blocks = triton.cdiv(num_tokens * num_index_q_heads, INDEX_ROWS) if has_indexer else 0
    pe_blocks = triton.cdiv(num_tokens * num_q_heads, PE_ROWS)
    nope_blocks = triton.cdiv(num_tokens * num_q_heads, NOPE_ROWS) if quantize_mqa else 0
    pdl = {"launch_pdl": True} if use_pdl else {}
    fused_q_block_kernel[(index_blocks + pe_blocks + nope_blocks,)](
        num_tokens,
        index_blocks,
        pe_blocks,
        positions,
        q_pe,
        q_pe.stride(0),
        q_pe.stride(1),
        q_pe_cos_sin_cache,
        q_pe_cos_sin_cache.stride(0),
        index_q,
        index_q.stride(0),
        index_q.stride(1),
        index_q_cos_sin_cache,
        index_q_cos_sin_cache.stride(0),
        index_q_fp8,
        index_q_fp8.stride(0),
        index_q_fp8.stride(1),
        ql_nope,
        # Without the NoPE role these strides are unused; constants keep them out of specialisation.
        ql_nope.stride(0) if quantize_mqa else 16,
        ql_nope.stride(1) if quantize_mqa else 16,
        mqa_q,
        mqa_q.stride(0),
        mqa_q.stride(1),
        q_scale,
        index_weights,
        index_weights.stride(0),
        float(index_weights_softmax_scale),
        float(index_weights_head_scale),
        index_weights_out,
        index_weights_out.stride(0),
        NUM_Q_HEADS=max(num_q_heads, 1),  # no heads: no blocks of them either, but rows are divided by it
        Q_PE_HALF_ROT_DIM=q_pe_cos_sin_cache.shape[-1] // 2,
        NUM_INDEX_Q_HEADS=num_index_q_heads,
        INDEX_Q_HALF_ROT_DIM=index_q_cos_sin_cache.shape[-1] // 2,
        INDEX_Q_HEAD_DIM=index_q.shape[2],
        QL_NOPE_DIM=nope_dim,
        QL_NOPE_BLOCK=triton.next_power_of_2(nope_dim) if quantize_mqa else 1,
        HAS_INDEXER=has_indexer,
        INDEX_ROPE_INTERLEAVE=index_rope_interleave,
        QUANTIZE_MQA=quantize_mqa,
        USE_PDL=use_pdl,
        FP8_MAX=_FP8_MAX,
        INDEX_ROWS=INDEX_ROWS,
        PE_ROWS=PE_ROWS,
        NOPE_ROWS=NOPE_ROWS,
        num_warps=NUM_WARPS,
        **pdl,
    )


def launch_index_q(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
    q_fp8: torch.Tensor,
    weights_out: torch.Tensor,
    in_double: bool = False,
) -> None:
    """The compiled line's indexer query: fill ``q_fp8`` and ``weights_out`` as upstream's kernel would.

    ``positions`` [T] int64; ``q`` and ``q_fp8`` [T, heads, 128]; ``cos_sin_cache`` [positions, 64];
    ``weights`` and ``weights_out`` (float32) [T, heads]. ``in_double``: multiply the weights with their two
    factors in float64, as upstream's kernel does under Inductor.
    """
    num_tokens, num_heads = q.shape[0], q.shape[1]
    index_q_rope_quant_kernel[((num_tokens * num_heads + INDEX_ROWS - 1) // INDEX_ROWS,)](
        num_tokens,
        positions,
        q,
        q.stride(0),
        q.stride(1),
        cos_sin_cache,
        cos_sin_cache.stride(0),
        q_fp8,
        q_fp8.stride(0),
        q_fp8.stride(1),
        weights,
        weights.stride(0),
        weights.stride(1),
        weights_out,
        weights_out.stride(0),
        weights_out.stride(1),
        SOFTMAX_SCALE=float(softmax_scale),
        HEAD_SCALE=float(head_scale),
        IN_DOUBLE=in_double,
        NUM_HEADS=num_heads,
        FP8_MIN=-_FP8_MAX,
        FP8_MAX=_FP8_MAX,
        IS_NEOX=is_neox,
        ROWS=INDEX_ROWS,
        num_warps=NUM_WARPS,
    )
