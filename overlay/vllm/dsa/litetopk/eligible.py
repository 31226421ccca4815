# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's configuration is one for LiteTopK: from it alone, so alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.dsa.litetopk import plan

#: Models whose indexer calls the shared op on an uncompressed FP8 cache. Others may pass candidate blocks
#: (DeepSeek-V4.1) or have an op of their own; ignoring either would give wrong positions.
MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")


@dataclass(frozen=True)
class Indexer:
    """The shape of a model's indexer.

    Attributes:
        heads: index heads; every rank has all of them.
        dim: of one head.
        k: top-k.
    """

    heads: int
    dim: int
    k: int


def indexer(config: Any) -> Indexer:
    """Return the indexer's shape from the engine's VllmConfig; numbers that are missing are 0."""
    text = config.model_config.hf_text_config
    return Indexer(
        *(int(getattr(text, name, 0) or 0) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    )


def why_not(config: Any) -> str:
    """Return why this configuration takes upstream's path as a whole, '' if it does not.

    Args:
        config: the engine's VllmConfig.
    """
    text, parallel = config.model_config.hf_text_config, config.parallel_config
    if text.model_type not in MODEL_TYPES:
        return f"the model type {text.model_type}"
    if getattr(text, "candidate_block_size", 0):
        return "candidate blocks"
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism (DCP)"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism (PCP)"
    if parallel.use_ubatching:
        return "dual batch overlap (DBO)"
    kv_dtype = config.attention_config.resolve_indexer_kv_dtype("fp8")
    if kv_dtype != "fp8":
        return f"an indexer cache of {kv_dtype}"
    shape = indexer(config)
    return plan.unsupported(shape.heads, shape.dim, shape.k)
