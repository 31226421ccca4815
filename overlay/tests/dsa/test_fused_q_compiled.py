# SPDX-License-Identifier: Apache-2.0
"""fused_q on the compiled line without a GPU: bits, the hook in upstream's indexer, the graph, the key."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
import vllm.envs as envs
from vllm.config.utils import hash_factors
from vllm.dsa import counters, features
from vllm.dsa.features import State
from vllm.model_executor.models import deepseek_v2

if not hasattr(deepseek_v2.Indexer, "dsa_pack_query"):
    pytest.skip("this line has no hook in models/deepseek_v2.py", allow_module_level=True)

from vllm.dsa.fused_q import compiled, feature, launch

TREE = Path(vllm.__file__).parents[1]
HEADS, HIDDEN, Q_LORA = 4, 16, 8


def child(*arguments: str, **variables: str) -> str:
    """Run Python on this tree; an empty CUDA_VISIBLE_DEVICES lets vLLM import Triton without a driver."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_DSA")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=TREE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_op_writes_the_bytes_of_upstreams_kernel_in_the_interpreter():
    script = Path(__file__).with_name("fused_q_index_interpreted.py")
    out = child(str(script), TRITON_INTERPRET="1", VLLM_DSA_FUSED_Q="on")
    rows = [json.loads(row) for row in out.splitlines() if row.startswith("{")]
    assert {(r["kind"], r["is_neox"]) for r in rows} == {
        (kind, neox) for kind in ("random", "zeros", "huge", "tiny") for neox in (False, True)
    }
    assert {row["tokens"] for row in rows} == {3, 4, 7}
    for row in rows:
        assert row["differ"] == [0, 0] and row["same_layout"] == [True, True], row
        if row["kind"] != "huge":
            assert row["in_double"] == [0, 0], row
            assert row["from_reference"][0] == 0 and row["from_reference"][1] < 1e-6, row


def test_traced_the_op_is_told_how_inductor_would_launch_upstreams_kernel():
    """With float64 factors; Triton alone makes them float32, and some weights differ in their last bit."""
    row = json.loads(child(str(Path(__file__).with_name("fused_q_index_inductor.py"))).splitlines()[-1])
    assert row["upstream"] == {"softmax_scale": "fp64", "head_scale": "fp64"}
    assert row["ours"].endswith("0.125, True, True)"), row["ours"]


class Linear(torch.nn.Module):
    """As vLLM's linear layers: returns the product and a bias of None."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width_out, width_in), requires_grad=False)

    def forward(self, x: torch.Tensor):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype)), None


class Rope(torch.nn.Module):
    is_neox_style = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.randn(64, 64), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor):
        turn = self.cos_sin_cache[positions].unsqueeze(1)
        return q * turn, k * turn


class Op(torch.nn.Module):
    """In place of ``SparseAttnIndexer``."""

    def forward(self, hidden_states, q_fp8, k, weights):
        return q_fp8.float().sum((1, 2)) + weights.sum(1) + k.sum(1).float()


class Layer(torch.nn.Module):
    """Upstream's ``Indexer.forward`` on small layers; the constructor wants an engine."""

    def __init__(self, pack) -> None:
        super().__init__()
        torch.manual_seed(0)
        indexer = object.__new__(deepseek_v2.Indexer)
        torch.nn.Module.__init__(indexer)
        fields = {
            "n_head": HEADS,
            "head_dim": 128,
            "rope_dim": 64,
            "is_inplace_rope": False,
            "use_fused_indexer_q": True,
            "softmax_scale": 0.5,
            "n_head_scale": 0.25,
            "wq_b": Linear(Q_LORA, 128 * HEADS),
            "wk_weights_proj": Linear(HIDDEN, 128 + HEADS),
            "k_norm": torch.nn.Identity(),
            "indexer_op": Op(),
        }
        for name, value in fields.items():
            setattr(indexer, name, value)
        if pack is not None:
            indexer.dsa_pack_query = pack
        self.indexer, self.rope = indexer, Rope()

    def forward(self, hidden_states, qr, positions):
        return self.indexer(hidden_states, qr, positions, self.rope)


def batch(tokens: int):
    torch.manual_seed(tokens)
    bf16 = {"dtype": torch.bfloat16}
    return torch.randn(tokens, HIDDEN, **bf16), torch.randn(tokens, Q_LORA, **bf16), torch.arange(tokens)


def in_torch(positions, q, cos_sin_cache, weights, softmax_scale, head_scale, is_neox):
    """In place of both kernels."""
    return q.to(torch.float8_e4m3fn), weights.float() * softmax_scale * head_scale * positions[:, None]


def kernel_in_torch(positions, q, cos_sin_cache, weights, a, b, is_neox, q_fp8, weights_out, _in_double):
    packed = in_torch(positions, q, cos_sin_cache, weights, a, b, is_neox)
    q_fp8.copy_(packed[0])
    weights_out.copy_(packed[1])


def traced(layer: Layer):
    """The compiled layer and the graphs that were made of it, with a dynamic number of tokens."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(layer, backend=keep, fullgraph=True, dynamic=True), graphs


def called(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Both kernels in PyTorch; what was launched is noted."""
    monkeypatch.setattr(launch, "_reported", False)
    seen: list[str] = []
    monkeypatch.setattr(launch, "launch_index_q", lambda *a: (seen.append("ours"), kernel_in_torch(*a)))
    monkeypatch.setattr(
        compiled, "fused_indexer_q_rope_quant", lambda *a: (seen.append("upstream"), in_torch(*a))[1]
    )
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")
    return seen


def test_the_op_is_one_node_of_one_graph_for_all_token_counts(kernels: list[str]):
    layer = Layer(compiled.pack_index_q)
    fast, graphs = traced(layer)
    for tokens in (9, 4, 3, 2):
        assert torch.equal(fast(*batch(tokens)), layer(*batch(tokens)))
    (graph,) = graphs
    assert sum("dsa_pack_index_q" in target for target in called(graph)) == 1
    # Eager, upstream's kernel takes fewer than 4 tokens; under Inductor it would round otherwise than here.
    assert kernels == ["ours"] * 4 + ["ours", "upstream"] * 2
    assert features.status(features.KNOWN[3]).state is State.ACTIVE
    assert len(counters.snapshot("fused_q")) == 1


def test_without_it_the_graph_is_upstreams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepseek_v2, "fused_indexer_q_rope_quant", in_torch)
    fast, graphs = traced(Layer(None))
    fast(*batch(5))
    (graph,) = graphs
    assert not any("dsa" in target for target in called(graph))


def test_switched_off_while_it_runs_the_op_takes_upstreams_kernel(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch
):
    layer = Layer(compiled.pack_index_q)
    want = layer(*batch(8))
    for name, value in (("VLLM_DSA_FUSED_Q", "off"), ("VLLM_DSA", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert torch.equal(layer(*batch(8)), want)
    assert kernels == ["ours", "upstream", "upstream"]


def test_the_op_says_what_upstreams_function_returns(kernels: list[str]):
    positions, q = torch.arange(6), torch.randn(6, HEADS, 128, dtype=torch.bfloat16)
    weights = torch.randn(6, 128 + HEADS, dtype=torch.bfloat16)[:, 128:]
    torch.library.opcheck(
        torch.ops.vllm.dsa_pack_index_q.default,
        (positions, q, torch.randn(8, 64), weights, 0.5, 0.25, True),
        test_utils=("test_schema", "test_faketensor"),
    )


class Part(torch.nn.Module):
    """In place of the layers that upstream's constructor makes."""

    def __init__(self, *_args, **_kwargs) -> None:
        super().__init__()


@pytest.fixture
def construct(monkeypatch: pytest.MonkeyPatch):
    """Upstream's constructor of an indexer of DeepSeek-V3.2's head, on a platform with or without CUDA."""
    from vllm.v1.attention.backends.mla import indexer as backend

    parts = ("ReplicatedLinear", "MergedColumnParallelLinear", "LayerNorm", "DeepseekV32IndexerCache")
    for name in (*parts, "SparseAttnIndexer"):
        monkeypatch.setattr(deepseek_v2, name, Part)
    monkeypatch.setattr(backend, "get_max_prefill_buffer_size", lambda _config: 64)
    config = SimpleNamespace(index_topk=4, index_n_heads=4, index_head_dim=128, qk_rope_head_dim=64)
    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))

    def make(cuda: bool = True) -> deepseek_v2.Indexer:
        for module in (deepseek_v2, compiled):
            monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
        return deepseek_v2.Indexer(engine, config, 16, 8, None, object(), None)

    return make


@pytest.mark.parametrize(
    "off", [{"VLLM_DSA_FUSED_Q": "off"}, {"VLLM_DSA": "0"}, {"VLLM_DSA_FUSED_Q": "on", "VLLM_DSA": "0"}]
)
def test_switched_off_upstreams_constructor_imports_and_sets_nothing(
    construct, monkeypatch: pytest.MonkeyPatch, off: dict[str, str]
):
    monkeypatch.setitem(sys.modules, "vllm.dsa.fused_q.compiled", None)  # importing it is an error
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    assert "dsa_pack_query" not in vars(construct())
    monkeypatch.setenv("VLLM_DSA", "1")
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")
    with pytest.raises(ImportError):
        construct()


def test_switched_on_upstreams_constructor_takes_the_op(construct, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")
    assert construct().dsa_pack_query is compiled.pack_index_q
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "auto")
    for worth_it, taken in ((False, None), (True, compiled.pack_index_q)):
        monkeypatch.setattr(feature, "COMPILED_IS_WORTH_IT", worth_it)
        assert construct().dsa_pack_query is taken
    assert not counters.snapshot("fused_q")
    assert construct(cuda=False).dsa_pack_query is None
    assert not counters.snapshot("fused_q")  # said at start-up


def test_an_indexer_that_upstream_does_not_fuse_declines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "on")
    monkeypatch.setattr(compiled, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert compiled.attach(SimpleNamespace(use_fused_indexer_q=False)) is None
    status = features.status(features.KNOWN[3])
    assert status.state is not State.ACTIVE
    assert [(r["outcome"], r["count"]) for r in counters.snapshot("fused_q")] == [("declined", 1)]
    assert compiled.attach(SimpleNamespace(use_fused_indexer_q=True)) is compiled.pack_index_q


def test_the_switch_is_in_the_key_of_the_compile_cache(monkeypatch: pytest.MonkeyPatch):
    keys = []
    for value in ("off", "auto", "on"):
        monkeypatch.setenv("VLLM_DSA_FUSED_Q", value)
        keys.append(hash_factors(envs.compile_factors()))
    assert len(set(keys)) == 3
