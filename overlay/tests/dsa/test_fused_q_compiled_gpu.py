# SPDX-License-Identifier: Apache-2.0
"""fused_q on the compiled line on a GPU: the op returns the bits of upstream's function, traced and eager."""

import itertools

import pytest
import torch
from vllm.dsa import features
from vllm.dsa.features import State
from vllm.model_executor.models import deepseek_v2

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not hasattr(deepseek_v2.Indexer, "dsa_pack_query"):
    pytest.skip("this line has no hook in models/deepseek_v2.py", allow_module_level=True)

from vllm.dsa.fused_q import compiled, launch
from vllm.dsa.fused_q.index_kernel import index_q_rope_quant_kernel
from vllm.model_executor.layers.sparse_attn_indexer import fused_indexer_q_rope_quant

DIM, ROPE, MAX_POS = 128, 64, 4096
KINDS = ("random", "patterns", "scales", "zeros", "huge")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")


def fill(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "patterns":  # every exponent, denormals, infinities and NaN
        bits = torch.randint(-32768, 32768, x.shape, device="cuda", dtype=torch.int32).to(torch.int16)
        return x.copy_(bits.view(torch.bfloat16))
    if (
        kind == "scales"
    ):  # row r has the number of bit pattern r as its largest magnitude: all reachable scales
        rows = x.shape[0] * x.shape[1]
        top = torch.arange(rows, device="cuda", dtype=torch.int32).remainder(32640).to(torch.int16)
        x.uniform_(-1, 1).mul_(top.view(torch.bfloat16).view(*x.shape[:2], 1))
        x[..., -1] = top.view(torch.bfloat16).view(x.shape[:2])
        return x
    if kind == "zeros":
        x.zero_()[..., ::3] = -0.0
        return x
    return x.normal_().mul_(1e38 if kind == "huge" else 1.0)


def arguments(tokens: int, heads: int, is_neox: bool, cache_dtype: torch.dtype, kind: str) -> tuple:
    """In the layouts of the model: the weights are a slice."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    angle = torch.rand(MAX_POS, ROPE // 2, device="cuda") * 6.3
    cache = torch.cat((angle.cos(), angle.sin()), -1).to(cache_dtype)
    q = fill(torch.empty(tokens, heads, DIM, **bf16), kind)
    weights = torch.randn(tokens, DIM + heads, **bf16)[:, DIM:]
    positions = torch.randint(0, MAX_POS, (tokens,), device="cuda")
    return positions, q, cache, weights, DIM**-0.5, heads**-0.5, is_neox


def assert_same_bits(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_same_bits(kind: str, is_neox: bool, cache_dtype: torch.dtype):
    torch.manual_seed(7)
    for heads, tokens in itertools.product((64, 32, 24), (0, 1, 3, 4, 65, 1500)):
        args = arguments(tokens, heads, is_neox, cache_dtype, kind)
        assert_same_bits(compiled.pack_index_q(*args), fused_indexer_q_rope_quant(*args))
    assert features.status(features.KNOWN[3]).state is State.ACTIVE


@pytest.mark.parametrize("is_neox", [False, True])
def test_same_bits_as_upstreams_kernel_when_inductor_launches_it(is_neox: bool):
    """In an engine upstream's call is traced and Inductor compiles its kernel, with float64 factors."""
    torch._dynamo.reset()
    factors = (DIM**-0.5, 64**-0.5, is_neox)

    def traced(pack):
        return torch.compile(lambda *tensors: pack(*tensors, *factors), fullgraph=True, dynamic=True)

    theirs, ours = traced(fused_indexer_q_rope_quant), traced(compiled.pack_index_q)
    for kind, tokens in itertools.product(("random", "patterns", "scales"), (2, 8, 700)):
        tensors = arguments(tokens, 64, is_neox, torch.float32, kind)[:4]
        assert_same_bits(ours(*tensors), theirs(*tensors))


def test_every_byte_is_written():
    args = arguments(130, 24, True, torch.float32, "random")
    results = []
    for poison in (0x00, 0x7F):
        outs = (
            torch.empty(130, 24, DIM, dtype=torch.float8_e4m3fn, device="cuda"),
            torch.empty(130, 24).cuda(),
        )
        for out in outs:
            out.view(torch.uint8).fill_(poison)
        launch.launch_index_q(*args, *outs)
        results.append(outs)
    assert_same_bits(*results)


def test_captured_in_a_graph_and_no_new_kernel_per_token_count():
    args = arguments(96, 64, False, torch.float32, "random")
    compiled.pack_index_q(*args)
    made = len(index_q_rope_quant_kernel.device_caches[torch.cuda.current_device()][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compiled.pack_index_q(*args)
    args[1].mul_(3.0)
    graph.replay()
    assert_same_bits(got, fused_indexer_q_rope_quant(*args))
    for tokens in (4, 16, 17, 1024, 4097):
        compiled.pack_index_q(*arguments(tokens, 64, False, torch.float32, "random"))
    assert len(index_q_rope_quant_kernel.device_caches[torch.cuda.current_device()][0]) == made
