# SPDX-License-Identifier: Apache-2.0
"""Upstream's real metadata builder of the DSA indexer on the CPU, and random steps for it.

Uses nothing of vllm.dsa, so that it also runs in a pristine tree. As a script it prints one JSON line per
random step with all that build() returned; needs TRITON_INTERPRET=1, since build() launches a Triton kernel.
"""

import dataclasses
import hashlib
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

BLOCK = 64


def make_config(
    max_model_len=4096, max_tokens=2048, heads=32, k=64, tp=1, model_type="deepseek_v32", **parallel
):
    """A real VllmConfig with a stand-in for the model's own configuration."""
    config = VllmConfig()
    text = SimpleNamespace(model_type=model_type, index_n_heads=heads, index_head_dim=128, index_topk=k)
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len, hf_text_config=text, hf_config=text, architectures=[], max_logprobs=20
    )
    config.scheduler_config.max_num_batched_tokens = max_tokens
    config.scheduler_config.max_num_seqs = 64
    config.parallel_config.tensor_parallel_size = tp
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    if getattr(config.attention_config, "sparse_mla_prefill_workspace_factor", 5) is None:
        config.attention_config.sparse_mla_prefill_workspace_factor = 5
    return config


def make_builder(config, ratio=1, device="cpu"):
    """Upstream's builder, as upstream's own tests make it."""
    if device == "cpu":
        indexer.num_compute_units = lambda device: 4
    compression = "tokens_per_state" if hasattr(MLAAttentionSpec, "tokens_per_state") else "compress_ratio"
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8, **{compression: ratio}
    )
    return indexer.DeepseekV32IndexerMetadataBuilder(
        kv_cache_spec=spec,
        layer_names=["layer"],
        vllm_config=config,
        device=torch.device(device),
        block_table_width=-(-config.model_config.max_model_len // BLOCK),
    )


def make_step(queries, contexts, width, rng=None, device="cpu"):
    """Return the common metadata of requests with so many new tokens each, after so many cached ones."""
    rng = rng or random.Random(0)
    lens = [q + c for q, c in zip(queries, contexts, strict=True)]
    starts = torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    blocks = list(range(1, 1 + sum(-(-n // BLOCK) for n in lens)))
    rng.shuffle(blocks)
    table = torch.zeros(len(lens), width, dtype=torch.int32)
    for row, n in zip(table, lens, strict=True):
        used = -(-n // BLOCK)
        row[:used] = torch.tensor([blocks.pop() for _ in range(used)], dtype=torch.int32)
    slots = [
        int(table[r, p // BLOCK]) * BLOCK + p % BLOCK
        for r, (q, c) in enumerate(zip(queries, contexts, strict=True))
        for p in range(c, c + q)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts.clone(),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        num_reqs=len(lens),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lens),
        block_table_tensor=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        causal=True,
    )


def random_sizes(rng, most_context=700, most_query=130):
    """New and cached tokens of the requests of a step: decodes first, some prefills with a prefix hit."""
    decodes, prefills = rng.randint(0, 2), rng.randint(1, 5)
    queries = [1] * decodes + [rng.choice([2, 3, rng.randint(2, most_query)]) for _ in range(prefills)]
    contexts = [rng.choice([0, 0, rng.randint(1, most_context)]) for _ in queries]
    return queries, [c or int(q == 1) for q, c in zip(queries, contexts, strict=True)]


def plain(value):
    """Turn metadata into what JSON can hold; tensors into a hash of shape, type and bytes."""
    if isinstance(value, torch.Tensor):
        bytes_ = value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return [list(value.shape), str(value.dtype), hashlib.sha256(bytes_).hexdigest()]
    if dataclasses.is_dataclass(value):
        return {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def main():
    steps = int(sys.argv[1])
    for seed in range(steps):
        rng = random.Random(seed)
        config = make_config(max_model_len=1024)
        builder = make_builder(config, ratio=rng.choice([1, 1, 4]))
        queries, contexts = random_sizes(rng)
        step = make_step(queries, contexts, 16, rng)
        # Whatever build() leaves unwritten must be the same on both sides.
        for buffer in (b for b in vars(builder).values() if isinstance(b, torch.Tensor)):
            buffer.zero_()
        indexer.torch = Zeroed
        print(json.dumps({"seed": seed, "metadata": plain(builder.build(0, step))}), flush=True)


class _Zeroed:
    """torch with zeros for empty, so that memory nobody wrote is no difference."""

    def __getattr__(self, name):
        return getattr(torch, "zeros" if name == "empty" else name)


Zeroed = _Zeroed()

if __name__ == "__main__":
    main()
