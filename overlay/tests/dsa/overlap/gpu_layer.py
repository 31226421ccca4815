# SPDX-License-Identifier: Apache-2.0
"""One DSA attention layer of line 0.33.0 on a card: upstream's patched forward with upstream's own kernels.

Fused norms, query packing, DeepGEMM's paged scoring and the decode top-k are the real ones at the widths of
DeepSeek-V3.2; the GEMMs are unquantised bfloat16. Sparse attention itself is a stand-in in torch that gathers
the selected keys in ascending order, because the order in which a top-k writes its ids is free.
"""

from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext
from vllm.model_executor.kernels.linear import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as marlin
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
)

HIDDEN, Q_LORA, KV_LORA, ROPE, NOPE, V_DIM = 7168, 1536, 512, 64, 128, 128
INDEX_DIM, TOPK, BLOCK = 128, 2048, 64


class Linear:
    """An unquantised GEMM layer with seeded weights."""

    def __init__(self, rows: int, columns: int, generator: torch.Generator) -> None:
        weight = torch.randn(columns, rows, generator=generator, device="cuda") * rows**-0.5
        self.weight = weight.bfloat16()
        self.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)

    def __call__(self, x: torch.Tensor):
        return torch.nn.functional.linear(x, self.weight), None


class Marlin(torch.nn.Module):
    """The same in FP8 weights by upstream's Marlin kernel, whose locks all calls on a stream share."""

    def __init__(self, plain: Linear) -> None:
        super().__init__()
        self.output_size_per_partition, self.input_size_per_partition = plain.weight.shape
        self.logical_widths, self.orig_dtype = [plain.weight.shape[0]], torch.bfloat16
        scale = plain.weight.float().abs().amax().view(1) / 448
        weight = (plain.weight.float() / scale).to(torch.float8_e4m3fn).t().contiguous()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        marlin.prepare_fp8_layer_for_marlin(self)
        kernel = object.__new__(MarlinFP8ScaledMMLinearKernel)
        self.quant_method = SimpleNamespace(fp8_linear=kernel)

    def forward(self, x: torch.Tensor):
        sizes = self.output_size_per_partition, self.input_size_per_partition
        return marlin.apply_fp8_marlin_linear(x, self.weight, self.weight_scale, None, *sizes, None), None


class Layer:
    """A layer with an indexer; ``attention_class`` holds the three methods under test."""

    def __init__(
        self,
        number: int,
        heads: int,
        index_heads: int,
        context: int,
        tokens: int,
        topk: torch.Tensor,
        attention_class: type = DeepseekV32Attention,
        marlin_projections: bool = False,
    ) -> None:
        for name in ("forward", "_sparse_indexer_and_attn", "_should_prepare_mqa_query"):
            setattr(self, name, getattr(attention_class, name).__get__(self))
        generator = torch.Generator("cuda").manual_seed(number)

        def norm(size: int) -> SimpleNamespace:
            weight = torch.ones(size, device="cuda", dtype=torch.bfloat16)
            return SimpleNamespace(weight=weight, variance_epsilon=1e-6)

        self.layer_name = f"layers.{number}.attn"
        self.num_heads = self.num_local_heads = heads
        self.v_head_dim, self.qk_head_dim = V_DIM, NOPE + ROPE
        self.qk_nope_head_dim, self.qk_rope_head_dim = NOPE, ROPE
        self.q_lora_rank, self.kv_lora_rank = Q_LORA, KV_LORA
        self.fused_qkv_a_proj = Linear(HIDDEN, Q_LORA + KV_LORA + ROPE, generator)
        self.q_b_proj = Linear(Q_LORA, heads * (NOPE + ROPE), generator)
        self.o_proj = Linear(heads * V_DIM, HIDDEN, generator)
        self.q_a_layernorm, self.kv_a_layernorm = norm(Q_LORA), norm(KV_LORA)
        angle = torch.rand(context + 1, ROPE // 2, generator=generator, device="cuda") * 6.3
        cache = torch.cat((angle.cos(), angle.sin()), -1)
        self.rotary_emb = self.indexer_rope_emb = SimpleNamespace(cos_sin_cache=cache)
        self._index_rope_interleave = False
        shape = {"generator": generator, "device": "cuda"}
        self.W_UK_T = (torch.randn(heads, NOPE, KV_LORA, **shape) * NOPE**-0.5).bfloat16()
        self.W_UV = (torch.randn(heads, KV_LORA, V_DIM, **shape) * KV_LORA**-0.5).bfloat16()
        self._q_scale = self._k_scale = torch.ones(1, device="cuda")
        self._k_scale_float = 1.0
        blocks = tokens * ((context + BLOCK - 1) // BLOCK)
        self.kv_cache = torch.randn(blocks, BLOCK, KV_LORA + ROPE, **shape).bfloat16()
        self.kv_cache_dtype = "auto"
        self._fp8_query = self._fp8_kv_needs_view = False
        self.hisparse_cache = self.dcp_manager = None
        self.use_pcp = self.pcp_shard_decode_requests = self.skip_topk = False
        self.topk_indices_buffer = topk
        self._dense_mha_metadata_layer_name = ""
        parallel = SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
        self._vllm_config = SimpleNamespace(parallel_config=parallel)
        keys = torch.randn(blocks * BLOCK, INDEX_DIM, **shape)
        self.indexer = SimpleNamespace(
            wk_weights_proj=Linear(HIDDEN, INDEX_DIM + index_heads, generator),
            wq_b=Linear(Q_LORA, index_heads * INDEX_DIM, generator),
            k_norm=SimpleNamespace(
                weight=torch.ones(INDEX_DIM, device="cuda"),
                bias=torch.zeros(INDEX_DIM, device="cuda"),
                eps=1e-6,
            ),
            k_cache=SimpleNamespace(
                prefix=f"layers.{number}.k", kv_cache=index_cache(keys), uses_shuffled_layout=False
            ),
            indexer_op=SimpleNamespace(topk_backend="auto"),
            n_head=index_heads,
            head_dim=INDEX_DIM,
            softmax_scale=INDEX_DIM**-0.5,
            quant_block_size=128,
            scale_fmt="ue8m0",
            topk_tokens=TOPK,
            max_model_len=max(context, 2 * TOPK),
            max_total_seq_len=context,
        )
        self.impl = SimpleNamespace(
            dcp_world_size=1,
            pcp_world_size=1,
            prepare_for_batch=lambda metadata: None,
            record_logical_topk_ready=lambda: None,
            forward_mqa=self._attend,
        )
        self._indexer_overlap = None
        if marlin_projections:
            self.fused_qkv_a_proj = Marlin(self.fused_qkv_a_proj)
            self.q_b_proj = Marlin(self.q_b_proj)
            self.indexer.wq_b = Marlin(self.indexer.wq_b)

    def _use_sparse_mha(self, attn_metadata) -> bool:
        return False

    def _attend(self, q, kv_cache, attn_metadata, layer):
        """Attention over the selected keys, in ascending order of their ids."""
        q = torch.cat(q, dim=-1)
        ids = self.topk_indices_buffer[: q.shape[0]].sort(dim=-1).values
        slots = attn_metadata.first_slot[:, None] + ids.clamp_min(0)
        keys = kv_cache.view(-1, KV_LORA + ROPE)[slots]
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * (NOPE + ROPE) ** -0.5
        scores.masked_fill_((ids < 0)[:, None], float("-inf"))
        return torch.bmm(scores.softmax(-1).bfloat16(), keys[..., :KV_LORA]), None


def index_cache(keys: torch.Tensor) -> torch.Tensor:
    """Keys [n, 128] as the indexer's cache: per block of 64 all FP8 values, then all float32 scales."""
    scale = (keys.abs().amax(-1, keepdim=True) / 448.0).log2().ceil().exp2()
    values = (keys / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(-1, BLOCK * INDEX_DIM)
    scales = scale.float().contiguous().view(torch.uint8).view(-1, BLOCK * 4)
    return torch.cat((values, scales), -1).view(-1, BLOCK, INDEX_DIM + 4).contiguous()


class Model:
    """Layers that share a top-k buffer: a decode step of ``tokens`` requests of ``context`` tokens each."""

    def __init__(self, tokens: int, context: int, heads=16, index_heads=64, layers=3, **options) -> None:
        self.tokens = tokens
        self.topk = torch.zeros(tokens, TOPK, dtype=torch.int32, device="cuda")
        self.layers = [
            Layer(number, heads, index_heads, context, tokens, self.topk, **options)
            for number in range(layers)
        ]
        blocks = (context + BLOCK - 1) // BLOCK
        table = torch.arange(tokens * blocks, dtype=torch.int32, device="cuda").view(tokens, blocks)
        lengths = torch.full((tokens, 1), context, dtype=torch.int32, device="cuda")
        first = torch.arange(tokens, device="cuda") * blocks * BLOCK
        self.positions = torch.full((tokens,), context - 1, dtype=torch.int64, device="cuda")
        slots = first + context - 1
        sms = num_compute_units(0)
        decode = DeepSeekV32IndexerDecodeMetadata(
            block_table=table,
            seq_lens=lengths,
            decode_lens=torch.ones(tokens, dtype=torch.int32, device="cuda"),
            requires_padding=False,
            schedule_metadata=get_paged_mqa_logits_metadata(lengths, BLOCK, sms),
        )
        index = DeepseekV32IndexerMetadata(
            seq_lens=lengths.view(-1),
            max_seq_len=context,
            slot_mapping=slots,
            num_decodes=tokens,
            num_decode_tokens=tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
        )
        attend = SimpleNamespace(
            num_actual_tokens=tokens, num_decode_tokens=tokens, prefill=None, first_slot=first
        )
        names = {layer.layer_name: attend for layer in self.layers}
        names |= {layer.indexer.k_cache.prefix: index for layer in self.layers}
        self.context = ForwardContext(
            no_compile_layers={layer.layer_name: layer for layer in self.layers},
            attn_metadata=names,
            slot_mapping=dict.fromkeys(names, slots),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        )

    def hidden(self, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(self.tokens, HIDDEN, generator=generator, device="cuda").bfloat16()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """One step; the forward context must be set."""
        for layer in self.layers:
            update = layer.forward(self.positions, hidden)
            hidden = torch.nn.functional.rms_norm(hidden + update, (HIDDEN,))
        return hidden
