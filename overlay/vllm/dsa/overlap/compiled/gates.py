# SPDX-License-Identifier: Apache-2.0
"""What the compiled line decides for each forward pass, beside the gates that both lines share."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.dsa import switches
from vllm.dsa.overlap import gates
from vllm.forward_context import ForwardContext

NO_JOIN = "attention does not run"

#: Position of ``topk_indices_buffer`` among the arguments of ``sparse_attn_indexer``.
_TOPK_BUFFER = 13


def why_inline(context: ForwardContext, tokens: int, *, pieces: bool) -> str | None:
    """Return why this forward pass does not fork, or None.

    Args:
        context: of this pass.
        tokens: of the batch, with the padding of a CUDA graph.
        pieces: whether fork and join lie in one piece of the graph and may be captured with it. Such graphs
            are captured without attention metadata, which otherwise tells a profile run.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    if not pieces or context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
        return gates.forward_reason(context, tokens)
    if isinstance(context.attn_metadata, list) or context.ubatch_slices is not None:
        return gates.MICROBATCHES
    if BreakableCUDAGraphCapture.is_active():
        return gates.BREAKABLE
    if tokens == 0:
        return gates.NO_TOKENS
    return gates.TOO_MANY_TOKENS if tokens > int(switches.get(gates.THRESHOLD)) else None


def why_no_join(context: ForwardContext, mla_name: str) -> str | None:
    """Return why the attention op of this forward pass would not reach F2's join, or None.

    Args:
        context: of this pass; its metadata is a dictionary, `why_inline` made sure of that.
        mla_name: the attention layer in whose op the join stands.
    """
    found = context.attn_metadata.get(mla_name)
    return None if found is not None and found.num_actual_tokens > 0 else NO_JOIN


def topk_buffer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the top-k buffer among the arguments of ``sparse_attn_indexer``; the op returns it too."""
    found: torch.Tensor = args[_TOPK_BUFFER] if len(args) > _TOPK_BUFFER else kwargs["topk_indices_buffer"]
    return found
