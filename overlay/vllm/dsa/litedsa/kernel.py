# SPDX-License-Identifier: Apache-2.0
"""Calls the LiteDSA kernels (csrc/dsa/litedsa.cu) on CUDA tensors; registers ``torch.ops.dsa.litedsa``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.dsa import kernels
from vllm.dsa.litedsa import check, plan

if TYPE_CHECKING:
    import torch

CAPABILITY = (9, 0)

_op: Any = None


def why_not(heads: int, qk_dim: int, v_dim: int, k: int, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot run for this layer on such a card, '' if they can."""
    reason = plan.unsupported(heads, qk_dim, v_dim, k)
    if not reason and tuple(capability) != CAPABILITY:
        reason = f"the kernel is for compute capability 9.0, this card has {capability[0]}.{capability[1]}"
    return reason or kernels.why_not(capability)


@dataclass(frozen=True)
class Rows:
    """Where the keys of a request lie in the cache.

    Attributes:
        requests: int32 ``[tokens]``, row of ``table`` of each token; None: row 0.
        table: int32 ``[requests, blocks]``; None: position i is cache row i.
        block_size: positions of a block.
        block_rows: cache rows from a block to the next (``flat_kv_row_view``'s second result).
    """

    requests: torch.Tensor | None = None
    table: torch.Tensor | None = None
    block_size: int = 1
    block_rows: int = 1


@dataclass(frozen=True)
class Unions:
    """What the first kernel leaves for the second; `plan.sizes` has the shapes."""

    slots: torch.Tensor
    masks: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, groups: int, heads: int, k: int, device: torch.device | str) -> Unions:
        """Return uninitialised buffers."""
        import torch

        sizes = plan.sizes(groups, heads, k)
        return cls(
            torch.empty(sizes.slots, dtype=torch.int32, device=device),
            torch.empty(sizes.masks, dtype=torch.int64, device=device),
            torch.empty(sizes.counts, dtype=torch.int32, device=device),
        )


def build_unions(
    topk: torch.Tensor, starts: torch.Tensor, heads: int, span: int, cache_rows: int, rows: Rows, out: Unions
) -> None:
    """Write the union of each group to ``out``; one launch, nothing waits for the device.

    Args:
        topk: int32 ``[tokens, k]``, positions in the token's request; negative ones and those out of range
            are no keys. Tokens may be strided.
        starts: int32 ``[groups + 1]``, `plan.group_starts` on the device; all of a group is one request.
        heads: query heads on this rank.
        span: positions from here on are no keys (`plan.span_of` of the longest request).
        cache_rows: rows of the cache, the bound of positions where there is no table.
        rows: where the keys lie.
        out: the result. ``counts`` is -1 for a group with a query that selects a position twice.

    Raises:
        ValueError: an argument is not as described.
        KernelError: the library is missing or did not launch.
    """
    check.unions(topk, starts, heads, span, rows, out)
    p, i32, i64 = kernels.POINTER, kernels.INT32, kernels.INT64
    library = _library()
    table = (p, i64, i32, i32, i32)
    sizes = (i64, i32, i32, i32, i32)
    function = library.function("dsa_litedsa_union", p, i64, p, p, *table, *sizes, p, p, p)
    blocks = rows.table.shape[1] if rows.table is not None else cache_rows
    library.launch(
        function,
        topk.device,
        topk.data_ptr(),
        topk.stride(0),
        starts.data_ptr(),
        _pointer(rows.requests),
        _pointer(rows.table),
        rows.table.stride(0) if rows.table is not None else 0,
        blocks,
        rows.block_size if rows.table is not None else 1,
        rows.block_rows,
        starts.shape[0] - 1,
        heads,
        topk.shape[1],
        span,
        out.slots.shape[1],
        out.slots.data_ptr(),
        out.masks.data_ptr(),
        out.counts.data_ptr(),
    )


def attend_unions(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv: torch.Tensor,
    starts: torch.Tensor,
    unions: Unions,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    ranges: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend every token of the groups; one launch, nothing waits for the device.

    Args:
        q_nope: bfloat16 ``[tokens, heads, 512]``; tokens and heads may be strided by multiples of 8 elements.
        q_rope: bfloat16 ``[tokens, heads, 64]``, or None: a key is its value, 512 elements.
        kv: the cache as rows: bfloat16 ``[rows, 576]`` (512 without ``q_rope``), or ``fp8_ds_mla``: uint8
            ``[rows, 656]``; rows may be strided.
        starts: as for `build_unions`.
        unions: its result.
        scale: factor of the scores, positive.
        out: bfloat16 ``[tokens, heads, 512]``; only tokens of the groups are written. 0 for a query without
            keys, NaN for a group that was refused.
        lse: float32 ``[tokens, heads]`` or None: natural log-sum-exp of the scaled scores, -inf without keys.
        ranges: int32 ``[tokens, 3]``: a token takes the entries ``[0, a)`` and ``[b, c)`` of its group's
            ``slots``; ``unions.masks`` is not read then.
        sinks: float32 ``[heads]``, an extra logit that takes part in the normalisation only.

    Raises:
        ValueError: an argument is not as described.
        KernelError: the library is missing or did not launch.
    """
    check.attend(q_nope, q_rope, kv, starts, unions, scale, out, lse, ranges, sinks)
    p, i32, i64, f32 = kernels.POINTER, kernels.INT32, kernels.INT64, kernels.FLOAT
    library = _library()
    query, cache, groups = (p, i64, i64, p, i64, i64), (p, i64, i32), (p, p, p, p, p, i64, i32, i32)
    function = library.function("dsa_litedsa_attend", *query, *cache, *groups, f32, p, p, i64, i64, p, i64)
    rope_strides = (q_rope.stride(0) * 2, q_rope.stride(1) * 2) if q_rope is not None else (0, 0)
    library.launch(
        function,
        q_nope.device,
        q_nope.data_ptr(),
        q_nope.stride(0) * 2,
        q_nope.stride(1) * 2,
        _pointer(q_rope),
        *rope_strides,
        kv.data_ptr(),
        kv.stride(0) * kv.element_size(),
        1 if kv.element_size() == 1 else 0,
        starts.data_ptr(),
        unions.slots.data_ptr(),
        unions.masks.data_ptr(),
        _pointer(ranges),
        unions.counts.data_ptr(),
        starts.shape[0] - 1,
        q_nope.shape[1],
        unions.slots.shape[1],
        scale,
        _pointer(sinks),
        out.data_ptr(),
        out.stride(0) * 2,
        out.stride(1) * 2,
        _pointer(lse),
        lse.stride(0) if lse is not None else 0,
    )


def litedsa(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: torch.Tensor,
    span: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    rows: Rows | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Attend each query to its own keys: unions and attention, groups by groups, so that buffers are small.

    Arguments as for `build_unions` and `attend_unions`; ``counts``, int32 ``[groups]``, gets the sizes of the
    unions (-1: refused), if wanted. Goes through ``torch.ops.dsa.litedsa``, on the CPU
    too (the reference, for tests).
    """
    op = _op or register()
    where = rows or Rows()
    op(
        q_nope,
        q_rope,
        kv,
        topk,
        starts,
        where.requests,
        where.table,
        where.block_size,
        where.block_rows,
        span,
        scale,
        out,
        lse,
        counts,
    )


def register() -> Any:
    """Register ``torch.ops.dsa.litedsa`` and return it; torch.compile must not trace this call."""
    global _op
    from vllm.dsa.litedsa import fallback

    _op = kernels.register_op(
        "litedsa(Tensor q_nope, Tensor q_rope, Tensor kv, Tensor topk, Tensor starts, Tensor? requests, "
        "Tensor? table, int block_size, int block_rows, int span, float scale, Tensor(a!) out, "
        "Tensor(b!)? lse, Tensor(c!)? counts) -> ()",
        cuda=_cuda,
        fake=lambda *arguments: None,
        cpu=fallback.litedsa,
    )
    return _op


def _cuda(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor | None,
    table: torch.Tensor | None,
    block_size: int,
    block_rows: int,
    span: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    heads, k, groups = q_nope.shape[1], topk.shape[1], starts.shape[0] - 1
    rows = Rows(requests, table, block_size, block_rows)
    step = plan.groups_at_once(heads, k)
    buffers = Unions.empty(min(step, max(groups, 1)), heads, k, q_nope.device)
    for first in range(0, groups, step):
        some = starts[first : min(first + step, groups) + 1]
        n = some.shape[0] - 1
        found = buffers.counts[:n] if counts is None else counts[first : first + n]
        unions = Unions(buffers.slots[:n], buffers.masks[:n], found)
        build_unions(topk, some, heads, span, kv.shape[0], rows, unions)
        attend_unions(q_nope, q_rope, kv, some, unions, scale, out, lse)


def _library() -> kernels.Library:
    library = kernels.load()
    if isinstance(library, str):
        raise kernels.KernelError(library)
    return library


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
