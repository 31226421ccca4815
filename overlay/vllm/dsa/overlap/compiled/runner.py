# SPDX-License-Identifier: Apache-2.0
"""F2's entry from ``vllm::sparse_attn_indexer``: finds the layer that a call belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.dsa.overlap.compiled.layer import LayerOverlap
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.utils.torch_utils import _resolve_layer_name


def install(k_cache: Any, mla_attn: Any, overlap: LayerOverlap) -> None:
    """Let the indexer's op and the attention op of one layer find its overlap.

    Args:
        k_cache: the indexer's cache layer, by whose name the op is called.
        mla_attn: the attention layer, in whose ``forward_impl`` the join stands.
        overlap: the layer's overlap.
    """
    k_cache.dsa_overlap = (overlap, mla_attn.layer_name)
    mla_attn.dsa_overlap = overlap
    sparse_attn_indexer.dsa_runner = run


def run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run or defer one call of ``sparse_attn_indexer``; other layers' calls run as upstream's.

    Args:
        op: the op's own function.
        args: of the call; the second is the name of the indexer's cache layer.
        kwargs: of the call.
    """
    name = args[1] if len(args) > 1 else kwargs["k_cache_prefix"]
    layers = getattr(get_forward_context(), "no_compile_layers", {})
    found = getattr(layers.get(_resolve_layer_name(name)), "dsa_overlap", None)
    if found is None:
        return op(*args, **kwargs)
    overlap, mla_name = found
    return overlap.run_indexer(op, args, kwargs, mla_name)
