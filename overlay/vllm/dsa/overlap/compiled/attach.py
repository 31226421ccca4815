# SPDX-License-Identifier: Apache-2.0
"""Decides, when a layer is built, what it overlaps, and ties the parts together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm.envs as envs
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.dsa import features, provenance
from vllm.dsa.overlap import auto, gates
from vllm.dsa.overlap.compiled import runner
from vllm.dsa.overlap.compiled.layer import FEATURE, LayerOverlap
from vllm.dsa.overlap.feature import card_here
from vllm.dsa.overlap.mode import Mode, requested

#: Where a configuration keeps which overlap its graph was traced with, see `_remember`.
TRACED = "vllm_dsa_overlap"

#: Ops that must split the graph for F2: see `vllm.dsa.overlap.compiled.layer`.
_SPLITTING = {"vllm::sparse_attn_indexer", "vllm::unified_mla_attention_with_output"}


def attach(wrapper: Any) -> LayerOverlap | None:
    """Return what a layer overlaps, or None: then it is built and runs exactly as upstream's.

    Called at the end of the constructor of ``MultiHeadLatentAttentionWrapper``, for layers with an indexer.
    All that it looks at is the same on every rank.

    Args:
        wrapper: the layer.

    Raises:
        ValueError: the model has another layer of this name.
    """
    mode = requested().mode
    if mode is Mode.OFF:
        return None
    config = get_current_vllm_config()
    native, whole = mode is Mode.NATIVE, mode is Mode.FULL
    choose: Callable[[int], Mode] = lambda _tokens: mode  # noqa: E731
    if mode is Mode.AUTO:
        entry = measured(wrapper, config)
        if entry is None:
            return None  # said at start-up
        choose = limited(entry, auto.most_sequences(entry.line))
        whole = any(chosen == Mode.FULL.value for _, chosen in entry.points)
    reason = (
        gates.config_reason(config)
        or (None if isinstance(config.additional_config, dict) else "additional_config is no dictionary")
        or why_not(wrapper)
        or (why_not_native(wrapper, config) if native else None)
    )
    no_whole = why_not_whole(config) if whole and not reason else None
    if no_whole and mode is Mode.AUTO:
        reason = no_whole  # less than full was not chosen
    if reason:
        features.report_declined(FEATURE, reason)
        return None
    if no_whole:
        features.report_declined(FEATURE, f"{no_whole}: no more than wk")
        whole = False

    from vllm.utils.torch_utils import aux_stream

    name, linear = f"{wrapper.prefix}.dsa_overlap", wrapper.indexer.wk_weights_proj
    if native:
        overlap = make_native(name, linear, aux_stream(), wrapper.mla_attn.layer_name)
    else:
        # auto only does what was measured and compared: full graphs.
        overlap = LayerOverlap(name, linear, aux_stream(), choose, whole=whole, pieces=mode is Mode.WK)
    layers = config.compilation_config.static_forward_context
    if overlap.name in layers:
        raise ValueError(f"Duplicate layer name: {overlap.name}")
    layers[overlap.name] = overlap
    _remember(config, "native" if native else "full" if whole else "wk")
    if whole or native:
        runner.install(wrapper.indexer.k_cache, wrapper.mla_attn, overlap)
    features.report_active(FEATURE, f"mode {mode}" if whole or mode is not Mode.FULL else "mode wk")
    return overlap


def make_native(name: str, linear: Any, stream: Any, mla_name: str) -> LayerOverlap:
    """Return the overlap of ``native``; nothing of it is imported in the other modes."""
    from vllm.dsa.overlap.native import stream as side_stream
    from vllm.dsa.overlap.native.layer import NativeOverlap

    side_stream.install()
    return NativeOverlap(name, linear, stream, mla_name)


def _remember(config: VllmConfig, traced: str) -> None:
    """Make the graph that is going to be traced a part of the key of vLLM's compiled artifacts.

    The switch, which is one already, does not say it alone: what ``auto`` knows about this card and whether a
    mode was declined decide too, and an artifact that forks needs its layers.
    """
    known = config.additional_config.get(TRACED, [])
    # Not changed in place: a caller may have given the same dictionary to several engines.
    config.additional_config = config.additional_config | {TRACED: sorted({*known, traced})}


def measured(wrapper: Any, config: VllmConfig) -> auto.Entry | None:
    """Return what ``auto`` knows about this layer's shape on this card, or None."""
    if auto.unmeasured(config) is not None:
        return None
    line, index_heads = provenance.read().line, getattr(wrapper.indexer, "n_head", 0)
    return auto.entry_for(config, line, card_here(), wrapper.num_heads, index_heads)


def limited(entry: auto.Entry, most: int) -> Callable[[int], Mode]:
    """Return the choice of ``auto`` for a token count: OFF above ``most``, what its decode graphs may hold.

    Larger batches run without a full graph, as prefills do; in those nothing was measured to gain.
    """
    return lambda tokens: entry.mode(tokens) if tokens <= most else Mode.OFF


def why_not(wrapper: Any) -> str | None:
    """Return why this layer overlaps nothing, or None."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.model_executor.models.deepseek_v2 import Indexer

    if type(wrapper) is not MultiHeadLatentAttentionWrapper:
        return f"attention layer of type {type(wrapper).__name__}"
    if type(wrapper.indexer) is not Indexer:
        return f"indexer of type {type(wrapper.indexer).__name__}"
    if wrapper.q_lora_rank is None:
        return "no fused QKV-A projection"
    linear = wrapper.indexer.wk_weights_proj
    if type(linear.quant_method) is not UnquantizedLinearMethod or linear.bias is not None:
        return "quantised wk_weights_proj"
    return "VLLM_BATCH_INVARIANT=1" if envs.VLLM_BATCH_INVARIANT else None


def why_not_native(wrapper: Any, config: VllmConfig) -> str | None:
    """Return why the compiler cannot fork in this layer (``native``), or None."""
    from vllm.dsa.overlap.native import probe

    return why_not_whole(config) or probe.why_not(wrapper, config)


def why_not_whole(config: VllmConfig) -> str | None:
    """Return why the indexer's op cannot be deferred (F2), or None."""
    compilation = config.compilation_config
    if compilation.mode == CompilationMode.NONE:
        return None
    if compilation.mode != CompilationMode.VLLM_COMPILE or compilation.use_inductor_graph_partition:
        return "vLLM does not split the graph"
    if not set(compilation.splitting_ops or ()) >= _SPLITTING:
        return "indexer and attention do not split the graph"
    return None
