# SPDX-License-Identifier: Apache-2.0
"""Query packing in blocks of rows: RoPE and FP8 quantisation of the indexer's and the MLA queries.

Same function as ``_fused_q_kernel`` of ``vllm/models/deepseek_v32/common/kernels.py`` (vLLM 0.33.0), bit
for bit. Upstream's runs one single-warp program per token, role and head, each with 2-byte gathers, so at
prefill the card is busy starting programs. Here one program takes a block of (token, head) rows of one role
and every access is a run of neighbouring elements, 16 bytes per thread on the input side.

A row is cut into chunks of ``HALF`` elements that all share one register layout. NeoX rotation then pairs
chunk 0 with chunk 1 and the row maximum is an elementwise maximum of the chunks followed by one reduction:
no data moves between threads apart from that reduction.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from vllm.triton_utils import tl, triton


# Which product of a rotation is fused into the addition is up to the compiler, and it decides differently for
# upstream's two rotations. The last bit depends on it, so both are written out here as Triton 3.6 and 3.8
# compile upstream's kernel. "* -1.0" and not "-": Triton's unary minus is "0 - x", which turns -0 into +0.
@triton.jit
def _rotate_fusing_cos(x1, x2, cos, sin):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)``; the cosine products are fused (upstream's index_q)."""
    return tl.fma(x1, cos, x2 * sin * -1.0), tl.fma(x2, cos, x1 * sin)


@triton.jit
def _rotate_fusing_sin(x1, x2, cos, sin):
    """As ``_rotate_fusing_cos``, but the second sum fuses its sine product (upstream's q_pe)."""
    return tl.fma(x1, cos, x2 * sin * -1.0), tl.fma(x1, sin, x2 * cos)


@triton.jit
def _split_pairs(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] to its even and its odd columns, each [ROWS, WIDTH / 2]."""
    return tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))


@triton.jit
def _join_pairs(even, odd, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.reshape(tl.join(even, odd), (ROWS, WIDTH))


@triton.jit
def _pack_index_rows(
    block_idx,
    num_tokens,
    pos_ptr,
    q_ptr,
    q_stride0,
    q_stride1,
    cos_sin_ptr,
    cos_sin_stride,
    out_ptr,
    out_stride0,
    out_stride1,
    weights_ptr,
    weights_stride,
    weights_softmax_scale,
    weights_head_scale,
    weights_out_ptr,
    weights_out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ROWS: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """Rotate and quantise ``ROWS`` rows of the indexer query and fold the scale into the head weight."""
    row = block_idx.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    keep = token < num_tokens
    keep2 = keep[:, None]
    pos = tl.load(pos_ptr + token, mask=keep, other=0)
    weight = tl.load(weights_ptr + token * weights_stride + head, mask=keep, other=0.0)
    src = (q_ptr + token * q_stride0 + head * q_stride1)[:, None]
    dst = (out_ptr + token * out_stride0 + head * out_stride1)[:, None]
    col = tl.arange(0, HALF)[None, :]
    cs = (cos_sin_ptr + pos * cos_sin_stride)[:, None]

    a = tl.load(src + col, mask=keep2, other=0.0).to(tl.float32)
    b = tl.load(src + HALF + col, mask=keep2, other=0.0).to(tl.float32)
    if INTERLEAVE:
        pair = tl.arange(0, HALF // 2)[None, :]
        cos_a = tl.load(cs + pair, mask=keep2, other=0.0).to(tl.float32)
        sin_a = tl.load(cs + HALF + pair, mask=keep2, other=0.0).to(tl.float32)
        cos_b = tl.load(cs + HALF // 2 + pair, mask=keep2, other=0.0).to(tl.float32)
        sin_b = tl.load(cs + HALF + HALF // 2 + pair, mask=keep2, other=0.0).to(tl.float32)
        even, odd = _split_pairs(a, ROWS, HALF)
        even, odd = _rotate_fusing_cos(even, odd, cos_a, sin_a)
        a = _join_pairs(even, odd, ROWS, HALF)
        even, odd = _split_pairs(b, ROWS, HALF)
        even, odd = _rotate_fusing_cos(even, odd, cos_b, sin_b)
        b = _join_pairs(even, odd, ROWS, HALF)
    else:
        cos = tl.load(cs + col, mask=keep2, other=0.0).to(tl.float32)
        sin = tl.load(cs + HALF + col, mask=keep2, other=0.0).to(tl.float32)
        a, b = _rotate_fusing_cos(a, b, cos, sin)

    top = tl.maximum(tl.abs(a), tl.abs(b))
    # Two more chunks when RoPE covers half of the head (all DSA models), none when it covers it all.
    if HEAD_DIM == 4 * HALF:
        c = tl.load(src + 2 * HALF + col, mask=keep2, other=0.0).to(tl.float32)
        d = tl.load(src + 3 * HALF + col, mask=keep2, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.maximum(tl.abs(c), tl.abs(d)))
    amax = tl.max(top, axis=1)

    scale = tl.div_rn(tl.maximum(amax, 1e-4), FP8_MAX)
    scale = tl.math.exp2(tl.math.ceil(tl.math.log2(scale)))
    # The scale is a power of two between 2^-22 and 2^120 (or infinite), so its reciprocal is exact and the
    # product rounds exactly as upstream's correctly rounded division does.
    inv = tl.div_rn(1.0, scale)[:, None]
    fp8_dtype = tl.float8e4nv
    tl.store(dst + col, (a * inv).to(fp8_dtype), mask=keep2)
    tl.store(dst + HALF + col, (b * inv).to(fp8_dtype), mask=keep2)
    if HEAD_DIM == 4 * HALF:
        tl.store(dst + 2 * HALF + col, (c * inv).to(fp8_dtype), mask=keep2)
        tl.store(dst + 3 * HALF + col, (d * inv).to(fp8_dtype), mask=keep2)

    weight = weight.to(tl.float32)
    weight *= scale
    weight *= weights_softmax_scale
    weight *= weights_head_scale
    tl.store(weights_out_ptr + token * weights_out_stride + head, weight, mask=keep)


@triton.jit
def _rope_query_rows(
    block_idx,
    num_tokens,
    pos_ptr,
    q_ptr,
    q_stride0,
    q_stride1,
    cos_sin_ptr,
    cos_sin_stride,
    scale_ptr,
    out_ptr,
    out_stride0,
    out_stride1,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Interleaved RoPE on ``ROWS`` rows of ``q_pe``, quantised by ``scale`` or kept in the query's type."""
    row = block_idx.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    keep = token < num_tokens
    keep2 = keep[:, None]
    pos = tl.load(pos_ptr + token, mask=keep, other=0)
    src = (q_ptr + token * q_stride0 + head * q_stride1)[:, None]
    dst = (out_ptr + token * out_stride0 + head * out_stride1)[:, None]
    cs = (cos_sin_ptr + pos * cos_sin_stride)[:, None]
    if QUANTIZE:
        scale = tl.load(scale_ptr)
    for part in tl.static_range(2):
        col = part * HALF + tl.arange(0, HALF)[None, :]
        pair = part * (HALF // 2) + tl.arange(0, HALF // 2)[None, :]
        x = tl.load(src + col, mask=keep2, other=0.0).to(tl.float32)
        cos = tl.load(cs + pair, mask=keep2, other=0.0).to(tl.float32)
        sin = tl.load(cs + HALF + pair, mask=keep2, other=0.0).to(tl.float32)
        even, odd = _split_pairs(x, ROWS, HALF)
        even, odd = _rotate_fusing_sin(even, odd, cos, sin)
        if QUANTIZE:
            # Upstream divides with "/" here, not with div_rn: the approximate division is part of the bits.
            even = even / scale
            odd = odd / scale
        y = _join_pairs(even, odd, ROWS, HALF)
        tl.store(dst + col, y.to(out_ptr.dtype.element_ty), mask=keep2)


@triton.jit
def _quantize_nope_rows(
    block_idx,
    num_tokens,
    src_ptr,
    src_stride0,
    src_stride1,
    scale_ptr,
    out_ptr,
    out_stride0,
    out_stride1,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise ``ROWS`` rows of ``ql_nope`` by the scalar query scale."""
    row = block_idx.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    off = tl.arange(0, BLOCK)[None, :]
    keep = (token < num_tokens)[:, None] & (off < DIM)
    scale = tl.load(scale_ptr)
    src = (src_ptr + token * src_stride0 + head * src_stride1)[:, None]
    dst = (out_ptr + token * out_stride0 + head * out_stride1)[:, None]
    x = tl.load(src + off, mask=keep, other=0.0).to(tl.float32)
    tl.store(dst + off, (x / scale).to(out_ptr.dtype.element_ty), mask=keep)


# The token count and everything that follows from it must not take part in specialisation: a new batch size
# would otherwise compile a new kernel in the middle of serving.
@triton.jit(do_not_specialize=["num_tokens", "index_blocks", "pe_blocks"])
def fused_q_block_kernel(
    num_tokens,
    index_blocks,
    pe_blocks,
    pos_ptr,
    q_pe_ptr,
    q_pe_stride0,
    q_pe_stride1,
    q_pe_cos_sin_ptr,
    q_pe_cos_sin_stride,
    index_q_ptr,
    index_q_stride0,
    index_q_stride1,
    index_q_cos_sin_ptr,
    index_q_cos_sin_stride,
    index_q_fp8_ptr,
    index_q_fp8_stride0,
    index_q_fp8_stride1,
    ql_nope_ptr,
    ql_nope_stride0,
    ql_nope_stride1,
    mqa_q_ptr,
    mqa_q_stride0,
    mqa_q_stride1,
    q_scale_ptr,
    index_weights_ptr,
    index_weights_stride,
    index_weights_softmax_scale,
    index_weights_head_scale,
    index_weights_out_ptr,
    index_weights_out_stride,
    NUM_Q_HEADS: tl.constexpr,
    Q_PE_HALF_ROT_DIM: tl.constexpr,
    NUM_INDEX_Q_HEADS: tl.constexpr,
    INDEX_Q_HALF_ROT_DIM: tl.constexpr,
    INDEX_Q_HEAD_DIM: tl.constexpr,
    QL_NOPE_DIM: tl.constexpr,
    QL_NOPE_BLOCK: tl.constexpr,
    HAS_INDEXER: tl.constexpr,
    INDEX_ROPE_INTERLEAVE: tl.constexpr,
    QUANTIZE_MQA: tl.constexpr,
    USE_PDL: tl.constexpr,
    FP8_MAX: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    PE_ROWS: tl.constexpr,
    NOPE_ROWS: tl.constexpr,
):
    """One launch for all roles: ``index_blocks`` programs of indexer rows, ``pe_blocks`` of RoPE rows, then
    the NoPE rows (FP8 query only). Grid: (index_blocks + pe_blocks + nope_blocks,)."""
    pid = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_INDEXER:  # noqa: SIM102 - the outer condition is decided when compiling
        if pid < index_blocks:
            _pack_index_rows(
                pid,
                num_tokens,
                pos_ptr,
                index_q_ptr,
                index_q_stride0,
                index_q_stride1,
                index_q_cos_sin_ptr,
                index_q_cos_sin_stride,
                index_q_fp8_ptr,
                index_q_fp8_stride0,
                index_q_fp8_stride1,
                index_weights_ptr,
                index_weights_stride,
                index_weights_softmax_scale,
                index_weights_head_scale,
                index_weights_out_ptr,
                index_weights_out_stride,
                NUM_INDEX_Q_HEADS,
                INDEX_Q_HEAD_DIM,
                INDEX_Q_HALF_ROT_DIM,
                INDEX_ROPE_INTERLEAVE,
                INDEX_ROWS,
                FP8_MAX,
            )
            return
    pid -= index_blocks
    if pid < pe_blocks:
        _rope_query_rows(
            pid,
            num_tokens,
            pos_ptr,
            q_pe_ptr,
            q_pe_stride0,
            q_pe_stride1,
            q_pe_cos_sin_ptr,
            q_pe_cos_sin_stride,
            q_scale_ptr,
            mqa_q_ptr + QL_NOPE_DIM if QUANTIZE_MQA else mqa_q_ptr,
            mqa_q_stride0,
            mqa_q_stride1,
            NUM_Q_HEADS,
            Q_PE_HALF_ROT_DIM,
            QUANTIZE_MQA,
            PE_ROWS,
        )
        return
    if QUANTIZE_MQA:
        _quantize_nope_rows(
            pid - pe_blocks,
            num_tokens,
            ql_nope_ptr,
            ql_nope_stride0,
            ql_nope_stride1,
            q_scale_ptr,
            mqa_q_ptr,
            mqa_q_stride0,
            mqa_q_stride1,
            NUM_Q_HEADS,
            QL_NOPE_DIM,
            QL_NOPE_BLOCK,
            NOPE_ROWS,
        )
