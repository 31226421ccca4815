# SPDX-License-Identifier: Apache-2.0
"""The buffer itself: decided and planned in the profile run, then written by each prefill chunk of a layer.

Upstream allocates new logits for each chunk. Chunks of a long prefill grow, so each one needs a larger block
than any before, and the allocator's memory grows with them. Here all of them write to one buffer.

The buffer is a part of upstream's shared workspace (``vllm/v1/worker/workspace.py``), requested together with
the buffers of the gathered K. So it has their life and their rules: one per worker and micro-batch, sized in
the profile run (where it takes the place of the dummy that upstream allocates for the logits), locked after
it, and written and read by one layer after the other in stream order. Whatever orders two uses of the
gathered K orders those of the logits. A chunk's top-k is queued before the next chunk's scoring, on the same
stream.
"""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

import torch
from vllm.dsa import counters, features, switches
from vllm.dsa.features import State
from vllm.dsa.logits_slab import extension, feature
from vllm.dsa.logits_slab.layout import BYTES, START_ALIGNMENT, Layout
from vllm.dsa.logits_slab.selfcheck import failure
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.v1.worker.workspace import current_workspace_manager

NAME = "logits_slab"

#: Which layout this line's DeepGEMM writes (see `vllm.dsa.logits_slab.layout`), told by its signature.
COMPRESSED = "max_seqlen_k" in inspect.signature(deep_gemm.fp8_fp4_mqa_logits).parameters

#: A request to the workspace manager: shape and dtype.
Spec = tuple[tuple[int, ...], torch.dtype]

#: The answer of `workspace_specs` by device, heads, queries and keys. Made once: planning and use must agree.
_decided: dict[tuple[torch.device, int, int, int], tuple[Spec, ...]] = {}


def workspace_specs(
    q: torch.Tensor, q_scale: torch.Tensor | None, topk_indices: torch.Tensor, keys: int
) -> tuple[Spec, ...]:
    """Return what to request from the workspace beside the gathered K: the buffer, or nothing.

    Called in the profile run and in each step of each layer, with host data alone; the first call decides. It
    decides for upstream's path when the workspace is locked already, because no memory was planned then.

    Args:
        q: the indexer's query ``[tokens, heads, dim]``.
        q_scale: its scales on the FP4 path, else None.
        topk_indices: the buffer of results ``[most tokens of a batch, K]``.
        keys: most keys of a chunk.
    """
    key = (q.device, q.shape[1], topk_indices.shape[0], keys)
    specs = _decided.get(key)
    if specs is None:
        specs = _decided[key] = _decide(q, q_scale, topk_indices.shape[0], keys)
    return specs


def _decide(q: torch.Tensor, q_scale: torch.Tensor | None, queries: int, keys: int) -> tuple[Spec, ...]:
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    found = None if capability is None else (capability.major, capability.minor)
    if feature.card_status(found, switches.get(feature.SWITCH)).state is not State.ACTIVE:
        return ()  # the line at start-up says so
    # Its files first: without the patch DeepGEMM is imported when upstream would import it, not earlier.
    if not extension.patched() or not deep_gemm.has_mqa_logits_out():
        return ()  # likewise
    if q_scale is not None:
        features.report_declined(NAME, "the indexer's cache is FP4")
        return ()
    if current_workspace_manager().is_locked() or _capturing(q):
        features.report_declined(NAME, "its memory was not planned in the profile run")
        return ()
    layout = Layout(q.shape[1], COMPRESSED)
    wrong = failure(layout, q.shape[2], q.device)
    if wrong is not None:
        features.report_declined(NAME, wrong)
        return ()
    budget = switches.get("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB") * 1024 * 1024
    size = layout.most_bytes(budget, queries, keys) + START_ALIGNMENT
    features.report_active(NAME, f"{size / 2**20:.0f} MiB")
    return (((size,), torch.uint8),)


def _capturing(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class Logits:
    """Stands in for ``fp8_fp4_mqa_logits`` and writes to the buffer.

    Args:
        buffer: uint8 ``[bytes]``, what the workspace returned for `workspace_specs`.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        start = -buffer.data_ptr() % START_ALIGNMENT
        self._buffer = buffer[start:]

    def __call__(
        self,
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the logits ``[queries, width]`` float32 with upstream's row stride, valid until the next
        call.

        Arguments are those of the line's ``fp8_fp4_mqa_logits``. A chunk that does not fit, and one under
        CUDA graph capture (whose replay would find the buffer in use), gets a tensor of its own.
        """
        width = int(args[0]) if COMPRESSED else kv[0].shape[0]
        shape = Layout(q[0].shape[1], COMPRESSED).shape(q[0].shape[0], width)
        size = prod(shape) * BYTES
        reason = ""
        if size > self._buffer.numel():
            reason = "a chunk is larger than planned"
        elif _capturing(q[0]):
            reason = "under CUDA graph capture"
        if reason:
            counters.count(NAME, State.DECLINED.value, reason)
            own = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, *args, **kwargs)
            assert isinstance(own, torch.Tensor)
            return own
        out = self._buffer[:size].view(torch.float32).view(shape)
        deep_gemm.fp8_fp4_mqa_logits_out(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, *args, out=out, **kwargs)
        return out[: q[0].shape[0], :width]
