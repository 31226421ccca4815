# SPDX-License-Identifier: Apache-2.0
"""fused_q on a GPU: with the switch on and off upstream's function returns the same bits."""

import itertools

import pytest
import torch
import vllm.envs as envs
from vllm.dsa import features
from vllm.dsa.features import State
from vllm.platforms import current_platform

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

kernels = pytest.importorskip("vllm.models.deepseek_v32.common.kernels")
from vllm.dsa.fused_q import launch  # noqa: E402

NOPE, ROPE, DIM, MAX_POS = 512, 64, 128, 4096
KINDS = ("random", "patterns", "zeros", "huge")


@pytest.fixture(autouse=True)
def only_triton(monkeypatch: pytest.MonkeyPatch):
    """On SM100 upstream prefers its CuTeDSL kernel; these tests are about the other two."""
    if current_platform.is_device_capability_family(100):
        from vllm.models.deepseek_v32.nvidia.ops import fused_q_cutedsl

        monkeypatch.setattr(fused_q_cutedsl, "is_fused_q_cutedsl_supported", lambda *_, **__: False)


def fill(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "patterns":  # every exponent, denormals, infinities and NaN
        bits = torch.randint(-32768, 32768, x.shape, device="cuda", dtype=torch.int32).to(torch.int16)
        return x.copy_(bits.view(torch.bfloat16))
    if kind == "zeros":
        x.zero_()[..., ::3] = -0.0
        return x
    return x.normal_().mul_(1e38 if kind == "huge" else 1.0)


def call(tokens, heads, index, interleave, fp8_query, has_indexer, cache_dtype, kind) -> dict:
    """Arguments for upstream's fused_q in the layouts of the model."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    angle = torch.rand(MAX_POS, ROPE // 2, device="cuda") * 6.3
    cache = torch.cat((angle.cos(), angle.sin()), -1).to(cache_dtype)
    q = fill(torch.empty(tokens, heads, 128 + ROPE, **bf16), kind)
    ql_nope = (
        fill(torch.empty(heads, tokens, NOPE, **bf16), kind).transpose(0, 1) if fp8_query else q[..., :128]
    )
    kw = fill(torch.empty(tokens, DIM + index, **bf16), "random")
    index_args = {
        "index_q": fill(torch.empty(tokens, index, DIM, **bf16), kind),
        "index_q_cos_sin_cache": cache,
        "index_weights": kw[:, DIM:],
    }
    if not has_indexer:
        index_args = dict.fromkeys(index_args)
    return index_args | {
        "positions": torch.randint(0, MAX_POS, (tokens,), device="cuda"),
        "q_pe": q[..., 128:],
        "q_pe_cos_sin_cache": cache,
        "ql_nope": ql_nope,
        "q_scale": torch.tensor([0.37], device="cuda"),
        "index_weights_softmax_scale": DIM**-0.5,
        "index_weights_head_scale": index**-0.5,
        "has_indexer": has_indexer,
        "index_rope_interleave": interleave,
        "quantize_mqa": fp8_query,
    }


def run(monkeypatch: pytest.MonkeyPatch, switch: str, args: dict) -> list[torch.Tensor]:
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", switch)
    assert switch == envs.VLLM_DSA_FUSED_Q
    out = kernels.fused_q(**args)
    return list(out if args["has_indexer"] else out[2:])


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


MODES = [
    mode
    for mode in itertools.product(
        (False, True), (False, True), (True, False), (torch.float32, torch.bfloat16)
    )
    if mode[2] or not mode[0]
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleave, fp8_query, has_indexer, cache_dtype", MODES)
def test_same_bits(monkeypatch, kind, interleave, fp8_query, has_indexer, cache_dtype):
    torch.manual_seed(7)
    for (heads, index), tokens in itertools.product([(16, 64), (8, 32), (5, 24)], (1, 65, 700)):
        args = call(tokens, heads, index, interleave, fp8_query, has_indexer, cache_dtype, kind)
        want = run(monkeypatch, "off", args)
        assert_same_bits(run(monkeypatch, "auto", args), want)
    assert features.status(features.KNOWN[3]).state is State.ACTIVE


def test_every_byte_is_written():
    args = call(130, 5, 24, True, True, True, torch.float32, "random")
    outs = (
        torch.empty(130, 24, DIM, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty(130, 24, device="cuda"),
        torch.empty(130, 5, NOPE + ROPE, dtype=torch.float8_e4m3fn, device="cuda"),
    )
    results = []
    for poison in (0x00, 0x7F):
        for out in outs:
            out.view(torch.uint8).fill_(poison)
        launch.launch(**args, index_q_fp8=outs[0], index_weights_out=outs[1], mqa_q=outs[2], use_pdl=True)
        results.append([out.clone() for out in outs])
    assert_same_bits(*results)


def test_captured_in_a_graph_and_no_new_kernel_per_token_count(monkeypatch):
    args = call(96, 16, 64, False, False, True, torch.float32, "random")
    run(monkeypatch, "auto", args)
    compiled = len(launch.fused_q_block_kernel.device_caches[torch.cuda.current_device()][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(monkeypatch, "auto", args)
    args["index_q"].mul_(3.0)
    args["q_pe"].mul_(0.25)
    graph.replay()
    assert_same_bits(got, run(monkeypatch, "off", args))
    for tokens in (1, 2, 16, 17, 1024, 4097):
        run(monkeypatch, "auto", call(tokens, 16, 64, False, False, True, torch.float32, "random"))
    assert len(launch.fused_q_block_kernel.device_caches[torch.cuda.current_device()][0]) == compiled
