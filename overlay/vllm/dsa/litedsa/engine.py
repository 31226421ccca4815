# SPDX-License-Identifier: Apache-2.0
"""Puts LiteDSA in front of upstream's sparse MLA backends: prefills by groups, everything else upstream.

The hook of each line calls `grouped` with the backend's implementation where upstream would call its
``forward_mqa``. Whether a layer or a batch can be grouped is decided from host data that all ranks share,
before anything is launched; what cannot is left to upstream's own method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.dsa import counters, features, kernels, log
from vllm.dsa.litedsa import kernel, overlap, plan, selfcheck

if TYPE_CHECKING:
    import torch

NAME = "litedsa"
#: The implementations whose ``forward_mqa`` LiteDSA stands in for: the ones Hopper runs, by class name.
BACKENDS = ("FlashAttnMLASparseImpl", "FlashMLASparseImpl")
CACHES = ("auto", "bfloat16", "fp8_ds_mla")

_ATTRIBUTE = "_litedsa_grouped"
_BATCH_LINE = "vllm.dsa %s: some batches take upstream's path (%s)"
_checked: dict[tuple[str, int, bool], str] = {}


@dataclass(frozen=True)
class Batch:
    """The prefill part of a batch.

    Attributes:
        first: tokens before it, which are decodes.
        tokens: all tokens.
        starts: int32 ``[groups + 1]`` on the device.
        span: see `plan.span_of`.
    """

    first: int
    tokens: int
    starts: torch.Tensor
    span: int


def grouped(impl: Any) -> Any:
    """Return what has the ``forward_mqa`` to call: ``impl`` itself, or `Grouped` around it. Never raises.

    A layer's first call outside of a graph's capture decides; it runs the self-check once per process.
    """
    found = getattr(impl, _ATTRIBUTE, None)
    if found is not None:
        return found
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return impl  # the self-check waits for the device; the next call outside of a capture decides
    reason = why_not(impl)
    if reason:
        features.report_declined(NAME, reason)
    found = impl if reason else Grouped(impl)
    setattr(impl, _ATTRIBUTE, found)
    return found


def why_not(impl: Any) -> str:
    """Return why a layer is left to upstream, '' if its prefills can be grouped."""
    try:
        name = type(impl).__name__
        if name not in BACKENDS:
            return f"attention backend {name}"
        if impl.dcp_world_size > 1 or getattr(impl, "pcp_world_size", 1) > 1:
            return "context parallelism"
        if type(getattr(impl, "index_group", None)).__name__ == "HiSparseMLAIndexGroup":
            return "HiSparse keeps the cache on the host"
        if impl.kv_cache_dtype not in CACHES:
            return f"a cache of {impl.kv_cache_dtype}"
        dim = impl.kv_lora_rank + impl.qk_rope_head_dim
        k = impl.topk_indices_buffer.shape[1]
        reason = kernel.why_not(impl.num_heads, dim, impl.kv_lora_rank, k, capability())
        return reason or self_check(impl.num_heads, impl.kv_cache_dtype == "fp8_ds_mla")
    except Exception as error:  # an upstream that moved something must not stop the engine
        return f"cannot judge this layer: {type(error).__name__}: {error}"


def capability() -> tuple[int, int]:
    """Return the compute capability of the current device, (0, 0) without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def self_check(heads: int, fp8: bool) -> str:
    """Return what the self-check says on the current device, '' for nothing; once per process and kind."""
    import torch

    key = (f"cuda:{torch.cuda.current_device()}", heads, fp8)
    if key not in _checked:
        found = selfcheck.check(key[0], heads, 300, fp8)
        _checked[key] = f"the self-check failed: {found}" if found else ""
    return _checked[key]


class Grouped:
    """Stands in for an implementation of upstream's: only ``forward_mqa`` is used."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl
        self.broken = ""
        self.reported = False
        self.meter = overlap.Meter(impl.num_heads, impl.topk_indices_buffer.shape[1])

    def forward_mqa(self, q: Any, kv_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> tuple[Any, Any]:
        """Attend as upstream's method of the same name does: decodes by it, prefills by groups.

        Args:
            q: ``(ql_nope [tokens, heads, 512], q_pe [tokens, heads, 64])``; anything else is for upstream.
            kv_cache: ``[blocks, block_size, row]``.
            attn_metadata: of upstream's sparse MLA backends.
            layer: passed on.

        Returns:
            ``[tokens, heads, 512]`` and None: a log-sum-exp is only asked for with context parallelism.
        """
        reason = self.broken or unfit(q, kv_cache)
        if reason:
            features.report_declined(NAME, reason)
        tokens = 0 if reason else q[0].shape[0]
        batch = None
        if tokens > attn_metadata.num_decode_tokens:
            batch = plan_batch(attn_metadata, self.impl.num_heads, kv_cache.device)
        if batch is None or batch.tokens != tokens:
            return self._upstream(q, kv_cache, attn_metadata, layer)
        reason = self.meter.too_large()
        if reason:
            counters.count(NAME, "layer_upstream", reason)
            log.warning_once(f"{NAME}:{reason}", _BATCH_LINE, NAME, reason)
            return self._upstream(q, kv_cache, attn_metadata, layer)
        nope, rope = q
        first = batch.first
        out = nope.new_empty((tokens, nope.shape[1], plan.V_DIM))
        rows = kernel.Rows(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            attn_metadata.block_size,
            kv_cache.stride(0) // kv_cache.shape[2],
        )
        counts = self.meter.buffer(batch.starts.shape[0] - 1, kv_cache.device)
        try:
            kernel.litedsa(
                nope,
                rope,
                cache_rows(kv_cache, attn_metadata.block_size),
                self.impl.topk_indices_buffer[:tokens],
                batch.starts,
                batch.span,
                self.impl.scale,
                out,
                None,
                rows,
                counts,
            )
        except (kernels.KernelError, ValueError) as error:  # refused before anything ran
            self.broken = str(error)
            features.report_declined(NAME, self.broken)
            return self._upstream(q, kv_cache, attn_metadata, layer)
        self.meter.take(counts)
        if not self.reported:  # once: the counters have the batches
            self.reported = True
            features.report_active(NAME, "prefills by groups")
        if first:
            decodes, _ = self._upstream((nope[:first], rope[:first]), kv_cache, attn_metadata, layer)
            out[:first] = decodes
        return out, None

    def _upstream(self, q: Any, kv_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self.impl.forward_mqa(q, kv_cache, attn_metadata, layer)
        return found


def unfit(q: Any, kv_cache: torch.Tensor) -> str:
    """Return why these tensors are left to upstream, '' if the kernels take them."""
    import torch

    if not isinstance(q, tuple) or any(part.dtype != torch.bfloat16 for part in q):
        return "the query is not a pair of bfloat16 tensors"
    row = plan.QK_DIM if kv_cache.dtype == torch.bfloat16 else plan.FP8_ROW_BYTES
    if kv_cache.dim() != 3 or kv_cache.shape[2] != row or kv_cache.element_size() > 2:
        return f"a cache of {kv_cache.dtype} {tuple(kv_cache.shape[1:])}"
    if kv_cache.stride(0) % row or kv_cache.stride(1) != row or kv_cache.stride(2) != 1:
        return f"a cache with strides {kv_cache.stride()}"
    return ""


def cache_rows(kv_cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the paged cache ``[blocks, block_size, row]`` as rows (others may lie between blocks)."""
    blocks, _, row = kv_cache.shape
    count = (blocks - 1) * (kv_cache.stride(0) // row) + block_size
    return kv_cache.as_strided((count, row), (row, 1))


def plan_batch(metadata: Any, heads: int, device: torch.device) -> Batch | None:
    """Return how the batch's prefills are grouped, None if upstream runs it; decided once per batch.

    Looks at host data only, so that nothing waits for the device and all ranks decide alike.
    """
    kept: dict[int, Batch | None] = metadata.__dict__.setdefault(_ATTRIBUTE, {})
    if heads not in kept:
        found, reason = _plan(metadata, heads, device)
        kept[heads] = found
        if found is not None:
            counters.count(NAME, "grouped")
        elif reason:
            counters.count(NAME, "upstream", reason)
            log.warning_once(f"{NAME}:{reason}", _BATCH_LINE, NAME, reason)
    return kept[heads]


def _plan(metadata: Any, heads: int, device: torch.device) -> tuple[Batch | None, str]:
    import torch

    if not metadata.num_prefills:
        return None, ""  # decodes are upstream's by design
    lengths = getattr(metadata.prefill, "query_lens_cpu", None)
    if lengths is None:
        return None, "the lengths of the prefills are not known on the host"
    if metadata.max_seq_len > plan.MAX_SPAN:
        return None, f"more than {plan.MAX_SPAN} positions"
    first, tokens = metadata.num_decode_tokens, metadata.num_actual_tokens
    bounds = [first]
    for length in lengths.tolist():
        bounds.append(bounds[-1] + length)
    if bounds[-1] != tokens:
        return None, "tokens that belong to no request"
    starts = torch.tensor(plan.group_starts(bounds, heads, plan.WAVE), dtype=torch.int32)
    if device.type == "cuda":
        starts = starts.pin_memory().to(device, non_blocking=True)
    return Batch(first, tokens, starts, plan.span_of(metadata.max_seq_len)), ""
