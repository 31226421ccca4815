# SPDX-License-Identifier: Apache-2.0
"""Upstream's patched attention module of line 0.33.0 on a CPU: its real code, with small compiled parts.

`Model` is a stack of layers that run ``DeepseekV32Attention.forward`` and ``_sparse_indexer_and_attn`` as the
patched tree has them. What upstream compiles (GEMM layers, the fused norms, query packing, scoring and top-k,
sparse attention) is replaced by a few torch operations with the same reads, writes and dependence of the
result on its inputs. Top-k ids are converted by upstream's real index group, stream and event included.
"""

import inspect
from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.dsa.overlap import schedule
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.models.deepseek_v32 import attention
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.models.deepseek_v32.common import kernels
from vllm.v1.attention.backends.mla import index_group

from .vector_clock import Event, Machine, Stream

HIDDEN, Q_LORA, KV_LORA, ROPE, NOPE, V_DIM = 16, 8, 6, 4, 4, 4
HEADS, INDEX_HEADS, INDEX_DIM, TOPK, SLOTS, BLOCK = 2, 3, 8, 4, 64, 16

# Upstream's own order of one layer with an indexer, and of one without.
SERIAL = [
    "fused_qkv_a_proj",
    "wk_weights_proj",
    "fused_norm_rope",
    "q_b_proj",
    "wq_b",
    "fused_q both",
    "top-k",
]
SERIAL = [*SERIAL, "attention", "o_proj"]
NORMS = "fused_norm_rope without the indexer"
SHARED = ["fused_qkv_a_proj", NORMS, "q_b_proj", "fused_q mqa", "attention", "o_proj"]


class Linear:
    """A GEMM layer: a step of the machine, and a product with fixed weights."""

    def __init__(self, machine: Machine, name: str, rows: int, columns: int) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        self.weight = torch.randn(columns, rows, generator=generator) * rows**-0.5
        self.machine, self.name = machine, name
        self.error: Exception | None = None  # raised after the product was recorded
        self.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)

    def __call__(self, x: torch.Tensor):
        self.machine.note(self.name)
        result = x @ self.weight.T
        if self.error is not None:
            raise self.error
        return result, None


class Layer:
    """One attention layer; the three methods are upstream's, patched."""

    forward = DeepseekV32Attention.forward
    _sparse_indexer_and_attn = DeepseekV32Attention._sparse_indexer_and_attn
    _should_prepare_mqa_query = DeepseekV32Attention._should_prepare_mqa_query

    def __init__(self, model: "Model", number: int, has_indexer: bool) -> None:
        machine = model.machine
        self.layer_name = f"layers.{number}.attn"
        self.indexer = None
        self.num_heads = self.num_local_heads = HEADS
        self.v_head_dim, self.qk_head_dim = V_DIM, NOPE + ROPE
        self.qk_nope_head_dim, self.qk_rope_head_dim = NOPE, ROPE
        self.q_lora_rank, self.kv_lora_rank = Q_LORA, KV_LORA
        self.fused_qkv_a_proj = Linear(machine, "fused_qkv_a_proj", HIDDEN, Q_LORA + KV_LORA + ROPE)
        self.q_b_proj = Linear(machine, "q_b_proj", Q_LORA, HEADS * (NOPE + ROPE))
        self.o_proj = Linear(machine, "o_proj", HEADS * V_DIM, HIDDEN)
        self.q_a_layernorm = self.kv_a_layernorm = SimpleNamespace(
            weight=torch.ones(1), variance_epsilon=1e-6
        )
        cache = torch.linspace(0.1, 1.0, SLOTS * ROPE).view(SLOTS, ROPE)
        self.rotary_emb = self.indexer_rope_emb = SimpleNamespace(cos_sin_cache=cache)
        self._index_rope_interleave = False
        generator = torch.Generator().manual_seed(number)
        self.W_UK_T = torch.randn(HEADS, NOPE, KV_LORA, generator=generator)
        self.W_UV = torch.randn(HEADS, KV_LORA, V_DIM, generator=generator)
        self._q_scale = self._k_scale = torch.ones(1)
        self._k_scale_float = 1.0
        self.kv_cache = torch.zeros(SLOTS // BLOCK, BLOCK, KV_LORA + ROPE)
        self.kv_cache_dtype = "auto"
        self._fp8_query = self._fp8_kv_needs_view = False
        self.hisparse_cache = None
        self.use_pcp = self.pcp_shard_decode_requests = False
        self.topk_indices_buffer = model.topk
        self.skip_topk = False
        self._dense_mha_metadata_layer_name = ""
        self._vllm_config = model.config
        dcp = model.config.parallel_config.decode_context_parallel_size
        self.dcp_manager = Dcp(machine) if dcp > 1 else None
        if has_indexer:
            self.indexer = SimpleNamespace(
                wk_weights_proj=Linear(machine, "wk_weights_proj", HIDDEN, INDEX_DIM + INDEX_HEADS),
                wq_b=Linear(machine, "wq_b", Q_LORA, INDEX_HEADS * INDEX_DIM),
                k_norm=SimpleNamespace(weight=torch.ones(1), bias=torch.zeros(1), eps=1e-6),
                k_cache=SimpleNamespace(
                    prefix=f"layers.{number}.k",
                    kv_cache=torch.zeros(SLOTS, INDEX_DIM),
                    uses_shuffled_layout=False,
                ),
                indexer_op=SimpleNamespace(topk_backend="auto"),
                n_head=INDEX_HEADS,
                head_dim=INDEX_DIM,
                softmax_scale=0.5,
                quant_block_size=128,
                scale_fmt="ue8m0",
                topk_tokens=TOPK,
                max_model_len=SLOTS,
                max_total_seq_len=SLOTS,
            )
            model.group = model.new_group(has_indexer=True)
        self.impl = Impl(model, dcp)
        self._indexer_overlap = schedule.make_overlap(self, model.config) if model.with_overlap else None

    def _use_sparse_mha(self, attn_metadata) -> bool:
        return False


class Dcp:
    """Decode context parallelism of two ranks that hold the same."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.group = machine, SimpleNamespace(rank_in_group=0)

    def query_gather(self, q: torch.Tensor) -> torch.Tensor:
        self.machine.note("collective: query gather")
        return q

    def combine(self, out: torch.Tensor, lse: torch.Tensor, **kwargs) -> torch.Tensor:
        self.machine.note("collective: combine")
        return out


class Impl:
    """The attention backend: converts the ids by upstream's index group, then attends to what they name."""

    def __init__(self, model: "Model", dcp_world_size: int) -> None:
        self.model, self.group = model, model.group
        self.index = self.group.register_layer()
        self.dcp_world_size, self.pcp_world_size = dcp_world_size, 1

    def prepare_for_batch(self, attn_metadata) -> None:
        self.group.prepare_for_batch(self.index, attn_metadata)

    def record_logical_topk_ready(self) -> None:
        self.group.set_logical_topk_ready(self.index)

    def forward_mqa(self, q, kv_cache, attn_metadata, layer):
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens = q.shape[0]
        ids = self.group.convert_logical_to_physical_topk(
            self.index,
            layer.topk_indices_buffer[:tokens],
            attn_metadata,
            block_stride_rows=None,
            return_valid_counts=False,
        )
        self.model.machine.note("attention")
        keys = kv_cache.view(SLOTS, -1)[ids.clamp_min(0).long()].tanh()
        scores = torch.einsum("thd,tkd->thk", q, keys).softmax(-1) * (ids >= 0)[:, None]
        out = torch.einsum("thk,tkd->thd", scores, keys[..., :KV_LORA])
        return out, scores.sum(-1)


class Model:
    """Layers with and without an indexer, run one after the other as a model does.

    Args:
        layers: for each layer whether it has an indexer.
        with_overlap: False for layers as VLLM_DSA=0 leaves them.
        cuda: what the platform says of itself.
        small_group: batches are too large for the index group: the main stream converts the ids.
        config: ``parallel`` (dict), ``lora`` and ``graph`` of the engine's configuration.
    """

    def __init__(
        self,
        monkeypatch,
        layers=(True, False, True),
        with_overlap=True,
        cuda=True,
        small_group=False,
        **config,
    ) -> None:
        self.machine = machine = Machine()
        machine.patch(monkeypatch)
        self.conversion = Stream(machine, "conversion")
        machine.sides.append(self.conversion)
        self.with_overlap = with_overlap
        self.group_rows = 2 if small_group else SLOTS
        self.topk = torch.full((SLOTS, TOPK), 77, dtype=torch.int32)
        parallel = {"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
        parallel |= {"prefill_context_parallel_size": 1, "use_ubatching": False, "enable_dbo": False}
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(**(parallel | config.pop("parallel", {}))),
            compilation_config=SimpleNamespace(cudagraph_mode=config.pop("graph", CUDAGraphMode.FULL)),
            lora_config=config.pop("lora", None),
        )
        assert not config, config
        self._replace(monkeypatch, cuda)
        self.layers = [Layer(self, number, has) for number, has in enumerate(layers)]

    def _replace(self, monkeypatch, cuda: bool) -> None:
        from vllm.platforms import current_platform

        monkeypatch.setattr(current_platform, "is_cuda", lambda: cuda, raising=False)
        monkeypatch.setattr(current_platform, "has_device_capability", lambda *a, **k: False, raising=False)
        monkeypatch.setattr(current_platform, "get_device_name", lambda *a: "NVIDIA Test", raising=False)
        monkeypatch.setattr(attention, "fused_norm_rope", self._fused_norm_rope)
        monkeypatch.setattr(attention, "fused_q", self._fused_q)
        self._signatures = {
            name: inspect.signature(function)
            for name, function in (
                ("fused_norm_rope", REAL_FUSED_NORM_ROPE),
                ("fused_q", REAL_FUSED_Q),
                ("top-k", inspect.unwrap(REAL_TOPK)),
            )
        }
        monkeypatch.setattr(kernels, "fused_q", self._fused_q)
        monkeypatch.setattr(kernels, "fused_norm_rope", self._fused_norm_rope)
        monkeypatch.setattr(attention, "sparse_attn_indexer", self._topk)
        monkeypatch.setattr(index_group, "current_stream", lambda: self.machine.current)
        monkeypatch.setattr(index_group, "triton_convert_req_index_to_global_index", _convert)

    def new_group(self, has_indexer: bool) -> index_group.SparseMLAIndexGroup:
        return index_group.SparseMLAIndexGroup(
            logical_topk_indices=self.topk,
            physical_topk_indices=torch.zeros(self.group_rows, TOPK, dtype=torch.int32),
            valid_topk_counts=torch.zeros(SLOTS, dtype=torch.int32),
            side_stream=self.conversion,
            logical_topk_ready=Event(),
            physical_topk_ready=Event(),
            has_indexer=has_indexer,
        )

    # --- what upstream compiles; arguments are bound to upstream's signatures, so a change there fails here

    def _bind(self, name: str, args: tuple, kwargs: dict) -> SimpleNamespace:
        bound = self._signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    def _fused_norm_rope(self, *args, **kwargs) -> torch.Tensor:
        a = self._bind("fused_norm_rope", args, kwargs)
        part = "" if a.has_indexer else " without the indexer"
        self.machine.note(f"fused_norm_rope{part if a.kv_c_out is not None else ' of the indexer'}")
        tokens = a.positions.shape[0]
        if a.kv_c_out is not None:
            a.kv_c_out.copy_(a.kv_c)
            a.k_pe_out.copy_(a.k_pe)
        if a.mla_kv_cache is not None:
            a.mla_kv_cache.view(SLOTS, -1).index_copy_(0, a.slot_mapping, torch.cat((a.kv_c, a.k_pe), -1))
        if a.has_indexer:
            a.topk_indices_buffer[:tokens].fill_(-1)
            if a.indexer_k_cache is not None:
                a.indexer_k_cache.index_copy_(0, a.indexer_slot_mapping, a.index_k.sin())
        return a.q_c.tanh()

    def _fused_q(self, *args, **kwargs):
        a = self._bind("fused_q", args, kwargs)
        heads = a.q_pe.shape[1]
        roles = "both" if a.has_indexer and heads else "index" if a.has_indexer else "mqa"
        self.machine.note(f"fused_q {roles}")
        turn = a.q_pe_cos_sin_cache[a.positions][:, None]
        mqa_q = a.q_pe * turn[..., : a.q_pe.shape[-1]] if heads else torch.empty_like(a.q_pe)
        if not a.has_indexer:
            return torch.empty(1), torch.empty(1), mqa_q
        index_q = a.index_q * a.index_q_cos_sin_cache[a.positions].sum(-1)[:, None, None]
        weights = a.index_weights * a.index_weights_softmax_scale * a.index_weights_head_scale
        return index_q, weights, mqa_q

    def _topk(self, *args, **kwargs) -> torch.Tensor:
        a = self._bind("top-k", args, kwargs)
        assert a.skip_k_cache_insert and a.skip_topk_buffer_clear and a.topk_tokens == TOPK
        self.machine.note("top-k")
        tokens = a.hidden_states.shape[0]
        scores = torch.einsum("thd,sd,th->ts", a.q_quant, a.kv_cache, a.weights)
        a.topk_indices_buffer[:tokens].copy_(scores.topk(TOPK, dim=-1).indices)
        if a.dcp_world_size > 1:
            self.machine.note("collective: top-k")
        return a.topk_indices_buffer

    # --- one pass

    def context(self, tokens: int, **overrides) -> ForwardContext:
        """A forward context as the V2 runner makes it for decode, also while it captures a FULL graph."""
        slots = torch.arange(tokens) + 5
        metadata = SimpleNamespace(
            num_actual_tokens=tokens,
            num_decode_tokens=tokens,
            prefill=None,
            req_id_per_token=torch.zeros(SLOTS, dtype=torch.int32),
            block_table=torch.zeros(1, 4, dtype=torch.int32),
            block_size=BLOCK,
        )
        names = [layer.layer_name for layer in self.layers]
        names += [layer.indexer.k_cache.prefix for layer in self.layers if layer.indexer is not None]
        values = {
            "no_compile_layers": {layer.layer_name: layer for layer in self.layers},
            "attn_metadata": dict.fromkeys(names, metadata),
            "slot_mapping": dict.fromkeys(names, slots),
            "cudagraph_runtime_mode": CUDAGraphMode.NONE,
        }
        return ForwardContext(**(values | overrides))

    def run(self, tokens: int = 5, passes: int = 2, **overrides) -> torch.Tensor:
        """Run all layers ``passes`` times on fixed inputs and return the last hidden states."""
        hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        positions = torch.arange(tokens) + 5
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors of a few elements: threads only wait for each other
        try:
            with override_forward_context(self.context(tokens, **overrides)), self.machine:
                for _ in range(passes):
                    for layer in self.layers:
                        hidden = hidden + layer.forward(positions, hidden)
        finally:
            torch.set_num_threads(threads)
        return hidden


def _convert(req_id, block_table, logical, *, out=None, **kwargs) -> torch.Tensor:
    return out.copy_(logical) if out is not None else logical.clone()


REAL_FUSED_NORM_ROPE, REAL_FUSED_Q = kernels.fused_norm_rope, kernels.fused_q
REAL_TOPK = attention.sparse_attn_indexer
