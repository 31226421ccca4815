# SPDX-License-Identifier: Apache-2.0
"""Checksums of what the indexer reads and writes in a prefill, per row, to find where two prefills part.

`Recorder` stands around two functions of ``vllm`` that both lines call for each chunk of a prefill: the one
that computes the logits of the indexer and the one that selects the top-k. `difference` compares prefills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

#: What is recorded of a layer, in the order in which it comes to be.
STAGES = (
    "query bytes",  # what the query packing kernel writes: FP8 query,
    "weights",  # and head weights
    "keys",  # FP8 keys and scales of the indexer's cache
    "logits",
    "selected values",  # logits of the selected keys, as a multiset
    "selected keys",  # their ids, as a set
    "order of keys",  # the ids as the top-k wrote them
)
#: Stages in which a prefill must not part from another for any reason but different inputs.
DETERMINED = STAGES[:5]

_A, _B = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51


@triton.jit
def _row_sums_kernel(bits_ptr, stride, ends_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends_ptr + row)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        bits = tl.load(bits_ptr + row * stride + column, mask=column < end, other=0).to(tl.int64)
        total += bits * (column.to(tl.int64) * 0x2545F4914F6CDD1D + 0x1B873593CC9E2D51)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@triton.jit
def _count_kernel(values_ptr, stride, ends_ptr, least_ptr, more_ptr, same_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends_ptr + row)
    least = tl.load(least_ptr + row)
    more = tl.zeros((BLOCK,), tl.int32)
    same = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + row * stride + column, mask=column < end, other=float("-inf"))
        more += tl.where((column < end) & (value > least), 1, 0)
        same += tl.where((column < end) & (value == least), 1, 0)
    tl.store(more_ptr + row, tl.sum(more, axis=0))
    tl.store(same_ptr + row, tl.sum(same, axis=0))


def row_sums(x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """A checksum of each row's bytes, in which every 4-byte place has a factor of its own.

    Args:
        x: [rows, ...], rows of a multiple of 4 bytes, dense.
        ends: int32 [rows]: only so many 4-byte places of a row count; None for all.

    Returns:
        int64 [rows].
    """
    bits = x if x.element_size() == 4 and x.ndim == 2 else x.view(torch.uint8).reshape(x.shape[0], -1)
    bits = bits.view(torch.int32)
    if ends is None:
        ends = torch.full((bits.shape[0],), bits.shape[1], dtype=torch.int32, device=x.device)
    out = torch.empty(bits.shape[0], dtype=torch.int64, device=x.device)
    if bits.shape[0]:
        _row_sums_kernel[(bits.shape[0],)](bits, bits.stride(0), ends, out, BLOCK=1024)
    return out


def multiset_sums(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """A checksum of each row's valid 4-byte numbers that does not depend on their order; int64 [rows]."""
    mixed = x.view(torch.int32).to(torch.int64) * _A
    mixed ^= mixed >> 29
    mixed *= _B
    mixed ^= mixed >> 31
    return mixed.masked_fill_(~valid, 0).sum(dim=1)


def judge(logits: torch.Tensor, ends: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a selection is, per row.

    Args:
        logits: float32 [rows, columns]; of a row only columns below its end count.
        ends: int32 [rows].
        ids: int32 [rows, k], the selected columns in any order, -1 where a row has fewer than k.

    Returns:
        ``values`` and ``members`` (checksums), ``exact`` (a top-k: all that is larger than its least value
        is in it), ``open`` (more keys have its least value than are in it: other sets are as good).
    """
    valid = ids >= 0
    picked = logits.gather(1, ids.clamp_min(0).to(torch.int64))
    least = picked.masked_fill(~valid, float("inf")).amin(dim=1)
    more, same = torch.empty_like(ends), torch.empty_like(ends)
    _count_kernel[(ids.shape[0],)](logits, logits.stride(0), ends, least, more, same, BLOCK=1024)
    count = valid.sum(dim=1)
    at_least = ((picked == least[:, None]) & valid).sum(dim=1)
    return {
        "values": multiset_sums(picked, valid),
        "members": multiset_sums(ids.contiguous(), valid),
        "exact": (count == ends.clamp_max(ids.shape[1])) & (more + at_least == count),
        "open": more + same > count,
    }


def settle(logits: torch.Tensor, ends: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the selection of ``rows`` (numbers) by the top-k whose equal keys are those of lowest ids."""
    for part in rows.split(64):
        values = logits[part]
        columns = torch.arange(values.shape[1], device=values.device)
        bits = values.view(torch.int32).to(torch.int64)
        rank = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)) * 2**32 - columns
        rank.masked_fill_(columns >= ends[part][:, None], torch.iinfo(torch.int64).min)
        ids[part] = rank.topk(ids.shape[1], dim=1).indices.to(torch.int32)


class Recorder:
    """Records the prefills of one engine in this process, one request at a time.

    Args:
        settled: also decide between equally good keys by their ids (`settle`), so that equal logits give
            equal selections. The ids of every selection are put in order in any case: attention adds in it.
    """

    def __init__(self, settled: bool = False) -> None:
        from vllm import _custom_ops
        from vllm.model_executor.layers import sparse_attn_indexer as module

        self.settled = settled
        self.on = False
        self._layers: list[dict[str, list[torch.Tensor]]] = []
        self._batch: Any = None
        self._calls = 0
        self._undo = [
            (module, "fp8_fp4_mqa_logits", module.fp8_fp4_mqa_logits),
            (_custom_ops, "top_k_per_row_prefill", _custom_ops.top_k_per_row_prefill),
        ]
        module.fp8_fp4_mqa_logits = self._logits(module.fp8_fp4_mqa_logits)
        _custom_ops.top_k_per_row_prefill = self._select(_custom_ops.top_k_per_row_prefill)

    def close(self) -> None:
        for owner, name, value in self._undo:
            setattr(owner, name, value)

    def start(self) -> None:
        """Forget what was recorded and record from now on."""
        self._layers, self._batch, self._calls, self.on = [], None, 0, True

    def take(self) -> list[dict[str, torch.Tensor]]:
        """What was recorded since `start`: per layer, by stage (and "exact", "open"), one number per row."""
        self.on = False
        layers = [{k: torch.cat(v).cpu() for k, v in layer.items()} for layer in self._layers]
        self._layers, self._batch = [], None
        return layers

    def _place(self) -> dict[str, list[torch.Tensor]]:
        """The layer of this call: each forward calls chunk by chunk, layer after layer."""
        from vllm.forward_context import get_forward_context
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata

        batch = get_forward_context().attn_metadata
        if batch is not self._batch:
            self._batch, self._calls = batch, 0
        found = next(m for m in batch.values() if isinstance(m, DeepseekV32IndexerMetadata))
        number = self._calls // len(found.prefill.chunks)
        self._calls += 1
        while len(self._layers) <= number:
            self._layers.append({})
        return self._layers[number]

    def _logits(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(q: Any, kv: Any, weights: Any, starts: Any, ends: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                self._into = self._place()
                keys = row_sums(kv[0]) * 3 + row_sums(kv[1].reshape(-1, 1))
                keys = torch.where(torch.arange(len(keys), device=keys.device) < ends.max(), keys, 0)
                self._add("query bytes", row_sums(q[0]))
                self._add("weights", row_sums(weights.contiguous()))
                self._add("keys", keys.sum()[None])
            return real(q, kv, weights, starts, ends, *args, **kwargs)

        return recorded

    def _select(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(logits: Any, starts: Any, ends: Any, ids: Any, *args: Any) -> None:
            real(logits, starts, ends, ids, *args)
            if not self.on:
                return
            lengths = (ends - starts).to(torch.int32)  # compressed logits: a row begins at its first key
            self._add("logits", row_sums(logits, lengths))
            self._add("order of keys", row_sums(ids.contiguous()))
            found = judge(logits, lengths, ids)
            self._add("selected values", found["values"])
            self._add("exact", found["exact"])
            self._add("open", found["open"])
            if self.settled:
                settle(logits, lengths, ids, found["open"].nonzero()[:, 0])
                found["members"] = multiset_sums(ids.contiguous(), ids >= 0)
            self._add("selected keys", found["members"])
            ids.copy_(ids.sort(dim=1, descending=True).values)

        return recorded

    def _add(self, stage: str, value: torch.Tensor) -> None:
        self._into.setdefault(stage, []).append(value)


def difference(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Where two prefills of one prompt part.

    Returns:
        ``first``: "layer N: stage", or None if all stages but the order of keys are equal throughout; the
        order has no consequence here, as attention gets the ids sorted. ``rows``: rows that differ, by layer
        and stage, where any do. ``unforced``: rows of the first layer that differs whose selected keys differ
        though the logits are equal, and how many of them were open (`judge`) in both.
    """
    if [set(layer) for layer in a] != [set(layer) for layer in b]:
        raise ValueError("the two prefills do not have the same layers")
    rows: dict[str, int] = {}
    first, unforced = None, None
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        for stage in STAGES:
            if x[stage].shape != y[stage].shape:
                raise ValueError(f"layer {number}, {stage}: {x[stage].shape} and {y[stage].shape}")
            differ = int((x[stage] != y[stage]).sum())
            if differ:
                rows[f"layer {number}: {stage}"] = differ
                if first is None and stage != "order of keys":
                    first = f"layer {number}: {stage}"
        if first is not None and unforced is None:
            free = (x["selected keys"] != y["selected keys"]) & (x["logits"] == y["logits"])
            unforced = [int(free.sum()), int((free & x["open"] & y["open"]).sum())]
    return {"first": first, "rows": rows, "unforced": unforced}
