# SPDX-License-Identifier: Apache-2.0
"""The overlap of line 0.33.0: what ``DeepseekV32Attention`` calls, two forks per layer that has an indexer.

- F1: the side stream runs ``wk_weights_proj`` beside the main one's ``fused_qkv_a_proj``. In mode ``wk`` it
  is joined before the fused norms. In mode ``full`` the side also norms and stores the indexer's key, beside
  the main stream's norms and ``wq_b``, and is joined before F2 forks.
- F2: the side stream runs the packing of the indexer's query, scoring, top-k and
  ``record_logical_topk_ready`` beside the main stream's ``q_b_proj``, W_UK product and packing of the MLA
  query, joined before attention.

The side branch of F2 runs upstream's own code: ``fused_q`` without MLA heads packs the indexer's query alone,
and the first half of ``_sparse_indexer_and_attn`` scores and selects. At most that branch holds a collective
(DCP's and the row shard's exchange of top-k), never the main one, so all ranks issue them in one order.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.dsa import counters, features, log, provenance
from vllm.dsa.overlap import auto, feature, gates
from vllm.dsa.overlap.mode import Mode, requested
from vllm.dsa.overlap.streams import Lane
from vllm.forward_context import get_forward_context

NAME = "overlap"


def make_overlap(layer: Any, config: Any) -> LayerOverlap | None:
    """Return the overlap of a layer, or None where the layer never forks: it then runs upstream's code as is.

    Args:
        layer: a ``DeepseekV32Attention`` at the end of its constructor.
        config: the engine's VllmConfig.
    """
    mode = requested().mode
    if mode is Mode.OFF or layer.indexer is None:
        return None
    if mode is Mode.NATIVE:
        log.info_once(f"{NAME}:native", "vllm.dsa %s: %s", NAME, feature.NATIVE_IS_OFF)
        return None
    if mode is Mode.AUTO and not _measured(layer, config):
        return None  # the state of the feature says so, at start-up and in info()
    reason = gates.config_reason(config)
    if reason is not None:
        features.report_declined(NAME, reason)
        return None
    return LayerOverlap(layer, config, mode)


def _measured(layer: Any, config: Any) -> bool:
    return auto.unmeasured(config) is None and _entry(layer, config) is not None


def _entry(layer: Any, config: Any) -> auto.Entry | None:
    line, card = provenance.read().line, feature.card_here()
    return auto.entry_for(config, line, card, layer.num_local_heads, layer.indexer.n_head)


class LayerOverlap:
    """The forks of one layer. `begin` decides once per pass of the layer; both forks follow that decision."""

    def __init__(self, layer: Any, config: Any, mode: Mode) -> None:
        self.layer = layer
        self.config = config
        self.mode = mode
        self._lane: Lane | None = None
        self._full = False  # whether this pass forks F2 too
        self._positions: torch.Tensor | None = None  # of this pass
        self._held: tuple[Any, ...] = ()  # what a side branch reads and makes, until its join
        self._most: Mode | None = None  # the most that this layer may do, found once its weights are loaded
        self._entries: dict[str, auto.Entry | None] = {}

    @property
    def key_on_side(self) -> bool:
        """Whether this pass norms and stores the indexer's key on the side stream."""
        return self._full

    def begin(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> LayerOverlap | None:
        """Decide on this pass, from host data alone, and fork F1. None: run this pass as upstream does.

        Args:
            positions: [tokens] int64.
            hidden_states: [tokens, hidden size], the layer's input.
        """
        if self.layer.skip_topk:  # an MTP layer that reuses the top-k of its first step
            return None
        tokens = hidden_states.shape[0]
        reason = gates.forward_reason(get_forward_context(), tokens)
        if reason is not None:
            counters.count(NAME, "serial", reason)
            return None
        mode = self._mode(tokens)
        if mode is Mode.OFF:
            counters.count(NAME, "serial", "declined" if self._most is Mode.OFF else "auto")
            return None
        if self._lane is None:
            self._lane = Lane(_side_stream())
            features.report_active(NAME, mode.value)
        counters.count(NAME, "forked", mode.value)
        self._full = mode is Mode.FULL
        if self._lane.pending:  # the main stream raised between F1's side branch and its join in F2
            self._lane.join()
        self._held, self._positions = (), positions
        self._lane.fork()
        return self

    def wk_weights_proj(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Side branch of F1; also its join, unless `key_on_side`. As the indexer's projection otherwise."""
        assert self._lane is not None
        result: tuple[torch.Tensor, Any]
        if self._full:
            result = self._lane.side(self._project_key, hidden_states, self._positions)
            self._held = (hidden_states, result)
        else:
            result = self._lane.run(self.layer.indexer.wk_weights_proj, hidden_states)
        return result

    def _project_key(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """``wk_weights_proj``, then the part of the fused norms that belongs to the indexer.

        Upstream's kernel gives each part a program of its own. Those of the query and of the MLA key read
        parts of ``hidden_states`` here, and what they make is dropped; without a cache none of it is stored.
        """
        from vllm.models.deepseek_v32.common.kernels import fused_norm_rope

        layer, indexer = self.layer, self.layer.indexer
        projected: tuple[torch.Tensor, Any] = indexer.wk_weights_proj(hidden_states)
        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict)
        fused_norm_rope(
            positions,
            hidden_states[:, : layer.q_lora_rank],
            layer.q_a_layernorm.weight,
            layer.q_a_layernorm.variance_epsilon,
            hidden_states[:, : layer.kv_lora_rank],
            layer.kv_a_layernorm.weight,
            layer.kv_a_layernorm.variance_epsilon,
            hidden_states[:, : layer.qk_rope_head_dim],
            layer.rotary_emb.cos_sin_cache,
            projected[0][:, : indexer.head_dim],
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            indexer.k_norm.eps,
            layer.indexer_rope_emb.cos_sin_cache,
            layer.topk_indices_buffer,
            slot_mapping=slots.get(layer.layer_name),
            indexer_slot_mapping=slots.get(indexer.k_cache.prefix),
            indexer_k_cache=indexer.k_cache.kv_cache,
            indexer_cache_shuffled=indexer.k_cache.uses_shuffled_layout,
            has_indexer=True,
            index_rope_interleave=layer._index_rope_interleave,
        )
        return projected

    def fork_indexer(
        self,
        positions: torch.Tensor,
        q_c: torch.Tensor,
        index_weights: torch.Tensor,
        softmax_scale: float,
        head_scale: float,
    ) -> bool:
        """Project the indexer's query, join F1 and fork F2, if this pass has it, and say whether.

        All that the indexer reads is recorded by then.

        Args:
            positions: [tokens] int64.
            q_c: [tokens, q_lora_rank], normalised.
            index_weights: [tokens, index heads], from `wk_weights_proj`.
            softmax_scale: factor of the weights.
            head_scale: another one.
        """
        if not self._full:
            return False
        assert self._lane is not None
        try:
            query = self.layer.indexer.wq_b(q_c)[0]  # here, so that no two GEMMs of F2 run at the same time
        finally:
            self._lane.join()
        self._lane.fork()
        self._held = (positions, q_c, query, index_weights, softmax_scale, head_scale)
        return True

    def join_indexer(self) -> str | None:
        """Side branch of F2, and its join.

        Returns:
            What ``_sparse_indexer_and_attn`` has left to do: ``"attention"``, or None for both halves.
        """
        if not self._full:
            return None
        assert self._lane is not None
        self._lane.run(self._indexer, *self._held)
        self._held = ()
        return "attention"

    def _indexer(
        self,
        positions: torch.Tensor,
        q_c: torch.Tensor,
        query: torch.Tensor,
        index_weights: torch.Tensor,
        softmax_scale: float,
        head_scale: float,
    ) -> None:
        from vllm.models.deepseek_v32.common.kernels import fused_q

        layer, indexer = self.layer, self.layer.indexer
        index_q = query.view(-1, indexer.n_head, indexer.head_dim)
        mqa_cache = layer.rotary_emb.cos_sin_cache
        no_heads = index_q[:, :0]  # an MLA query of no heads: the kernel's other roles have nothing to do
        index_q_fp8, weights, _ = fused_q(
            positions,
            no_heads[..., : mqa_cache.shape[-1]],
            mqa_cache,
            index_q,
            layer.indexer_rope_emb.cos_sin_cache,
            no_heads,
            layer._q_scale,
            index_weights,
            softmax_scale,
            head_scale,
            has_indexer=True,
            index_rope_interleave=layer._index_rope_interleave,
            quantize_mqa=False,
        )
        layer._sparse_indexer_and_attn(
            positions=positions,
            q_c=q_c,
            q_nope=None,
            q_pe=None,
            index_q_fp8=index_q_fp8,
            index_k=None,
            index_weights_out=weights,
            kv_c=None,
            k_pe=None,
            ql_nope=None,
            mqa_q=None,
            output=None,
            part="indexer",
        )

    def _mode(self, tokens: int) -> Mode:
        mode = self._auto(tokens) if self.mode is Mode.AUTO else self.mode
        if mode is Mode.OFF:
            return mode
        if self._most is None:
            self._most = self._look()
        return mode if self._most is Mode.FULL or mode is self._most else self._most

    def _look(self) -> Mode:
        """The most that this layer may do: FULL, WK or OFF. Says so once where that is less than FULL."""
        reason, instead = gates.layer_reason(self.layer), Mode.OFF
        if reason is None:
            reason, instead = gates.full_reason(), Mode.WK
        if reason is None:
            return Mode.FULL
        what = "full" if instead is Mode.WK else "wk and full"
        counters.count(NAME, "declined", f"{what}: {reason}")
        log.warning_once(
            f"{NAME}:{what}:{reason}",
            "vllm.dsa %s: %s declined (%s), %s is used",
            NAME,
            what,
            reason,
            instead,
        )
        return instead

    def _auto(self, tokens: int) -> Mode:
        graph = auto.graph_kind(self.config)  # asked again: an attention backend may have turned graphs off
        if graph not in self._entries:
            self._entries[graph] = _entry(self.layer, self.config)
        entry = self._entries[graph]
        return Mode.OFF if entry is None else entry.mode(tokens)


def _side_stream() -> Any:
    """vLLM's one auxiliary stream, of default priority; its other users join within their layer as we do."""
    from vllm.utils.torch_utils import aux_stream

    return aux_stream()
