# SPDX-License-Identifier: Apache-2.0
"""A small sparse MLA model for the CPU: upstream's own layer code with plain PyTorch where it calls kernels.

``MultiHeadLatentAttentionWrapper.forward``, ``Indexer.forward``, ``SparseAttnIndexer.forward_cuda``,
``MLAAttention.forward`` and ``forward_impl`` are the tree's; only what they compute with is replaced.
Works in a pristine tree too: it imports nothing of vllm.dsa.
"""

from types import SimpleNamespace

import torch
from torch import nn
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as indexer_module
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models import deepseek_v2

HIDDEN, Q_LORA, KV_LORA, NOPE, ROPE, V_DIM, HEADS = 32, 24, 16, 8, 8, 8, 2
INDEX_DIM, INDEX_HEADS, TOPK, MAX_TOKENS = 16, 4, 4, 64


class Linear(nn.Module):
    """As vLLM's linear layers: returns the product and a bias of None."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / width_in**0.5, requires_grad=False)
        self.bias = None
        self.quant_method = None

    def forward(self, x: torch.Tensor):
        return torch.nn.functional.linear(x, self.weight), None


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rope(nn.Module):
    is_neox_style = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.randn(128, ROPE), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor):
        turn = self.cos_sin_cache[positions].unsqueeze(1)
        return q * turn, k * turn


def quantise(q: torch.Tensor, *_args, **_kwargs):
    """In place of ``per_token_group_quant_fp8``: no quantisation, a scale per row."""
    scale = q.abs().amax(-1, keepdim=True) + 1e-3
    return q / scale, scale


def bare(cls, **fields):
    """An instance of an upstream layer without its constructor, which wants a GPU and an engine."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer


def make_indexer(prefix: str, topk_buffer: torch.Tensor):
    cache = bare(deepseek_v2.DeepseekV32IndexerCache, prefix=f"{prefix}.k_cache")
    cache.kv_cache = torch.zeros(MAX_TOKENS, INDEX_DIM)
    op = bare(
        indexer_module.SparseAttnIndexer,
        k_cache=cache,
        quant_block_size=128,
        scale_fmt="ue8m0",
        topk_tokens=TOPK,
        head_dim=INDEX_DIM,
        max_model_len=MAX_TOKENS,
        max_total_seq_len=MAX_TOKENS,
        topk_indices_buffer=topk_buffer,
        skip_k_cache_insert=False,
        use_fp4_cache=False,
        dense_mha_metadata_layer_name="",
        dcp_world_size=1,
        dcp_rank=0,
        cp_kv_cache_interleave_size=1,
        use_pcp=False,
    )
    op._forward_method = op.forward_cuda
    return bare(
        deepseek_v2.Indexer,
        n_head=INDEX_HEADS,
        head_dim=INDEX_DIM,
        rope_dim=ROPE,
        wq_b=Linear(Q_LORA, INDEX_DIM * INDEX_HEADS),
        wk_weights_proj=Linear(HIDDEN, INDEX_DIM + INDEX_HEADS),
        k_norm=Norm(INDEX_DIM),
        softmax_scale=INDEX_DIM**-0.5,
        scale_fmt="ue8m0",
        quant_block_size=128,
        topk_tokens=TOPK,
        k_cache=cache,
        indexer_op=op,
        is_inplace_rope=False,
        n_head_scale=INDEX_HEADS**-0.5,
        use_fused_indexer_q=False,
    )


class Impl:
    """Attention over the selected keys: enough to make the output depend on q, the latent cache and top-k."""

    dcp_world_size = 1
    is_sparse = True
    supports_quant_query_input = False
    masked_mha_available = False

    def __init__(self, topk_buffer: torch.Tensor) -> None:
        self.topk_indices_buffer = topk_buffer

    def do_kv_cache_update(self, kv_c, k_pe, cache, slots, _dtype, _scale) -> None:
        cache[slots] = torch.cat([kv_c, k_pe.squeeze(1)], dim=-1)

    def forward_mqa(self, q, cache, metadata, _layer):
        q = torch.cat(q, dim=-1)
        rows = self.topk_indices_buffer[: q.shape[0]].long()
        keys = cache[rows.clamp(min=0)]
        scores = torch.einsum("thd,tkd->thk", q, keys).masked_fill((rows < 0)[:, None], float("-inf"))
        return torch.einsum("thk,tkd->thd", scores.softmax(-1), keys[..., :KV_LORA]), None


def make_attention(name: str, topk_buffer: torch.Tensor):
    attention = bare(
        MLAAttention,
        layer_name=name,
        kv_cache_dtype="auto",
        num_heads=HEADS,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V_DIM,
        kv_lora_rank=KV_LORA,
        use_pcp=False,
        impl=Impl(topk_buffer),
        prefill_backend=None,
        q_pad_num_heads=None,
        is_aiter_triton_fp4_bmm_enabled=False,
        is_aiter_triton_fp8_bmm_enabled=False,
        dcp_manager=None,
        use_direct_call=False,
        chunked_prefill_workspace_size_=1,
    )
    attention.kv_cache = torch.zeros(MAX_TOKENS, KV_LORA + ROPE)
    attention.W_UK_T = torch.randn(HEADS, NOPE, KV_LORA)
    attention.W_UV = torch.randn(HEADS, KV_LORA, V_DIM)
    attention._k_scale = torch.ones(())
    attention._vllm_config = SimpleNamespace(attention_config=SimpleNamespace(sparse_mla_force_mqa=True))
    attention._chunked_prefill_workspace_size = 1
    return attention


def make_layer(prefix: str, topk_buffer: torch.Tensor, *, indexer: bool = True, skip_topk: bool = False):
    """One ``MultiHeadLatentAttentionWrapper``, named as in a model."""
    layer = bare(
        MultiHeadLatentAttentionWrapper,
        hidden_size=HIDDEN,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=V_DIM,
        q_lora_rank=Q_LORA,
        kv_lora_rank=KV_LORA,
        num_heads=HEADS,
        fused_qkv_a_proj=Linear(HIDDEN, Q_LORA + KV_LORA + ROPE),
        kv_a_proj_with_mqa=None,
        q_a_layernorm=Norm(Q_LORA),
        q_b_proj=Linear(Q_LORA, HEADS * (NOPE + ROPE)),
        q_proj=None,
        kv_a_layernorm=Norm(KV_LORA),
        rotary_emb=Rope(),
        indexer_rope_emb=Rope(),
        o_proj=Linear(HEADS * V_DIM, HIDDEN),
        indexer=make_indexer(f"{prefix}.indexer", topk_buffer) if indexer else None,
        is_sparse=True,
        g_proj=None,
        skip_topk=skip_topk,
        dcp_q_replicate=False,
        mla_attn=make_attention(f"{prefix}.attn", topk_buffer),
        prefix=prefix,
    )
    return layer


class Model(nn.Module):
    """Attention layers with a norm before each, as in the decoder."""

    def __init__(self, layers: int = 3, seed: int = 0, **layer_options) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.topk_buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
        self.norms = nn.ModuleList(Norm(HIDDEN) for _ in range(layers))
        self.layers = nn.ModuleList(
            make_layer(f"model.layers.{i}.self_attn", self.topk_buffer, **layer_options)
            for i in range(layers)
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(positions, norm(x))
        return x

    def registered(self) -> dict[str, nn.Module]:
        """What the layers' constructors put into ``static_forward_context``."""
        found: dict[str, nn.Module] = {}
        for layer in self.layers:
            found[layer.mla_attn.layer_name] = layer.mla_attn
            if layer.indexer is not None:
                found[layer.indexer.k_cache.prefix] = layer.indexer.k_cache
        return found


def indexer_kernel(
    hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, *rest, **_kwargs
) -> torch.Tensor:
    """In place of the body of ``sparse_attn_indexer``: cache insertion, MQA logits, top-k, all in PyTorch."""
    buffer = rest[6]
    tokens = hidden_states.shape[0]
    kv_cache[:tokens] = k
    logits = torch.einsum("thd,sd->ths", q_quant, kv_cache[:tokens]).relu()
    logits = torch.einsum("ths,th->ts", logits, weights)
    # The test's default device does not hold within an op.
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device).triu(1)
    logits = logits.masked_fill(future, float("-inf"))
    scores, rows = logits.topk(min(TOPK, tokens), dim=-1)
    buffer[:tokens] = -1
    buffer[:tokens, : rows.shape[1]] = rows.masked_fill(scores == float("-inf"), -1).int()
    return buffer


def context(
    layers: dict,
    tokens: int,
    mode: CUDAGraphMode = CUDAGraphMode.NONE,
    metadata: bool = True,
    metadata_fields: dict | None = None,
    **fields,
) -> ForwardContext:
    """A forward context as the runner sets it for one batch of ``tokens`` prefill tokens of one request."""
    mla = [name for name in layers if name.endswith(".attn")]
    one = SimpleNamespace(
        num_actual_tokens=tokens,
        num_decodes=0,
        num_prefills=1,
        num_decode_tokens=0,
        prefill_max_seq_len=tokens,
        **(metadata_fields or {}),
    )
    return ForwardContext(
        no_compile_layers=layers,
        attn_metadata=dict.fromkeys(mla, one) if metadata else None,
        slot_mapping=dict.fromkeys(mla, torch.arange(tokens)) if metadata else {},
        cudagraph_runtime_mode=mode,
        **fields,
    )


def patch_kernels() -> None:
    """Replace what has no CPU version; for a process that does nothing else."""
    deepseek_v2.per_token_group_quant_fp8 = quantise


def batch(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.arange(tokens), torch.randn(tokens, HIDDEN, generator=generator)


def splitting_ops() -> list[str]:
    """As ``set_splitting_ops_for_v1`` sets them."""
    return [
        *CompilationConfig._attention_ops,
        "vllm::unified_kv_cache_update",
        "vllm::unified_mla_kv_cache_update",
    ]


class Piece(nn.Module):
    """A compiled piece where the split graph had a module."""

    def __init__(self, compiled) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *args):
        return self.compiled(*args)


def compile_pieces(traced: torch.fx.GraphModule, _inputs):
    """A backend for torch.compile: vLLM's split, and vLLM's way to Inductor for each piece."""
    from vllm.compilation.backends import split_graph
    from vllm.compilation.compiler_interface import InductorStandaloneAdaptor
    from vllm.config.utils import Range

    split, items = split_graph(traced, splitting_ops())
    for item in items:
        if not item.is_splitting_graph:
            inputs = [node.meta["example_value"] for node in item.graph.graph.find_nodes(op="placeholder")]
            sizes = Range(start=1, end=MAX_TOKENS)
            compiled, _ = InductorStandaloneAdaptor("binary").compile(item.graph, inputs, {}, sizes)
            setattr(split, item.submod_name, Piece(compiled))
    return split.forward


def trace(model: nn.Module, tokens: int = 8) -> torch.fx.GraphModule:
    """The graph that vLLM's backend gets: one, with a dynamic number of tokens."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    positions, x = batch(tokens)
    torch._dynamo.mark_dynamic(positions, 0)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    with override_forward_context(context(model.registered(), tokens, metadata=False)):
        try:
            compiled(positions, x)
        except Exception:
            if not graphs:
                raise
    (graph,) = graphs
    return graph


def text(graph: torch.fx.GraphModule) -> str:
    """The graph's nodes, one a line."""
    return "\n".join(node.format_node() or "" for node in graph.graph.nodes)
