# SPDX-License-Identifier: Apache-2.0
"""Times prefill in the vLLM engine with LiteDSA off and on, with a top-k that is replaced, and compares.

    python bench/litedsa_e2e.py --line 0.33.0 --heads 16 --index-heads 64 --ratio 1.5 2 4 --out rows.json

A model with drawn weights selects keys that neighbours hardly share, which says nothing about a real one. So
the indexer runs as always, and then its result is replaced, in both settings, by a selection in which a group
of 64 / heads neighbours shares a pool of ``ratio`` * K keys of its past. **The figures are about that
selection, not about a model.** A pool is taken anew from all earlier positions for each group: the L2 cache
helps neither side. Queries with fewer earlier positions than K take them all.

One engine is started; the switch changes between requests. Prints one JSON row per metric and appends them to
``--out`` (results schema). The case names the override and the ratio; the union ratio that the kernel counted
is in the row.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import e2e_model
import e2e_prefill
import results_file

SWITCH = "VLLM_LITEDSA"
K = int(e2e_model.WIDTHS["index_topk"])


def pool(first: int, ratio: float, number: int) -> tuple[int, int, int, int]:
    """Return ``size, a, b, m``: the pool of a group is the positions ``(a + b i) % m`` for i below ``size``.

    Args:
        first: position of the group's first query, whose past all of the group has; at least K.
        ratio: wanted size over K; what the past holds is the limit.
        number: any number; groups with other numbers have other pools.
    """
    m = 1 << ((first + 1).bit_length() - 1)  # a power of two, so that an odd step visits every position once
    size = min(round(ratio * K), m)
    mixed = (number * 2654435761 + 12345) & 0xFFFFFFFF
    return size, mixed % m, (mixed >> 7) * 2 + 1, m


def selection(first: int, tokens: int, heads: int, ratio: float, device: str = "cuda") -> Any:
    """Return int32 ``[tokens, K]``: the selection of a chunk whose first query is at ``first``."""
    import torch

    group = 64 // heads
    starts = [first + i for i in range(0, tokens, group)]
    pools = [pool(max(s, K), ratio, s) for s in starts]
    columns = zip(*pools, strict=True)
    size, a, b, m = (torch.tensor(column, device=device)[:, None, None] for column in columns)
    member = torch.arange(group, device=device)[None, :, None]
    window = (size - K) * member // max(1, group - 1) + torch.arange(K, device=device)
    found = ((a + b % m * window) % m).reshape(-1, K)[:tokens].to(torch.int32)
    position = first + torch.arange(tokens, device=device, dtype=torch.int32)[:, None]
    all_of_past = torch.arange(K, device=device, dtype=torch.int32).expand(tokens, K)
    past = torch.where(all_of_past <= position, all_of_past, -1)
    short = torch.tensor([s < 2 * K for s in starts], device=device).repeat_interleave(group)[:tokens, None]
    return torch.where(short, past, found)


class Override:
    """Replaces the indexer's selection before a backend attends, in both settings alike."""

    def __init__(self, heads: int) -> None:
        self.heads, self.ratio, self.filled, self.end = heads, 1.0, 0, 0
        self._kept: dict[tuple[int, int], Any] = {}

    def set(self, ratio: float) -> None:
        self.ratio = ratio
        self._kept.clear()

    def fill(self, buffer: Any, metadata: Any) -> None:
        """Write the selection of a batch of one prefill; leave other batches alone."""
        if metadata is None or metadata.num_prefills != 1 or metadata.num_decode_tokens:
            return
        tokens = metadata.num_actual_tokens
        key = (metadata.max_seq_len - tokens, tokens)
        if key not in self._kept:
            self._kept[key] = selection(*key, self.heads, self.ratio)
            self.end = max(self.end, sum(key))
        buffer[:tokens].copy_(self._kept[key])
        self.filled += 1

    def install(self) -> None:
        """Stand before ``forward_mqa`` of upstream's backends and of LiteDSA's."""
        from vllm.dsa.litedsa import engine
        from vllm.v1.attention.backends.mla import flashattn_mla_sparse, flashmla_sparse

        def before(owner: Any, implementation: Any) -> None:
            attend = owner.forward_mqa

            def forward_mqa(this: Any, q: Any, kv_cache: Any, metadata: Any, layer: Any) -> Any:
                self.fill(implementation(this).topk_indices_buffer, metadata)
                return attend(this, q, kv_cache, metadata, layer)

            owner.forward_mqa = forward_mqa

        before(flashattn_mla_sparse.FlashAttnMLASparseImpl, lambda this: this)
        before(flashmla_sparse.FlashMLASparseImpl, lambda this: this)
        before(engine.Grouped, lambda this: this.impl)


def counted() -> dict[str, int]:
    """The counters of LiteDSA in this process, by outcome and reason."""
    from vllm.dsa import counters

    return {f"{r['outcome']} {r['reason']}".strip(): int(r["count"]) for r in counters.snapshot("litedsa")}


class Sizes:
    """Sums the sizes of the unions that the kernel makes; on only while nothing is timed."""

    def __init__(self) -> None:
        self.entries = self.groups = 0
        self.on = False

    def install(self) -> None:
        import torch
        from vllm.dsa.litedsa import kernel

        attend = kernel.litedsa

        def litedsa(*arguments: Any) -> None:
            given = list(arguments)
            if self.on and given[-1] is None:
                given[-1] = torch.empty(given[4].shape[0] - 1, dtype=torch.int32, device="cuda")
            attend(*given)
            if self.on:
                self.entries += int(given[-1].clamp(min=0).sum())
                self.groups += given[-1].numel()

        kernel.litedsa = litedsa


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--heads", type=int, default=16, choices=(8, 16, 32))
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--ratio", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--runs", type=int, default=5, help="timed prefills of each setting")
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a step (max_num_batched_tokens)")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one prefill each")
    parser.add_argument("--hf-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--llm", type=json.loads, default={}, metavar="JSON", help="arguments for vllm.LLM")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.llm = {"max_num_batched_tokens": args.chunk} | args.llm
    args.sets = {"A": {SWITCH: "0"}, "B": {SWITCH: "1"}}
    e2e_prefill.apply(args.sets["A"])
    engine = e2e_prefill.Engine(args)
    override, sizes = Override(args.heads), Sizes()
    override.install()
    sizes.install()
    failed = False
    for ratio in args.ratio:
        override.set(ratio)
        before, sizes.entries, sizes.groups = counted(), 0, 0
        e2e_prefill.apply(args.sets["B"])
        sizes.on = True
        engine.prefill_seconds(args.tokens, 0)
        sizes.on = False
        union = sizes.entries / max(1, sizes.groups) / K
        result = e2e_prefill.measure_in_process(args, engine)
        after = counted()
        did = {name: after[name] - before.get(name, 0) for name in after}
        args.case_suffix = f" topk=override u={ratio:g}"
        found = e2e_prefill.rows(args, result)
        for row in found:
            row |= {"union_ratio": union, "chunk": args.chunk, "counters": did}
            print(json.dumps(row), flush=True)
        for name in "AB":
            for key, count, ms in result[name].get("kernels", [])[:14]:
                print(f"  {name} {ms:9.2f} ms x{count:5d} {key[:90]}", flush=True)
        if args.out:
            results_file.add(args.out, "litedsa", args.line, found, replace=False)
        if override.end != args.tokens:
            print(f"error: selections were made for up to {override.end} positions", file=sys.stderr)
            failed = True
        if not override.filled or not did.get("grouped"):
            print(f"error: nothing was replaced or grouped: {did}", file=sys.stderr)
            failed = True
        if len({json.dumps(answer["logprobs"]) for answer in result["A"]["answers"]}) < 2:
            print("error: the answers do not depend on the prompt", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
