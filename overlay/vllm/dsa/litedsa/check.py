# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the LiteDSA kernels: types, shapes, strides, devices. Never looks at values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.dsa.litedsa import plan

if TYPE_CHECKING:
    import torch
    from vllm.dsa.litedsa.kernel import Rows, Unions


def unions(topk: torch.Tensor, starts: torch.Tensor, heads: int, span: int, rows: Rows, out: Unions) -> None:
    """Raise a ValueError that names what `kernel.build_unions` cannot take."""
    import torch

    i32 = torch.int32
    _tensor("topk", topk, i32, (topk.shape[0], topk.shape[-1]), topk.device)
    reason = plan.unsupported(heads, plan.QK_DIM, plan.V_DIM, topk.shape[1])
    if reason:
        raise ValueError(f"litedsa: {reason}")
    if span < 128 or span % 128 or span > plan.MAX_SPAN:
        raise ValueError(f"litedsa: a span of {span} is not a multiple of 128 up to {plan.MAX_SPAN}")
    _tensor("starts", starts, i32, (starts.shape[0],), topk.device)
    if starts.shape[0] < 1:
        raise ValueError("litedsa: starts is empty")
    if rows.requests is not None:
        _tensor("requests", rows.requests, i32, (rows.requests.shape[0],), topk.device)
        if rows.requests.shape[0] < topk.shape[0] or rows.table is None:
            raise ValueError("litedsa: requests needs an entry for each token, and a table")
    if rows.table is not None:
        _tensor("table", rows.table, i32, (rows.table.shape[0], rows.table.shape[-1]), topk.device)
        if rows.block_size < 1 or rows.block_rows < rows.block_size or 0 in rows.table.shape:
            raise ValueError(
                f"litedsa: table {tuple(rows.table.shape)} with blocks of {rows.block_size} positions in "
                f"{rows.block_rows} rows"
            )
    _buffers(out, starts.shape[0] - 1, heads, topk.shape[1], topk.device)


def attend(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv: torch.Tensor,
    starts: torch.Tensor,
    unions: Unions,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    ranges: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise a ValueError that names what `kernel.attend_unions` cannot take."""
    import torch

    bf16, device = torch.bfloat16, q_nope.device
    tokens, heads = q_nope.shape[0], q_nope.shape[1] if q_nope.dim() > 1 else 0
    if heads not in plan.HEADS:
        raise ValueError(f"litedsa: {plan.unsupported(heads, plan.QK_DIM, plan.V_DIM, 1)}")
    _tensor("q_nope", q_nope, bf16, (tokens, heads, 512), device, step=8)
    if q_rope is not None:
        _tensor("q_rope", q_rope, bf16, (tokens, heads, 64), device, step=8)
    if kv.element_size() == 1 and q_rope is not None:
        _tensor("kv", kv.view(torch.uint8), torch.uint8, (kv.shape[0], plan.FP8_ROW_BYTES), device, step=16)
    else:
        _tensor("kv", kv, bf16, (kv.shape[0], 512 if q_rope is None else 576), device, step=8)
    _tensor("starts", starts, torch.int32, (starts.shape[0],), device)
    _tensor("out", out, bf16, (tokens, heads, 512), device, step=2)
    if lse is not None:
        _tensor("lse", lse, torch.float32, (tokens, heads), device)
    if ranges is not None:
        _tensor("ranges", ranges, torch.int32, (tokens, 3), device)
        if not ranges.is_contiguous():
            raise ValueError("litedsa: ranges must be contiguous")
    if sinks is not None:
        _tensor("sinks", sinks, torch.float32, (heads,), device)
    groups, entries = starts.shape[0] - 1, unions.slots.shape[-1]
    _tensor("slots", unions.slots, torch.int32, (groups, entries), device)
    _tensor("counts", unions.counts, torch.int32, (groups,), device)
    if ranges is None:
        words = (groups, entries // plan.TILE_KEYS, plan.group_size(heads))
        _tensor("masks", unions.masks, torch.int64, words, device)
        if not unions.masks.is_contiguous():
            raise ValueError("litedsa: masks must be contiguous")
    if entries < plan.TILE_KEYS or entries % plan.TILE_KEYS or not unions.slots.is_contiguous():
        raise ValueError("litedsa: slots must be contiguous, its rows a multiple of 64")
    if not scale > 0:
        raise ValueError(f"litedsa: the scale must be positive, not {scale}")


def _buffers(out: Unions, groups: int, heads: int, k: int, device: torch.device) -> None:
    import torch

    sizes = plan.sizes(groups, heads, k)
    for name, tensor, dtype, shape in (
        ("slots", out.slots, torch.int32, sizes.slots),
        ("masks", out.masks, torch.int64, sizes.masks),
        ("counts", out.counts, torch.int32, sizes.counts),
    ):
        _tensor(name, tensor, dtype, shape, device)
        if not tensor.is_contiguous():
            raise ValueError(f"litedsa: {name} must be contiguous")


def _tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    step: int = 1,
) -> None:
    """Check type, shape, device; the last dimension is contiguous, the others are multiples of ``step``."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"litedsa: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
    if tensor.device != device:
        raise ValueError(f"litedsa: {name} is on {tensor.device}, expected {device}")
    strides = tensor.stride()
    if tensor.shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(f"litedsa: the last dimension of {name} has stride {strides[-1]}, not 1")
    align = step * tensor.element_size()
    if any(s % step for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1) or (
        step > 1 and tensor.data_ptr() % align
    ):
        raise ValueError(f"litedsa: {name} must start, and be strided by, multiples of {align} bytes")
