# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's real build() and sparse_attn_indexer op on the CPU, with and without LiteTopK; a script.

See test_litetopk_engine.py. Needs TRITON_INTERPRET=1. What runs on a card only has a stand-in in PyTorch: the
gather of the paged keys, DeepGEMM's logits, upstream's top-k, and the fused kernel (its reference). They note
the rows that they were given. Prints one JSON object per step.
"""

import json
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
import vllm.model_executor.layers.sparse_attn_indexer as op
from tests.dsa import litetopk_batches as batches
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.dsa import counters
from vllm.dsa.litetopk import backend, engine, ready, reference
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.worker.workspace import init_workspace_manager

HEADS, DIM, LENGTH, MOST = 32, 128, 1024, 40960
SHARDED = hasattr(op, "PrefillRowShard")
FP8 = torch.float8_e4m3fn


class World:
    """One step's tensors, and notes of which rows were scored by what."""

    def __init__(self, seed, queries, contexts, top_k):
        g = torch.Generator().manual_seed(seed)
        tokens = sum(queries)
        blocks = 1 + sum(-(-(q + c) // batches.BLOCK) for q, c in zip(queries, contexts, strict=True))
        self.top_k = top_k
        self.q = torch.randn(tokens, HEADS, DIM, generator=g).to(FP8)
        self.weights = torch.randn(tokens, HEADS, generator=g)
        self.cache = torch.zeros(blocks, batches.BLOCK, DIM + 4, dtype=torch.uint8)
        flat = self.cache.view(blocks, -1)
        keys = torch.randn(blocks, batches.BLOCK, DIM, generator=g).to(FP8)
        flat[:, : batches.BLOCK * DIM] = keys.view(torch.uint8).view(blocks, -1)
        scales = torch.rand(blocks, batches.BLOCK, generator=g) + 0.5
        flat[:, batches.BLOCK * DIM :] = scales.view(torch.uint8).view(blocks, -1)
        self.clear()

    def clear(self):
        self.dense, self.fused, self.gathers = [], [], 0
        self.out = torch.full((self.q.shape[0], self.top_k + 3), -7, dtype=torch.int32)

    def rows(self, part):
        first = part.storage_offset() // (HEADS * DIM)
        return list(range(first, first + part.shape[0]))


WORLD: World


def gather(cache, k, scale, table, cu):
    """cp_gather_indexer_k_quant_cache: a block holds its keys first, then their scales."""
    WORLD.gathers += 1
    k.view(torch.uint8).fill_(0x7F)  # NaN where nothing is gathered
    flat, size = cache.view(cache.shape[0], -1), batches.BLOCK
    for row, (low, high) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        blocks = flat[table[row, : -(-(high - low) // size)].long()]
        keys, scales = blocks.split([size * DIM, size * 4], 1)
        k.view(torch.uint8)[low:high] = keys.reshape(-1, DIM)[: high - low]
        scale[low:high] = scales.reshape(-1, 4)[: high - low]


def logits(q, kv, weights, ks, ke, *rest, **keywords):
    """DeepGEMM's logits; columns out of range hold garbage. 0.33.0 shifts each row to column 0."""
    (q, _), (k, scale) = q, kv
    WORLD.dense += WORLD.rows(q)
    dots = torch.einsum("qhd,kd->qhk", q.double(), torch.nan_to_num(k.double())).relu()
    full = ((dots * weights.double()[..., None]).sum(1) * scale.double()).float()
    column = torch.arange(full.shape[1])
    full[(column < ks[:, None]) | (column >= ke[:, None])] = float("nan")
    if not SHARDED:
        return full
    found = torch.full((full.shape[0], rest[0]), float("nan"))
    for row, (low, high) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        found[row, : high - low] = full[row, low:high]
    return found


def top_k(scores, starts, ends, out, rows, stride0, stride1, k):
    """top_k_per_row_prefill, by torch.topk."""
    for row, (low, high) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        best = scores[row, low:high].topk(min(k, high - low)).indices
        out[row, : best.numel()] = best.int()


class CpuKernel:
    """The reference in place of the CUDA kernel."""

    wrong = ""

    def why_not(self, heads, dim, k, device):
        return ""

    def check(self, heads, k, device):
        return self.wrong

    def most_workspace(self, heads, k, device):
        return 12345

    def run(self, q, k, k_scale, weights, ks, ke, out, longest):
        assert int((ke - ks).max()) <= longest <= k.shape[0]
        WORLD.fused += WORLD.rows(q)
        scores = reference.indexer_scores(q, k, k_scale, weights).float()
        out.copy_(reference.top_positions(scores, ks, ke, out.shape[1]))


def install():
    op.ops = SimpleNamespace(cp_gather_indexer_k_quant_cache=gather, top_k_per_row_prefill=top_k)
    import vllm._custom_ops

    vllm._custom_ops.cp_gather_indexer_k_quant_cache = gather
    op.fp8_fp4_mqa_logits = logits
    op.current_platform = SimpleNamespace(fp8_dtype=lambda: FP8, is_xpu=lambda: False)
    op.mqa_logits_use_mx_scales = lambda: False
    op.mqa_logits_mx_inputs = lambda q, scale, weights: (scale, weights)
    backend.current = CpuKernel()
    torch.accelerator.empty_cache = lambda *a, **k: None  # upstream's workspace calls it without a card
    init_workspace_manager(torch.device("cpu"))


@contextmanager
def settings(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def call(metadata, **keywords):
    """Call the op on the current world."""
    context = {"layer": metadata} if metadata is not None else None
    op.get_forward_context = lambda: SimpleNamespace(attn_metadata=context, cudagraph_runtime_mode=None)
    names = ["hidden_states", "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights"]
    values = [WORLD.q.flatten(1), "layer", WORLD.cache, WORLD.q, None, None, WORLD.weights]
    arguments = dict(zip(names, values, strict=True)) | {
        "quant_block_size": DIM,
        "scale_fmt": "ue8m0",
        "topk_tokens": WORLD.top_k,
        "head_dim": DIM,
        "max_model_len": LENGTH,
        "total_seq_lens": MOST,
        "topk_indices_buffer": WORLD.out,
        "skip_k_cache_insert": True,
        "use_pcp": False,
        "dense_mha_metadata_layer_name": "",
    }
    if SHARDED:
        arguments["pcp_shard_decode_requests"] = False
    op.sparse_attn_indexer(**(arguments | keywords))


def specs_of(metadata):
    """What a plan says about each chunk, without what only holds data."""
    return [
        (c.token_start, c.token_end, c.num_reqs, c.total_seq_lens, c.skip_kv_gather, hasattr(c, engine.MARK))
        for c in metadata.prefill.chunks
    ]


def sorted_rows(out, k):
    return out[:, :k].sort(1).values


def one(seed):
    """One random step: off, on, on with a chunk that is cut after all, and on with sharded rows."""
    global WORLD
    rng = random.Random(seed)
    queries, contexts = batches.random_sizes(rng)
    if seed % 2:  # one that upstream cuts along its rows, and one that it cuts and LiteTopK declines
        queries, contexts = [*queries[:3], 300, 520], [*contexts[:3], 620, rng.choice([0, 3])]
    k, min_keys = rng.choice([8, 64]), rng.choice([0, 300, 600])
    config = batches.make_config(max_model_len=LENGTH, k=k, heads=HEADS)
    builder = batches.make_builder(config)
    step = batches.make_step(queries, contexts, LENGTH // batches.BLOCK, rng)
    decodes = queries.count(1)
    WORLD = World(seed, queries, contexts, k)
    first, last = decodes, sum(queries)
    prefill = list(range(first, last))
    row = {"seed": seed, "requests": len(queries), "problems": []}

    def expect(holds, what):
        if not holds:
            row["problems"].append(what)

    def build(builder=builder):
        metadata = builder.build(0, step)
        # Decodes take another path of the op, which LiteTopK leaves alone.
        return replace(metadata, num_decodes=0)

    off = build()
    call(off)
    wanted = sorted_rows(WORLD.out, k)[first:]
    expect(sorted(WORLD.dense) == prefill and not WORLD.fused, "off: each row once, all dense")
    expect(not any(spec[-1] for spec in specs_of(off)), "off: nothing is marked")
    expect(not hasattr(builder, "_litetopk_reason"), "off: the builder is as upstream's")

    with settings(VLLM_LITETOPK="1", VLLM_LITETOPK_DISPATCH="always", VLLM_LITETOPK_MIN_KEYS=str(min_keys)):
        on = build()
        takes = [q > 1 and q + c >= min_keys for q, c in zip(queries, contexts, strict=True)]
        starts = step.query_start_loc_cpu.tolist()
        fused = [t for r, take in enumerate(takes) if take for t in range(starts[r], starts[r + 1])]
        row["fused"], row["sliced"] = sum(takes), sum(spec[4] for spec in specs_of(off))
        for title, reason in (("on", ""), ("cut", "candidate blocks")):
            WORLD.clear()
            # The same plan, but the op finds that the chunks do not fit the kernel.
            engine._why_not_these = lambda *a, reason=reason: reason
            call(on)
            seen = sorted(WORLD.dense + WORLD.fused)
            expect(seen == prefill, f"{title}: each row once")
            expect(sorted(WORLD.fused) == ([] if reason else fused), f"{title}: the fused requests")
            expect(torch.equal(sorted_rows(WORLD.out, k)[first:], wanted), f"{title}: upstream's ids")
            expect(bool((WORLD.out[:, k:] == -1).all()), f"{title}: nothing beyond the top-k columns")
            largest = max((s[1] - s[0]) * s[3] for s in specs_of(off))
            if reason and any(takes):
                left = engine.run_chunks(on.prefill, None, WORLD.q, None, None, None, None, WORLD.out, k)
                sizes = [(c.token_end - c.token_start) * c.total_seq_lens for c in left.chunks]
                expect(max(sizes) <= max(largest, 1 << 18), f"{title}: within the logits budget")
        engine._why_not_these = WHY_NOT_THESE

        # Chunks without a fused request are upstream's own; the others lose only the fused ones.
        mine, theirs = specs_of(on), specs_of(off)
        touched = set(fused)
        kept = [s for s in theirs if touched.isdisjoint(range(s[0], s[1]))]
        expect([s for s in mine if s in kept] == kept, "on: other chunks are upstream's")
        marked = [row for s in mine if s[-1] for row in range(s[0], s[1])]
        expect(marked == fused, "on: the marks")
        expect(not any(s[4] for s in mine if s[-1]), "on: a fused chunk is uncut")
        row["together"] = sum(s[2] > 1 for s in mine if s[-1])

        if SHARDED and seed % 3 == 0:
            sharded(row, config, build, expect, wanted, prefill, first, k)
    print(json.dumps(row), flush=True)


def sharded(row, config, build, expect, wanted, prefill, first, k):
    """Upstream's row sharding over simulated ranks: one plan, each row on one rank, together upstream's."""
    ranks = 2 + row["seed"] % 2
    supported = indexer.tp_prefill_row_sharding_supported
    indexer.tp_prefill_row_sharding_supported = lambda *a: True
    config.parallel_config.tensor_parallel_size = ranks
    config.attention_config.indexer_tp_shard_min_rows = 1
    plans, slices, scored = [], [], []
    try:
        for rank in range(ranks):
            WORLD.clear()
            metadata = build(batches.make_builder(config))
            if metadata.prefill.row_shard_sizes is None:  # fewer rows than ranks
                return
            plans.append(specs_of(metadata))
            op.get_tensor_model_parallel_rank = lambda rank=rank: rank
            group = SimpleNamespace(all_gatherv=lambda local, dim, sizes: keep(slices, local, sizes))
            op.get_tp_group = lambda group=group: group
            call(metadata)
            scored += WORLD.dense + WORLD.fused
    finally:
        indexer.tp_prefill_row_sharding_supported = supported
        config.parallel_config.tensor_parallel_size = 1
    row["ranks"] = ranks
    expect(all(plan == plans[0] for plan in plans), "sharded: one plan on all ranks")
    expect(sorted(scored) == prefill, "sharded: each row on one rank")
    expect(torch.equal(sorted_rows(torch.cat(slices), k), wanted), "sharded: together upstream's ids")


class Allocations(TorchDispatchMode):
    """Notes the bytes of each new tensor of bytes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty.memory_format and (kwargs or {}).get("dtype") == torch.uint8:
            self.sizes.append(args[0][0])
        return func(*args, **(kwargs or {}))


def reserved(**keywords):
    """Sizes that the op allocates in a run without a batch."""
    with Allocations() as seen:
        call(None, **keywords)
    return seen.sizes


def profile():
    """The run without a batch checks the kernel and reserves its workspace on top of upstream's logits."""
    global WORLD
    WORLD = World(0, [5], [0], 64)
    row = {"problems": []}
    ready.reset()
    call(None)  # upstream's workspace manager allocates once
    off = reserved()
    with settings(VLLM_LITETOPK="1"):
        cases = {"on": (reserved(), [*off, 12345]), "PCP": (reserved(use_pcp=True), off)}
        cases["DCP"] = (reserved(dcp_world_size=2), off)
        known = len(ready._known)
        CpuKernel.wrong = "other bits"
        ready.reset()
        cases["failed check"] = (reserved(), off)
        CpuKernel.wrong = ""
        ready.reset()
    for name, (found, wanted) in cases.items():
        if found != wanted or 1 << 20 not in found:
            row["problems"].append(f"{name}: {found}, expected {wanted}")
    if known != 1:
        row["problems"].append(f"{known} checks")
    print(json.dumps(row), flush=True)


def keep(slices, local, sizes):
    slices.append(local.clone())
    return torch.zeros(sum(sizes), local.shape[1], dtype=torch.int32)


WHY_NOT_THESE = engine._why_not_these


def main():
    install()
    for seed in range(int(sys.argv[1])):
        one(seed)
    profile()
    print(json.dumps({"counters": counters.snapshot("litetopk"), "known": len(ready._known)}), flush=True)


if __name__ == "__main__":
    main()
