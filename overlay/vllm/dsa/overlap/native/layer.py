# SPDX-License-Identifier: Apache-2.0
"""One attention layer's overlap in ``native``: one fork, in the traced graph, and F2's join.

The indexer's kernels up to its op are Inductor's, on the side stream (`compiler`). The op itself waits for
the join as in ``full`` and follows them on that stream. Where the compiler left the kernels on the main
stream, or nothing was compiled, the op forks again behind them: then this is F2 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.dsa import counters
from vllm.dsa.overlap.compiled import gates
from vllm.dsa.overlap.compiled.layer import FEATURE, LayerOverlap, _Deferred
from vllm.dsa.overlap.mode import Mode
from vllm.dsa.overlap.native import ops  # noqa: F401  (importing registers the op)
from vllm.dsa.overlap.native.compiler import MARK
from vllm.dsa.overlap.native.stream import SIDE
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import _encode_layer_name


class NativeOverlap(LayerOverlap):
    """Fork and join of one layer; ``native`` tells the model which calls to make.

    Args:
        mla_name: the attention layer in whose op the join stands; for the rest see `LayerOverlap`.
    """

    native = True

    def __init__(self, name: str, linear: torch.nn.Module, stream: Any, mla_name: str) -> None:
        super().__init__(name, linear, stream, lambda _tokens: Mode.FULL, whole=False, pieces=False)
        self._mla_name = mla_name
        #: In a pass that forked, until its join: what the side stream reads of the main stream's memory.
        self._held: tuple[torch.Tensor, ...] | None = None
        self._entered = False

    # Traced by torch.compile.

    def fork(self, hidden_states: torch.Tensor) -> None:
        """F1 is not used: ``wk_weights_proj`` is part of the region."""

    def join(self, hidden_states: torch.Tensor, qkv_lora: torch.Tensor) -> None:
        """See `fork`; no product, so the indexer computes it."""

    def start(self, hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor) -> None:
        """Mark where the side stream may start, and what it reads.

        Args:
            hidden_states: [tokens, hidden], not changed.
            q_c: [tokens, q_lora_rank], not changed.
            positions: [tokens]; an argument so that a copy which the compiler makes of it is held too.
        """
        torch.ops.vllm.dsa_native_start(hidden_states, q_c, positions, _encode_layer_name(self.name))

    def index(self, indexer: Callable[..., Any], *args: Any) -> Any:
        """Call the indexer; the compiler finds a mark on all that it does."""
        with torch.fx.traceback.annotate({MARK: True}):
            return indexer(*args)

    # Called from ops and from generated code.

    def begin(self, hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor) -> None:
        """Body of the fork: decide for this forward pass, which all that follows in it goes by."""
        SIDE.region = self._held = self._deferred = None  # a pass that failed may have left something
        self._entered = False
        inline = self._inline(hidden_states.shape[0], (Mode.FULL,), pieces=False)
        inline = inline or gates.why_no_join(get_forward_context(), self._mla_name)
        counters.count(FEATURE, "native inline" if inline else "native forked", inline or "")
        if inline:
            return
        self._indexer_lane.fork()
        self._held = (hidden_states, q_c, positions)
        SIDE.region = self

    @contextmanager
    def side(self) -> Iterator[None]:
        """The side stream, behind the fork."""
        with torch.cuda.stream(self._indexer_lane.stream):
            self._indexer_lane.wait_for_fork()
            self._entered = True
            yield

    def run_indexer(
        self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mla_name: str
    ) -> Any:
        """Run the indexer's op now, or note the call for `join_indexer`; see `LayerOverlap.run_indexer`."""
        SIDE.region = None  # the region ends here
        self._deferred = None
        if self._held is None:
            return op(*args, **kwargs)
        if not self._entered:
            counters.count(FEATURE, "native region on the main stream", "")
            self._indexer_lane.fork()
        self._deferred = _Deferred(get_forward_context(), op, args, kwargs)
        return gates.topk_buffer(args, kwargs)

    def join_indexer(self) -> None:
        """Run the noted call on the side stream; the current stream waits for it."""
        super().join_indexer()
        self._held = None
