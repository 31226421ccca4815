# SPDX-License-Identifier: Apache-2.0
"""One attention layer's two forks on the compiled line, and what they may touch.

F1 (``fork``, ``join``) is traced into the graph as two opaque ops around the fused QKV-A projection. F2
(``run_indexer``, ``join_indexer``) lives in ops that split the graph anyway: the indexer's op only takes note
of its arguments, and the attention op runs it. In both the side work is launched at the join (see `Lane`).

What the side stream touches:

- It reads arguments of the op that launches it, or tensors held here until that launch. The join follows
  the launch at once, so whatever frees or reuses them on the main stream comes after it. For F2 this needs
  the ops to split the graph: inside one compiled graph memory is reused by plan, whoever still holds it.
- F1's output is allocated at the fork. Allocated at the join it could be memory that main work between fork
  and join still uses, because the side stream does not wait for that work.
- What F2 allocates comes from the side stream's own memory and never leaves it: top-k goes to the layer's
  buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.dsa import counters
from vllm.dsa.overlap.compiled import gates, ops  # noqa: F401  (importing ops registers them)
from vllm.dsa.overlap.mode import Mode
from vllm.dsa.overlap.streams import Lane
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.utils.torch_utils import _encode_layer_name

FEATURE = "overlap"
#: Reason counted where ``auto`` chose less for a token count than the graph could do.
CHOSEN_OFF = "auto chose so for this token count"


@dataclass
class _Deferred:
    """An indexer call that waits for its join, and the forward pass that it belongs to."""

    context: ForwardContext
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerOverlap:
    """Fork and join of one layer.

    Attributes:
        name: key in ``static_forward_context``, unique in the model.
        indexer_first: whether the model calls the indexer before the query projection (F2), a constant of the
            traced graph.
        native: whether the compiler forks (`vllm.dsa.overlap.native`), a constant of the traced graph too.
    """

    native = False

    def __init__(
        self,
        name: str,
        linear: torch.nn.Module,
        stream: torch.cuda.Stream,
        choose: Callable[[int], Mode],
        *,
        whole: bool,
        pieces: bool,
    ) -> None:
        """
        Args:
            name: see the class.
            linear: the indexer's ``wk_weights_proj``, with ``weight`` [head_dim + heads, hidden] and no bias.
            stream: the side stream.
            choose: gives the mode for a token count; FULL counts as WK unless ``whole``.
            whole: F2 too, not F1 alone.
            pieces: whether F1 also forks in graphs that are captured piece by piece.
        """
        self.name = name
        self.indexer_first = whole
        self._linear = linear
        self._width = int(linear.weight.shape[0])  # here: tracing must not meet the parameter
        self._choose = choose
        self._pieces = pieces
        self._wk_lane = Lane(stream)
        self._indexer_lane = Lane(stream)
        #: Between F1's fork and join: the output to fill, and whether the side stream fills it.
        self._wk: tuple[torch.Tensor, bool] | None = None
        self._deferred: _Deferred | None = None

    # Traced by torch.compile.

    def fork(self, hidden_states: torch.Tensor) -> None:
        """F1: mark where the side branch may start. ``hidden_states`` [tokens, hidden] is not changed."""
        torch.ops.vllm.dsa_wk_fork(hidden_states, self._width, _encode_layer_name(self.name))

    def join(self, hidden_states: torch.Tensor, qkv_lora: torch.Tensor) -> torch.Tensor:
        """F1: return ``wk_weights_proj(hidden_states)`` [tokens, head_dim + heads], for the current stream.

        Args:
            hidden_states: what the fork got.
            qkv_lora: the main branch's result; not read, it keeps the join behind it.
        """
        out: torch.Tensor = torch.ops.vllm.dsa_wk_join(
            hidden_states, qkv_lora, self._width, _encode_layer_name(self.name)
        )
        return out

    # Bodies of these two ops.

    def start_wk(self, hidden_states: torch.Tensor, width: int) -> None:
        """Body of F1's fork."""
        tokens = hidden_states.shape[0]
        inline = self._inline(tokens, (Mode.WK, Mode.FULL), pieces=self._pieces)
        counters.count(FEATURE, "wk inline" if inline else "wk forked", inline or "")
        out = hidden_states.new_empty((tokens, width))
        if not inline:
            self._wk_lane.fork()
        # A fork before it whose forward pass failed is forgotten.
        self._wk = (out, not inline)

    def finish_wk(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Body of F1's join.

        Raises:
            RuntimeError: no fork came before: the graph holds one without the other.
        """
        if self._wk is None:
            raise RuntimeError(f"{self.name}: join of wk_weights_proj without its fork")
        (out, forked), self._wk = self._wk, None
        if forked:
            self._wk_lane.run(self._wk_gemm, hidden_states, out)
        else:
            self._wk_gemm(hidden_states, out)
        return out

    def _wk_gemm(self, hidden_states: torch.Tensor, out: torch.Tensor) -> None:
        # The call that torch.compile makes of this layer: the same kernel, the same bits.
        torch.mm(hidden_states, self._linear.weight.t(), out=out)

    # Called from the ops that split the graph.

    def run_indexer(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mla_name: str
    ) -> Any:
        """F2: run the indexer's op now, or note the call for `join_indexer`.

        Args:
            op: ``sparse_attn_indexer`` itself.
            args: of this call; the first is ``hidden_states`` [tokens, hidden].
            kwargs: of this call.
            mla_name: the attention layer in whose op the join stands.

        Returns:
            What the op returns: its top-k buffer.
        """
        self._deferred = None  # of a forward pass that failed
        context = get_forward_context()
        inline = self._inline(args[0].shape[0], (Mode.FULL,), pieces=False)
        inline = inline or gates.why_no_join(context, mla_name)
        counters.count(FEATURE, "indexer inline" if inline else "indexer forked", inline or "")
        if inline:
            return op(*args, **kwargs)
        self._indexer_lane.fork()
        self._deferred = _Deferred(context, op, args, kwargs)
        return gates.topk_buffer(args, kwargs)

    def join_indexer(self) -> None:
        """F2: run the noted call, if there is one, on the side stream; the current stream waits for it."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None and deferred.context is get_forward_context():
            self._indexer_lane.run(deferred.op, *deferred.args, **deferred.kwargs)

    def _inline(self, tokens: int, modes: tuple[Mode, ...], *, pieces: bool) -> str | None:
        reason = gates.why_inline(get_forward_context(), tokens, pieces=pieces)
        return reason or (None if self._choose(tokens) in modes else CHOSEN_OFF)
