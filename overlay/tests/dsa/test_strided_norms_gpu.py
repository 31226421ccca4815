# SPDX-License-Identifier: Apache-2.0
"""Norms on the DSA path take slices of the fused QKV-A output as they are: same bits, and no copy first.

The slices are those of DeepSeek-V3.2: q_a 1536, kv_a 512 and k_pe 64 columns of one [tokens, 2112] buffer.
Their row starts keep the 16-byte alignment, so the kernels take the same vectorised path as on contiguous
rows and the sums have the same order: equality is exact.
"""

import inspect

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from torch.profiler import ProfilerActivity, profile
from vllm import _custom_ops as ops

FP8 = torch.float8_e4m3fn
EPS = 1e-6
SIZES = (1536, 512, 64)
TOKENS = (1, 7, 512, 4097)
COPIES = ("copy", "Memcpy", "contiguous", "CatArray")


def slices(tokens: int) -> dict[int, torch.Tensor]:
    torch.manual_seed(tokens)
    buffer = torch.randn(tokens, sum(SIZES), device="cuda", dtype=torch.bfloat16)
    return dict(zip(SIZES, buffer.split(SIZES, dim=-1), strict=True))


def weight(size: int) -> torch.Tensor:
    return torch.rand(size, device="cuda", dtype=torch.bfloat16) + 0.5


def rms_norm(x, w):
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    ops.rms_norm(out, x, w, EPS)
    return (out,)


def fused_add(x, w):
    residual = x.clone() * 0.5
    ops.fused_add_rms_norm(x, residual, w, EPS)  # both are overwritten
    return x, residual


def static_fp8(x, w):
    out = torch.empty(x.shape, dtype=FP8, device="cuda")
    torch.ops._C.rms_norm_static_fp8_quant(out, x, w, torch.tensor([0.02], device="cuda"), EPS)
    return (out,)


def fused_add_static_fp8(x, w):
    out, residual = torch.empty(x.shape, dtype=FP8, device="cuda"), x.contiguous() * 0.5
    scale = torch.tensor([0.02], device="cuda")
    torch.ops._C.fused_add_rms_norm_static_fp8_quant(out, x, residual, w, scale, EPS)
    return out, residual


def dynamic_fp8(x, w):
    return ops.rms_norm_dynamic_per_token_quant(x, w, EPS, FP8)


def dynamic_fp8_residual(x, w):
    residual = x.contiguous() * 0.5
    return *ops.rms_norm_dynamic_per_token_quant(x, w, EPS, FP8, residual=residual), residual


def block_fp8(x, w):
    return ops.rms_norm_per_block_quant(x, w, EPS, FP8, [1, 128])


VARIANTS = [
    rms_norm,
    fused_add,
    static_fp8,
    fused_add_static_fp8,
    dynamic_fp8,
    dynamic_fp8_residual,
    block_fp8,
]


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda f: f.__name__)
def test_strided_equals_contiguous(variant, size: int, tokens: int) -> None:
    w = weight(size)
    strided, other = slices(tokens)[size], slices(tokens)[size].contiguous()
    assert tokens == 1 or not strided.is_contiguous()
    assert_same_bits(variant(strided, w), variant(other, w))


def test_a_norm_writes_only_its_slice() -> None:
    """fused_add_rms_norm works in place: the neighbours in the buffer stay."""
    parts, before = slices(64), slices(64)
    fused_add(parts[512], weight(512))
    for size in (1536, 64):
        assert torch.equal(parts[size], before[size])
    assert not torch.equal(parts[512], before[512])


@pytest.mark.parametrize("tokens", TOKENS)
def test_pair_norm_of_q_and_kv(tokens: int) -> None:
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    parts, w_q, w_kv = slices(tokens), weight(1536), weight(512)
    got = fused_q_kv_rmsnorm(parts[1536], parts[512], w_q, w_kv, EPS)
    want = fused_q_kv_rmsnorm(parts[1536].contiguous(), parts[512].contiguous(), w_q, w_kv, EPS)
    assert_same_bits(got, want)
    for x, w, out in ((parts[1536], w_q, got[0]), (parts[512], w_kv, got[1])):
        # The CUDA kernel rounds the normalised value to bfloat16 before the weight: one step apart at most.
        torch.testing.assert_close(out.float(), rms_norm(x, w)[0].float(), rtol=1.6e-2, atol=1e-5)


def norm_rope(q_c, kv_c, k_pe, index_k) -> list[torch.Tensor]:
    from vllm.models.deepseek_v32.common.kernels import fused_norm_rope

    tokens = q_c.shape[0]
    g = torch.Generator(device="cuda").manual_seed(3)
    cache = torch.rand(8192, 64, device="cuda", generator=g)
    w_q, w_kv = (torch.rand(n, device="cuda", dtype=torch.bfloat16, generator=g) for n in (1536, 512))
    blocks = tokens // 64 + 1
    mla = torch.zeros(blocks, 64, 576, device="cuda", dtype=torch.bfloat16)
    index = torch.zeros(blocks, 64, 132, device="cuda", dtype=torch.uint8)
    topk = torch.zeros(tokens, 2048, device="cuda", dtype=torch.int32)
    copies = {"kv_c_out": torch.empty_like(kv_c), "k_pe_out": torch.empty_like(k_pe)}
    if "kv_c_out" not in inspect.signature(fused_norm_rope).parameters:  # line 0.28.0 fills the cache alone
        copies = {}
    out = fused_norm_rope(
        torch.arange(tokens, device="cuda"),
        q_c,
        w_q,
        EPS,
        kv_c,
        w_kv,
        EPS,
        k_pe,
        cache,
        index_k,
        torch.ones(128, device="cuda"),
        torch.zeros(128, device="cuda"),
        EPS,
        cache,
        topk,
        slot_mapping=torch.arange(tokens, device="cuda"),
        indexer_k_cache=index,
        mla_kv_cache=mla,
        **copies,
    )
    return [out, mla, index, topk, *copies.values()]


@pytest.mark.parametrize("tokens", TOKENS)
def test_fused_norm_rope(tokens: int) -> None:
    """The kernel that norms, rotates and caches on the hand-written path."""
    parts = slices(tokens)
    index_k = torch.randn(tokens, 192, device="cuda", dtype=torch.bfloat16)[:, :128]
    got = norm_rope(parts[1536], parts[512], parts[64], index_k)
    want = norm_rope(*(parts[size].contiguous() for size in SIZES), index_k.contiguous())
    assert_same_bits(got, want)


def kernels_of(function) -> list[str]:
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        function()
        torch.cuda.synchronize()
    return [e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]


ONE_KERNEL = ("rms_norm", "fused_add", "dynamic_fp8", "block_fp8", "pair")


@pytest.mark.parametrize("what", ONE_KERNEL)
def test_the_profiler_sees_one_kernel_and_no_copy(what: str) -> None:
    """The CUDA ops that the engine selects; the layer alone would take the native implementation."""
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    parts, w_q, w_kv = slices(512), weight(1536), weight(512)
    x, residual = parts[1536], parts[1536].contiguous()
    out = torch.empty_like(residual)
    calls = {
        "rms_norm": lambda: ops.rms_norm(out, x, w_q, EPS),
        "fused_add": lambda: ops.fused_add_rms_norm(x, residual, w_q, EPS),
        "dynamic_fp8": lambda: dynamic_fp8(x, w_q),
        "block_fp8": lambda: block_fp8(x, w_q),
        "pair": lambda: fused_q_kv_rmsnorm(x, parts[512], w_q, w_kv, EPS),
    }
    names = kernels_of(calls[what])
    assert len(names) == 1, names
    assert not any(copy in names[0] for copy in COPIES), names


def test_the_profiler_would_see_a_copy() -> None:
    x, w = slices(512)[1536], weight(1536)
    assert len(kernels_of(lambda: rms_norm(x.contiguous(), w))) == 2
