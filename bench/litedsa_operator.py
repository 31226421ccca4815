# SPDX-License-Identifier: Apache-2.0
"""Times LiteDSA against upstream's two sparse MLA kernels on Hopper, paired in one process on one GPU.

    litedsa_operator.py --line 0.33.0 [--set table|quick|ceiling] [--dist iid|drift|core] [--kv bf16|fp8]

Needs an installed vLLM of that line with the series' kernels. One call is what a layer runs at prefill. For
upstream: the conversion of positions to cache rows and the attention kernel (FLASH_ATTN_MLA_SPARSE:
FlashAttention 3 with one-row pages; FLASHMLA_SPARSE: flash_mla_sparse_fwd, or for an fp8_ds_mla cache the FP8
decode kernel, as vLLM does for fewer than 32 heads). For LiteDSA: unions and attention.

Selections are synthetic: a group of 64 / heads neighbours shares a pool of u * K keys, so that u is the size
of its union over K. `iid` draws each group's pool anew from all keys, so that groups share nothing and the L2
cache helps little; `drift` moves it by 64 keys per group; with `core` all queries share some keys, as many as
give that u, and draw the others anew: groups share the core.

Each figure is the median of `--runs` calls; all variants take turns. The card is kept busy while a call is
launched, so that a time is the card's alone. Before they are timed, each result is
compared with LiteDSA's (outputs differ by at most 1e-2). Besides times there are rows for the
rates of gathered bytes and of FLOPs, counted from the unions that the kernel made; their `baseline` is the
card's own measured rate (copy, BF16 product).

`--set ceiling` times no LiteDSA: flash_mla_sparse_fwd with 64 and 128 query heads, which fill its tile by
themselves, shows what FLOP rate a well-known kernel of such a tile and gather reaches on this card.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.dsa.litedsa import kernel, plan, reference, selfcheck

sys.path.insert(0, str(Path(__file__).resolve().parent))

import results_file
import run_info

ROOT = Path(__file__).resolve().parents[1]
K = 2048
KEYS = 1 << 17
BLOCK = 64
SCALE = 192**-0.5

Calls = dict[str, Callable[[], torch.Tensor]]


def selection(tokens: int, group: int, ratio: float, dist: str, seed: int) -> torch.Tensor:
    """Return int32 ``[tokens, K]`` on the GPU whose groups of ``group`` have unions of ``ratio * K`` keys."""
    g = torch.Generator("cuda").manual_seed(seed)
    groups, size = -(-tokens // group), round(ratio * K)
    if dist == "core":  # c + group * (K - c) = size
        core = (group * K - size) // (group - 1)
        order = torch.randperm(KEYS, device="cuda", generator=g).to(torch.int32)
        a = torch.randint(0, KEYS // 2, (groups, 1), device="cuda", generator=g)
        b = torch.randint(0, KEYS // 4, (groups, 1), device="cuda", generator=g) * 2 + 1
        drawn = (a + b * torch.arange(group * (K - core), device="cuda")) % (KEYS // 2) + core
        own = order[drawn].reshape(groups * group, K - core)[:tokens]
        return torch.cat([order[:core].expand(tokens, core), own], 1).contiguous()
    if dist == "drift":
        order = torch.randperm(KEYS, device="cuda", generator=g)
        at = torch.arange(groups, device="cuda")[:, None] * 64 + torch.arange(size, device="cuda")
        pool = order[at % KEYS]
    else:  # a + b i with an odd b: distinct modulo a power of two
        a = torch.randint(0, KEYS, (groups, 1), device="cuda", generator=g)
        b = torch.randint(0, KEYS // 2, (groups, 1), device="cuda", generator=g) * 2 + 1
        pool = (a + b * torch.arange(size, device="cuda")) % KEYS
    step = (size - K) / max(1, group - 1)
    first = torch.tensor([round(i * step) for i in range(group)], device="cuda")
    window = (first[:, None] + torch.arange(K, device="cuda")).flatten()
    return pool[:, window].reshape(groups * group, K)[:tokens].to(torch.int32).contiguous()


class Case:
    """Tensors of one shape and the variants that can run on it."""

    def __init__(self, heads: int, tokens: int, ratio: float, dist: str, fp8: bool) -> None:
        g = torch.Generator("cuda").manual_seed(heads)
        self.heads, self.tokens, self.fp8 = heads, tokens, fp8
        self.q = torch.randn(tokens, heads, 576, device="cuda", generator=g, dtype=torch.bfloat16)
        kv = torch.randn(KEYS, 576, device="cuda", generator=g, dtype=torch.bfloat16)
        self.kv = reference.pack_fp8(kv) if fp8 else kv
        blocks = torch.randperm(KEYS // BLOCK, device="cuda", generator=g).to(torch.int32)
        self.table, self.requests = blocks[None], torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.topk = selection(tokens, plan.group_size(heads), ratio, dist, 1)
        starts = plan.group_starts([0, tokens], heads, plan.WAVE)
        self.groups = len(starts) - 1
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.rows = kernel.Rows(self.requests, self.table, BLOCK, BLOCK)

    def ours(self, counts: torch.Tensor | None = None) -> torch.Tensor:
        nope, rope = self.q[..., :512], self.q[..., 512:]
        where = (KEYS, SCALE, self.out, None, self.rows, counts)
        kernel.litedsa(nope, rope, self.kv, self.topk, self.starts, *where)
        return self.out

    def entries(self) -> int:
        """Rows that are gathered: the unions, each rounded up to a tile."""
        counts = torch.empty(self.groups, dtype=torch.int32, device="cuda")
        self.ours(counts)
        return int((-(-counts // plan.TILE_KEYS)).sum()) * plan.TILE_KEYS

    def unions(self) -> torch.Tensor:
        """The first kernel alone, in buffers of its own for all groups that go at once."""
        n = min(self.groups, plan.groups_at_once(self.heads, K))
        buffers = kernel.Unions.empty(n, self.heads, K, "cuda")
        for first in range(0, self.groups, n):
            some = self.starts[first : first + n + 1]
            m = some.shape[0] - 1
            part = kernel.Unions(buffers.slots[:m], buffers.masks[:m], buffers.counts[:m])
            kernel.build_unions(self.topk, some, self.heads, KEYS, KEYS, self.rows, part)
        return buffers.counts

    def converted(self, counts: bool) -> Any:
        from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

        return triton_convert_req_index_to_global_index(
            self.requests,
            self.table,
            self.topk,
            BLOCK_SIZE=BLOCK,
            NUM_TOPK_TOKENS=K,
            return_valid_counts=counts,
        )

    def flash_attn(self) -> torch.Tensor:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        rows, counts = self.converted(True)
        out: torch.Tensor = flash_attn_varlen_func(
            q=self.q[..., 512:],
            k=self.kv[:, None, None, 512:],
            v=self.kv[:, None, None, :512],
            q_v=self.q[..., :512],
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(self.tokens + 1, dtype=torch.int32, device="cuda"),
            max_seqlen_k=K,
            seqused_k=counts,
            block_table=rows,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )
        return out

    def padded(self) -> torch.Tensor:
        """As upstream does before each call, padding included."""
        q = self.q.new_empty(self.tokens, 64, 576)
        q[:, : self.heads] = self.q
        return q

    def flash_mla(self) -> torch.Tensor:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        rows, counts = self.converted(True)
        found = flash_mla_sparse_fwd(
            self.padded(), self.kv[:, None], rows[:, None], SCALE, topk_length=counts
        )
        out: torch.Tensor = found[0][:, : self.heads]
        return out

    def flash_mla_fp8(self) -> torch.Tensor:
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

        rows = self.converted(False)
        out, _ = flash_mla_with_kvcache(
            q=self.padded()[None],
            k_cache=self.kv.view(-1, BLOCK, 1, plan.FP8_ROW_BYTES),
            block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
            head_dim_v=512,
            cache_seqlens=torch.full((1,), KEYS, dtype=torch.int32, device="cuda"),
            tile_scheduler_metadata=get_mla_metadata()[0],
            is_fp8_kvcache=True,
            indices=rows[None],
            softmax_scale=SCALE,
        )
        found: torch.Tensor = out[0, :, : self.heads]
        return found

    def bases(self) -> Calls:
        if self.fp8:
            return {"FLASHMLA_SPARSE": self.flash_mla_fp8}
        return {"FLASH_ATTN_MLA_SPARSE": self.flash_attn, "FLASHMLA_SPARSE": self.flash_mla}


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call on the card, without the time that its launch takes on the host."""
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host launches
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def medians(calls: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Time the calls in turn after one warm-up of each."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: sorted(found)[runs // 2] for name, found in times.items()}


def ceilings() -> tuple[float, float]:
    """This card's copy rate in TB/s (read plus written) and BF16 matrix rate in TFLOP/s."""
    a = torch.randn(1 << 29, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    m = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    found = medians({"copy": lambda: b.copy_(a), "mm": lambda: m @ m}, 9)
    return 2 * a.numel() * 2 / found["copy"] / 1e9, 2 * 8192**3 / found["mm"] / 1e9


def measure(heads: int, tokens: int, ratio: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time one shape; return its rows."""
    case = Case(heads, tokens, ratio, args.dist, args.kv == "fp8")
    mine = case.ours().clone()
    bases: Calls = {}
    for name, call in case.bases().items():
        try:
            theirs = call()
        except Exception as error:  # this install lacks it; the rows then say so by being absent
            print(f"{name} cannot run: {type(error).__name__}: {error}", flush=True)
            continue
        differ = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        assert differ <= 1e-2, f"heads={heads} T={tokens} u={ratio} {name}: outputs differ by {differ:.1e}"
        bases[name] = call
    found = medians({"ours": case.ours, "unions": case.unions, **bases}, args.runs)
    shape = f"heads={heads} T={tokens} u={ratio}"
    extra = "" if args.dist == "iid" else f" dist={args.dist}"
    extra += "" if args.kv == "bf16" else f" kv={args.kv}"
    common = {"runs": args.runs, **args.about}

    def row(base: str, metric: str, unit: str, baseline: float, ours: float, ratio: float) -> dict[str, Any]:
        values = {"unit": unit, "baseline": baseline, "ours": ours, "ratio": ratio}
        return {"case": f"{shape} base={base}{extra}", "metric": metric, **values, **common}

    ours, unions = found["ours"], found["unions"]
    rows = [row(name, "time", "ms", found[name], ours, found[name] / ours) for name in bases]
    entries = case.entries()
    row_bytes = plan.FP8_ROW_BYTES if case.fp8 else 1152
    moved = entries * row_bytes + tokens * heads * (576 + 512) * 2 + tokens * K * 4
    work = entries * 64 * (576 + 512) * 2
    for metric, unit, ceiling, amount in (
        ("byte_rate", "TB/s", args.ceilings[0], moved),
        ("flop_rate", "TFLOP/s", args.ceilings[1], work),
    ):
        rate = amount / ours / 1e9
        rows.append(row("card", metric, unit, ceiling, rate, rate / ceiling))
    rows.append(row("unions", "share_of_time", "ms", unions, ours, unions / ours))
    times = " ".join(f"{name} {ms:.3f}" for name, ms in found.items())
    print(f"{shape}{extra}: {times} ms, {work / found['ours'] / 1e9:.0f} TFLOP/s", flush=True)
    return rows


def ceiling(heads: int, args: argparse.Namespace, tokens: int = 4096) -> list[dict[str, Any]]:
    """Time flash_mla_sparse_fwd alone, with as many heads as fill its tile; return its row."""
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    g = torch.Generator("cuda").manual_seed(heads)
    q = torch.randn(tokens, heads, 576, device="cuda", generator=g, dtype=torch.bfloat16)
    kv = torch.randn(KEYS, 1, 576, device="cuda", generator=g, dtype=torch.bfloat16)
    rows = selection(tokens, 2, 2.0, "iid", 1)[:, None]  # neighbours share no key
    ms = medians({"ceiling": lambda: flash_mla_sparse_fwd(q, kv, rows, SCALE)}, args.runs)["ceiling"]
    rate = tokens * heads * K * (576 + 512) * 2 / ms / 1e9
    print(f"heads={heads} T={tokens} flash_mla_sparse_fwd: {ms:.3f} ms, {rate:.0f} TFLOP/s", flush=True)
    row = {
        "case": f"heads={heads} T={tokens} u=1.0 base=card of=flash_mla_sparse_fwd",
        "metric": "ceiling",
        "unit": "TFLOP/s",
        "baseline": args.ceilings[1],
        "ours": rate,
        "ratio": rate / args.ceilings[1],
        "ms": ms,
        "gathered_tb_per_s": tokens * K * 1152 / ms / 1e9,
        "runs": args.runs,
        **args.about,
    }
    return [row]


def shapes(name: str) -> list[tuple[int, int, float]]:
    """Return (heads, tokens, union ratio); ratios go from 1 to the group size."""
    found = []
    for heads in plan.HEADS:
        group = plan.group_size(heads)
        ratios = [r for r in (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if r <= group]
        sizes = (16384,) if name == "quick" else (4096, 8192, 16384)
        if name == "quick":
            ratios = [1.5, 2.0] if group > 2 else [1.5]
        found += [(heads, tokens, ratio) for tokens in sizes for ratio in ratios]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--line", required=True)
    parser.add_argument("--set", default="table", choices=("table", "quick", "ceiling"))
    parser.add_argument("--dist", default="iid", choices=("iid", "drift", "core"))
    parser.add_argument("--kv", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--limit", type=float, default=400.0, help="start no shape after so many seconds")
    parser.add_argument("--commit", default="", help="instead of what git says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.monotonic()
    wrong = [selfcheck.check("cuda", heads, 300, args.kv == "fp8") for heads in plan.HEADS]
    if any(wrong):
        raise SystemExit("the self-check failed, nothing is timed: " + "; ".join(filter(None, wrong)))
    args.about, args.ceilings = run_info.facts(args.commit), ceilings()
    print(f"this card: copy {args.ceilings[0]:.2f} TB/s, BF16 {args.ceilings[1]:.0f} TFLOP/s", flush=True)
    out = args.out or ROOT / f"bench/results/litedsa/{args.line}-h200.json"
    if args.set == "ceiling":
        for heads in (64, 128):
            results_file.add(out, "litedsa", args.line, ceiling(heads, args), replace=False)
        return
    for shape in shapes(args.set):
        if time.monotonic() - begun > args.limit:
            print("time is up: the remaining shapes were not measured")
            break
        results_file.add(out, "litedsa", args.line, measure(*shape, args), replace=False)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
