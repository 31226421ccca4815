# SPDX-License-Identifier: Apache-2.0
"""Called by the patches: plans fused chunks when a step's metadata is built, and runs them in the op.

`plan_chunks` decides for each request, from the configuration and host data alone, so alike on all ranks.
Neighbours that are worth one launch together become one chunk, and any other request that is worth it one of
its own. The logits budget does not cut these, because no logits are written; all others keep the chunks that
upstream planned. `run_chunks` runs the planned ones. Should one turn out not to fit the kernel after all, it
is cut as upstream would have cut it and takes upstream's path.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.dsa import counters, features, log
from vllm.dsa.litetopk import backend, controls, dispatch, eligible, grouping, plan, ready

if TYPE_CHECKING:
    import torch

NAME = "litetopk"
#: Attribute of a chunk's metadata that says that it was planned for the kernel: keys of its longest request.
MARK = "litetopk_planned"


def plan_chunks(
    builder: Any,
    specs: list[grouping.Spec],
    num_decodes: int,
    seq_lens_cpu: torch.Tensor,
    query_start_loc_cpu: torch.Tensor,
) -> grouping.Specs:
    """Return upstream's chunk specs with the requests that the kernel takes in uncut chunks of their own.

    Args:
        builder: upstream's DeepseekV32IndexerMetadataBuilder.
        specs: ``(requests, rows)`` slices from upstream's planner, requests counted over the whole step.
        num_decodes: requests before the first prefill.
        seq_lens_cpu: int32 ``[requests]``, keys of each request, in units of the indexer's cache.
        query_start_loc_cpu: int32 ``[requests + 1]``, first token of each request.
    """
    starts: list[int] = query_start_loc_cpu.tolist()
    keys: list[int] = seq_lens_cpu.tolist()
    requests = sorted({r for spec, _ in specs for r in range(spec.start, spec.stop)})
    reason = _why_not_at_all(builder)
    together: list[range] = []
    if not reason:
        asked = controls.read()
        k = eligible.indexer(builder.vllm_config).k
        sizes = _row_shard_sizes(builder, num_decodes, keys, starts)
        first = starts[num_decodes]

        def why_not(low: int, high: int, fewest_keys: int) -> str:
            return dispatch.why_not(dispatch.shares(low - first, high - first, sizes), fewest_keys, k, asked)

        reasons = {r: why_not(starts[r], starts[r + 1], keys[r]) for r in requests}
        if not asked.always:  # measured with one request per chunk
            chunks = (range(spec.start, spec.stop) for spec, _ in specs)
            shared = {r for chunk in chunks if len(chunk) > 1 for r in chunk}
            reasons |= {r: dispatch.SHARED for r in shared if not reasons[r]}
        most_keys = min(plan.MAX_KEYS, builder.max_prefill_buffer_size)
        together = grouping.groups(requests, keys, starts, most_keys, why_not)
        reasons |= {r: "" for group in together for r in group}
        if not all(reasons.values()):  # the check may cost a second: only before the first use
            reason = ready.why_not(eligible.indexer(builder.vllm_config), builder.device)
    if reason:
        reasons = dict.fromkeys(requests, reason)
        if requests:
            features.report_declined(NAME, reason)
    _count(reasons.values(), already=reason)
    grouped = {r: group for group in together for r in group}
    fused = {r: grouped.get(r, range(r, r + 1)) for r in requests if not reasons[r]}
    return grouping.split_off(specs, fused, starts, keys)


def mark_chunks(specs: list[grouping.Spec], chunks: Iterable[Any]) -> None:
    """Mark the metadata of the fused chunks, so that `run_chunks` knows them.

    Args:
        specs: what `plan_chunks` returned.
        chunks: upstream's metadata of the chunks.
    """
    fused = specs.fused if isinstance(specs, grouping.Specs) else {}
    for chunk in chunks:
        longest = fused.get((chunk.token_start, chunk.token_end))
        if longest is not None:
            setattr(chunk, MARK, longest)


def run_chunks(
    metadata: Any,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weights: torch.Tensor,
    k_workspace: torch.Tensor,
    scale_workspace: torch.Tensor,
    topk_indices: torch.Tensor,
    top_k: int,
    row_shard: Any = None,
    candidate_blocks: torch.Tensor | None = None,
) -> Any:
    """Run a step's fused chunks and return the prefill metadata with the chunks that are left to upstream.

    Args:
        metadata: upstream's DeepseekV32IndexerPrefillMetadata.
        kv_cache: the indexer's paged cache.
        q: float8_e4m3fn ``[tokens, heads, 128]``, of the whole step.
        q_scale: None unless the cache is MXFP4.
        weights: float32 ``[tokens, heads]``.
        k_workspace: float8_e4m3fn ``[rows, 128]``, scratch for gathered keys.
        scale_workspace: uint8 ``[rows, 4]``, the same for their scales.
        topk_indices: int32 ``[tokens, >= top_k]``, written at the rows of the chunks.
        top_k: how many.
        row_shard: upstream's PrefillRowShard, or None if this rank scores all rows.
        candidate_blocks: DeepSeek-V4.1's, which the kernel does not know.
    """
    if not any(hasattr(chunk, MARK) for chunk in metadata.chunks):
        return metadata
    reason = _why_not_these(q, q_scale, weights, k_workspace, top_k, candidate_blocks)
    if reason:
        features.report_declined(NAME, reason)
    left: list[Any] = []
    for chunk in metadata.chunks:
        if not hasattr(chunk, MARK):
            left.append(chunk)
        elif reason:
            left.extend(_cut(chunk))
        else:
            _run(
                chunk,
                kv_cache,
                q,
                weights,
                k_workspace,
                scale_workspace,
                topk_indices[:, :top_k],
                row_shard,
            )
    return dataclasses.replace(metadata, chunks=left)


def reserve(q: torch.Tensor, top_k: int, elsewhere: bool) -> None:
    """In a run without a batch: check the kernel and allocate what it can need, so that the profile has it.

    Args:
        q: the indexer's query, ``[tokens, heads, dim]``.
        top_k: of the indexer.
        elsewhere: whether the op's arguments alone say that its chunks take upstream's path.
    """
    import torch
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if elsewhere or q.dim() != 3 or (config is not None and eligible.why_not(config)):
        return
    shape = eligible.Indexer(q.shape[1], q.shape[2], top_k)
    if not ready.why_not(shape, q.device):
        size = backend.current.most_workspace(shape.heads, shape.k, q.device)
        torch.empty(size, dtype=torch.uint8, device=q.device)


def _why_not_at_all(builder: Any) -> str:
    """The reason that holds for all requests of this builder; it never changes, so it is found once."""
    found: str | None = getattr(builder, "_litetopk_reason", None)
    if found is None:
        found = eligible.why_not(builder.vllm_config)
        if not found and builder.compress_ratio != 1:
            found = f"a cache compressed by {builder.compress_ratio}"
        builder._litetopk_reason = found
    return found


def _row_shard_sizes(builder: Any, num_decodes: int, keys: list[int], starts: list[int]) -> list[int] | None:
    """Rows of each rank as upstream will shard this step (it does so after the chunks are planned)."""
    from vllm.v1.attention.backends.mla import indexer

    if not hasattr(indexer, "balanced_prefill_row_shard"):  # line 0.28.0: every rank scores all rows
        return None
    import torch

    if not indexer.tp_prefill_row_sharding_supported(
        builder.vllm_config, builder.dcp_world_size, builder.use_pcp, builder.tp_size
    ):
        return None
    sizes: list[int] | None = indexer.balanced_prefill_row_shard(
        torch.tensor(keys[num_decodes:], dtype=torch.int32),
        torch.diff(torch.tensor(starts[num_decodes : len(keys) + 1], dtype=torch.int32)),
        builder.compress_ratio,
        builder.tp_size,
        builder.vllm_config.attention_config.indexer_tp_shard_min_rows,
    )
    return sizes


def _count(reasons: Iterable[str], already: str) -> None:
    """Count a step's requests: ``fused`` or ``declined`` with the reason. ``already`` was counted once."""
    for reason, number in Counter(reasons).items():
        if not reason:
            features.report_active(NAME)
            counters.count(NAME, "fused", n=number)
            continue
        if reason == already:
            number -= 1
        else:
            log.info_once(f"{NAME}:{reason}", "vllm.dsa %s: upstream's path is used for %s", NAME, reason)
        if number:
            counters.count(NAME, features.State.DECLINED.value, reason, number)


def _why_not_these(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weights: torch.Tensor,
    k_workspace: torch.Tensor,
    top_k: int,
    candidate_blocks: torch.Tensor | None,
) -> str:
    """What the op's tensors say that the configuration did not; shapes and types, so alike on all ranks."""
    import torch

    if candidate_blocks is not None:
        return "candidate blocks"
    fp8 = torch.float8_e4m3fn
    if q_scale is not None or q.dtype != fp8 or k_workspace.dtype != fp8 or weights.dtype != torch.float32:
        return f"a query of {q.dtype}, keys of {k_workspace.dtype}, weights of {weights.dtype}"
    return ready.why_not(eligible.Indexer(q.shape[1], q.shape[2], top_k), q.device)


def _run(
    chunk: Any,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_workspace: torch.Tensor,
    scale_workspace: torch.Tensor,
    out: torch.Tensor,
    row_shard: Any,
) -> None:
    """Gather the keys of the chunk's requests and let the kernel score this rank's rows."""
    import torch
    import vllm._custom_ops as ops

    rows = (chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
    if row_shard is not None:
        rows = row_shard.narrow(chunk)
        if rows is None:
            return
    start, stop, ks, ke = rows
    k, scale = k_workspace[: chunk.total_seq_lens], scale_workspace[: chunk.total_seq_lens]
    ops.cp_gather_indexer_k_quant_cache(kv_cache, k, scale, chunk.block_table, chunk.local_cu_seq_lens)
    backend.current.run(
        q[start:stop],
        k,
        scale.view(torch.float32).squeeze(-1),
        weights[start:stop],
        ks,
        ke,
        out[start:stop],
        getattr(chunk, MARK),
    )


def _cut(chunk: Any) -> list[Any]:
    """Cut a chunk along its rows as upstream's planner does, by the logits budget."""
    import vllm.envs as envs

    budget = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 1024 * 1024 // 4
    rows, step = chunk.token_end - chunk.token_start, max(1, budget // chunk.total_seq_lens)
    parts = []
    for low in range(0, rows, step):
        high = min(rows, low + step)
        parts.append(
            dataclasses.replace(
                chunk,
                token_start=chunk.token_start + low,
                token_end=chunk.token_start + high,
                cu_seqlen_ks=chunk.cu_seqlen_ks[low:high],
                cu_seqlen_ke=chunk.cu_seqlen_ke[low:high],
                skip_kv_gather=low > 0,
            )
        )
    return parts
