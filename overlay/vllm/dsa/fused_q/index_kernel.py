# SPDX-License-Identifier: Apache-2.0
"""The indexer's query packing of the compiled line (vLLM 0.28.0), in blocks of rows.

Same bits as ``_fused_indexer_q_rope_quant_kernel`` of ``vllm/model_executor/layers/sparse_attn_indexer.py``.
It differs from 0.33.0's function: the rotated half is rounded to bfloat16 first, the smallest magnitude is
1e-10, the scale is a product with 1/448, quotients are approximate and clamped. Layout as in ``kernel.py``.

The weights take their two factors in float32 where Triton launches upstream's kernel, and in float64 where
Inductor does, which declares a Python float as ``fp64``: ``IN_DOUBLE``. Both are constants of the model.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from vllm.dsa.fused_q.kernel import _join_pairs, _rotate_fusing_sin, _split_pairs
from vllm.triton_utils import tl, triton


@triton.jit
def _quantize(x, scale, FP8_MIN: tl.constexpr, FP8_MAX: tl.constexpr, out_dtype: tl.constexpr):
    return tl.clamp(x / scale, FP8_MIN, FP8_MAX).to(out_dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def index_q_rope_quant_kernel(
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
    weights_stride0,
    weights_stride1,
    weights_out_ptr,
    weights_out_stride0,
    weights_out_stride1,
    SOFTMAX_SCALE: tl.constexpr,
    HEAD_SCALE: tl.constexpr,
    IN_DOUBLE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    FP8_MIN: tl.constexpr,
    FP8_MAX: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate and quantise ``ROWS`` (token, head) rows of 128 elements, 64 of them rotary."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    keep = token < num_tokens
    keep2 = keep[:, None]
    pos = tl.load(pos_ptr + token, mask=keep, other=0)
    weight = tl.load(weights_ptr + token * weights_stride0 + head * weights_stride1, mask=keep, other=0.0)
    src = (q_ptr + token * q_stride0 + head * q_stride1)[:, None]
    dst = (out_ptr + token * out_stride0 + head * out_stride1)[:, None]
    cs = (cos_sin_ptr + pos * cos_sin_stride)[:, None]
    col = tl.arange(0, 32)[None, :]

    a = tl.load(src + col, mask=keep2, other=0.0).to(tl.float32)
    b = tl.load(src + 32 + col, mask=keep2, other=0.0).to(tl.float32)
    c = tl.load(src + 64 + col, mask=keep2, other=0.0).to(tl.float32)
    d = tl.load(src + 96 + col, mask=keep2, other=0.0).to(tl.float32)
    if IS_NEOX:
        cos = tl.load(cs + col, mask=keep2, other=0.0).to(tl.float32)
        sin = tl.load(cs + 32 + col, mask=keep2, other=0.0).to(tl.float32)
        a, b = _rotate_fusing_sin(a, b, cos, sin)
    else:
        pair = tl.arange(0, 16)[None, :]
        even, odd = _split_pairs(a, ROWS, 32)
        cos = tl.load(cs + pair, mask=keep2, other=0.0).to(tl.float32)
        sin = tl.load(cs + 32 + pair, mask=keep2, other=0.0).to(tl.float32)
        even, odd = _rotate_fusing_sin(even, odd, cos, sin)
        a = _join_pairs(even, odd, ROWS, 32)
        even, odd = _split_pairs(b, ROWS, 32)
        cos = tl.load(cs + 16 + pair, mask=keep2, other=0.0).to(tl.float32)
        sin = tl.load(cs + 48 + pair, mask=keep2, other=0.0).to(tl.float32)
        even, odd = _rotate_fusing_sin(even, odd, cos, sin)
        b = _join_pairs(even, odd, ROWS, 32)
    a = a.to(tl.bfloat16).to(tl.float32)
    b = b.to(tl.bfloat16).to(tl.float32)

    top = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    scale = tl.maximum(tl.max(top, axis=1), 1e-10) * (1.0 / FP8_MAX)
    scale = tl.math.exp2(tl.ceil(tl.log2(scale)))
    by = scale[:, None]
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(dst + col, _quantize(a, by, FP8_MIN, FP8_MAX, out_dtype), mask=keep2)
    tl.store(dst + 32 + col, _quantize(b, by, FP8_MIN, FP8_MAX, out_dtype), mask=keep2)
    tl.store(dst + 64 + col, _quantize(c, by, FP8_MIN, FP8_MAX, out_dtype), mask=keep2)
    tl.store(dst + 96 + col, _quantize(d, by, FP8_MIN, FP8_MAX, out_dtype), mask=keep2)

    weight = weight.to(tl.float32) * scale
    if IN_DOUBLE:  # full: a plain number is made a float32 first
        weight = weight.to(tl.float64) * tl.full((ROWS,), SOFTMAX_SCALE, tl.float64)
        weight = weight * tl.full((ROWS,), HEAD_SCALE, tl.float64)
    else:
        weight = weight * SOFTMAX_SCALE * HEAD_SCALE
    tl.store(weights_out_ptr + token * weights_out_stride0 + head * weights_out_stride1, weight, mask=keep)
