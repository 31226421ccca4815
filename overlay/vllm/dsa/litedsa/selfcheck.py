# SPDX-License-Identifier: Apache-2.0
"""Compares the LiteDSA kernels with the reference on small random cases, on the card at hand.

In stages, so that a failure says which part of the kernels is wrong: unions; masks and values, with scores
that are all 0; then everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.dsa.litedsa import fallback, kernel, plan, reference

if TYPE_CHECKING:
    import torch

#: Relative error of an output row: weights and outputs are rounded to bfloat16.
TOLERANCE = 5e-3
#: Relative error of the log-sum-exp.
TOLERANCE_LSE = 1e-5
BLOCK = 64


def case(
    heads: int, k: int, fp8: bool, seed: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int], kernel.Rows]:
    """Return ``q_nope, q_rope, kv, topk, starts`` on the device, the starts as a list, and where keys lie.

    Two requests with uneven last groups; rows of the second are short; -1 entries stand anywhere.
    """
    import torch

    g = torch.Generator().manual_seed(seed)
    size = plan.group_size(heads)
    lengths = (2 * size + 1, size + max(1, size // 2))
    starts = plan.group_starts([0, lengths[0], sum(lengths)], heads)
    tokens, span = starts[-1], plan.span_of(2 * k + 200)
    blocks = span // BLOCK
    table = torch.randperm(3 * blocks, generator=g)[: 2 * blocks].reshape(2, blocks).to(torch.int32)
    kv = torch.randn(3 * span, plan.QK_DIM, generator=g).to(torch.bfloat16)
    topk = torch.full((tokens, k), -1, dtype=torch.int32)
    requests = torch.zeros(tokens, dtype=torch.int32)
    requests[lengths[0] :] = 1
    for t in range(tokens):
        most = span if t < lengths[0] else 3 + 5 * (t - lengths[0])
        ids = torch.randperm(min(most, span), generator=g)[: min(k, most)]
        if t == 1:
            ids = ids[:0]
        topk[t, : ids.numel()] = ids.to(torch.int32)
        if t % 3 == 2:
            topk[t] = topk[t, torch.randperm(k, generator=g)]
    q = torch.randn(tokens, heads, plan.QK_DIM, generator=g).to(torch.bfloat16).to(device)
    cache = (reference.pack_fp8(kv) if fp8 else kv).to(device)
    rows = kernel.Rows(requests.to(device), table.to(device), BLOCK, BLOCK)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    return q[..., :512].contiguous(), q[..., 512:].contiguous(), cache, topk.to(device), start, starts, rows


def check(device: torch.device | str, heads: int, k: int, fp8: bool = False, seed: int = 0) -> str:
    """Return what is wrong with the kernels' results on ``device``, '' if nothing. Waits for the device."""
    import torch

    q_nope, q_rope, kv, topk, start, starts, rows = case(heads, k, fp8, seed, device)
    span = plan.span_of(2 * k + 200)
    name = f"{heads} heads, k {k}, {'fp8' if fp8 else 'bf16'}"
    unions = kernel.Unions.empty(len(starts) - 1, heads, k, device)
    kernel.build_unions(topk, start, heads, span, kv.shape[0], rows, unions)
    wrong = check_unions(unions, topk, starts, rows)
    if wrong:
        return f"unions ({name}): {wrong}"

    scale = plan.QK_DIM**-0.5
    arguments = (topk, rows.requests, rows.table, rows.block_size, rows.block_rows, span, kv.shape[0])
    selected = fallback.cache_rows(*arguments).cpu()
    exact_kv = (reference.unpack_fp8(kv) if fp8 else kv).cpu()
    for stage, factor in (("values, equal weights", 0.0), ("all", 4.0)):
        nope, rope = q_nope * factor, q_rope * factor
        out = torch.full((*nope.shape[:2], 512), torch.nan, dtype=torch.bfloat16, device=device)
        lse = torch.full(nope.shape[:2], torch.nan, device=device)
        kernel.attend_unions(nope, rope, kv, start, unions, scale, out, lse)
        q = torch.cat([nope, rope], 2).cpu()
        value, total = reference.attend(q, exact_kv, selected, scale)
        found, found_lse = out.cpu().double(), lse.cpu().double()
        empty = torch.isneginf(total)
        if not bool((torch.isneginf(found_lse) == empty).all()) or bool((found[empty] != 0).any()):
            return f"queries without keys ({stage}; {name})"
        error_lse = ((found_lse - total).abs() / total.abs().clamp(min=1))[~empty].max()
        if not float(error_lse) <= TOLERANCE_LSE:
            return f"log-sum-exp ({stage}; {name}): relative error {float(error_lse):.1e}"
        error = ((found - value).norm(dim=2) / value.norm(dim=2).clamp(min=1e-30))[~empty]
        if not float(error.max()) <= TOLERANCE:
            bad = int((~(error <= TOLERANCE)).sum())
            return f"output ({stage}; {name}): {bad} rows of {error.numel()} differ, {float(error.max()):.1e}"
    return ""


def check_unions(unions: kernel.Unions, topk: torch.Tensor, starts: list[int], rows: kernel.Rows) -> str:
    """Return the first difference between the kernel's unions and the reference's, '' if there is none."""
    import torch

    slots, counts = unions.slots.cpu(), unions.counts.cpu()
    bits = unions.masks.cpu()[..., None] >> torch.arange(64) & 1  # [groups, tiles, queries, 64]
    owners = bits.permute(0, 1, 3, 2).flatten(1, 2).bool()  # [groups, entries, queries]
    for g, union in enumerate(reference.unions(topk.cpu(), starts)):
        n = union.keys.numel()
        if int(counts[g]) != n:
            return f"group {g} has {int(counts[g])} entries, not {n}"
        place = union.keys
        if rows.table is not None:
            request = int(rows.requests[starts[g]]) if rows.requests is not None else 0
            blocks = rows.table[request].cpu().long()
            place = blocks[place // rows.block_size] * rows.block_rows + place % rows.block_size
        if not torch.equal(slots[g, :n].long(), place):
            return f"group {g}: other cache rows"
        padded = -(-n // 64) * 64
        if bool((slots[g, n:padded] != -1).any()):
            return f"group {g}: no -1 behind the last entry"
        queries = union.mask.shape[1]
        if not torch.equal(owners[g, :n, :queries], union.mask) or bool(owners[g, n:padded].any()):
            return f"group {g}: other masks"
        if bool(owners[g, :padded, queries:].any()):
            return f"group {g}: bits of absent queries"
    return ""
