# SPDX-License-Identifier: Apache-2.0
"""LiteTopK in the engine's op on a card, beside upstream's own builder, gather, DeepGEMM and top-k."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.dsa.litetopk import backend, eligible, engine, grouping, kernel, ready, reference

from . import litetopk_batches as batches


def gpu_reason() -> str:
    """Why this cannot run here, '' if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from vllm.utils.deep_gemm import has_deep_gemm

    if not has_deep_gemm():
        return "no DeepGEMM"
    return kernel.why_not(64, 128, 2048, torch.cuda.get_device_capability())


pytestmark = pytest.mark.skipif(bool(gpu_reason()), reason=f"cannot run: {gpu_reason()}")
DIM = 128


class World:
    """The op's inputs for one step, with the decodes left out."""

    def __init__(self, monkeypatch, queries, contexts, heads=64, k=2048):
        import vllm.model_executor.layers.sparse_attn_indexer as op
        from vllm.v1.worker.workspace import init_workspace_manager

        self.op, self.k, self.queries, self.contexts = op, k, queries, contexts
        length = max(q + c for q, c in zip(queries, contexts, strict=True))
        self.length = -(-length // batches.BLOCK) * batches.BLOCK
        config = batches.make_config(max_model_len=self.length, max_tokens=64, heads=heads, k=k)
        self.builder = batches.make_builder(config, device="cuda")
        self.step = batches.make_step(
            queries, contexts, self.length // batches.BLOCK, random.Random(0), device="cuda"
        )
        g = torch.Generator(device="cuda").manual_seed(0)
        tokens = sum(queries)
        blocks = 1 + sum(-(-(q + c) // batches.BLOCK) for q, c in zip(queries, contexts, strict=True))

        def randn(*shape):
            return torch.randn(*shape, device="cuda", generator=g)

        self.q = randn(tokens, heads, DIM).to(torch.float8_e4m3fn)
        self.weights = randn(tokens, heads) * 0.1
        self.cache = torch.zeros(blocks, batches.BLOCK, DIM + 4, dtype=torch.uint8, device="cuda")
        self.keys = randn(blocks, batches.BLOCK, DIM).to(torch.float8_e4m3fn)
        self.scales = torch.rand(blocks, batches.BLOCK, device="cuda", generator=g) * 0.5 + 0.5
        flat = self.cache.view(blocks, -1)
        flat[:, : batches.BLOCK * DIM] = self.keys.view(torch.uint8).view(blocks, -1)
        flat[:, batches.BLOCK * DIM :] = self.scales.view(torch.uint8).view(blocks, -1)
        self.out = torch.empty(tokens, k, dtype=torch.int32, device="cuda")
        self.total = sum(queries) + sum(contexts)
        monkeypatch.setattr(op, "get_forward_context", lambda: self.context)
        init_workspace_manager(torch.device("cuda"))

    def build(self):
        return replace(self.builder.build(0, self.step), num_decodes=0)

    def call(self, metadata):
        """Run the op; return its ids."""
        context = {"layer": metadata} if metadata is not None else None
        self.context = SimpleNamespace(attn_metadata=context, cudagraph_runtime_mode=None)
        self.out.fill_(-7)
        arguments = {
            "hidden_states": self.q.flatten(1),
            "k_cache_prefix": "layer",
            "kv_cache": self.cache,
            "q_quant": self.q,
            "q_scale": None,
            "k": None,
            "weights": self.weights,
            "quant_block_size": DIM,
            "scale_fmt": "ue8m0",
            "topk_tokens": self.k,
            "head_dim": DIM,
            "max_model_len": self.length,
            "total_seq_lens": self.total,
            "topk_indices_buffer": self.out,
            "skip_k_cache_insert": True,
            "use_pcp": False,
            "dense_mha_metadata_layer_name": "",
        }
        if hasattr(self.op, "PrefillRowShard"):
            arguments["pcp_shard_decode_requests"] = False
        self.op.sparse_attn_indexer(**arguments)
        torch.cuda.synchronize()
        return self.out.clone()

    def check(self, ids):
        """Each row of some: valid ids first and distinct, and none below the reference's cut-off."""
        starts = self.step.query_start_loc_cpu.tolist()
        for r, (q, c) in enumerate(zip(self.queries, self.contexts, strict=True)):
            table = self.step.block_table_tensor[r, : -(-(q + c) // batches.BLOCK)].long()
            keys, scale = self.keys[table].reshape(-1, DIM), self.scales[table].reshape(-1)
            for i in sorted({0, q // 2, q - 1}):
                row, length = starts[r] + i, c + i + 1
                valid = min(length, self.k)
                found = ids[row, :valid].long()
                assert bool((ids[row, valid:] == -1).all()), (r, i)
                assert found.unique().numel() == valid and int(found.min()) >= 0 and int(found.max()) < length
                scores = reference.indexer_scores(
                    self.q[row : row + 1], keys[:length], scale[:length], self.weights[row : row + 1]
                )[0]
                cut = float(scores.topk(valid).values[-1])
                assert float(scores[found].min()) >= cut - 2e-3 * float(scores.abs().max()), (r, i)


@pytest.fixture(autouse=True)
def on(monkeypatch):
    ready.reset()
    monkeypatch.setenv("VLLM_LITETOPK", "1")
    monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "always")
    monkeypatch.setenv(
        "VLLM_INDEXER_LOGITS_SLAB", "off"
    )  # it takes the place of the logits in the profile run
    yield
    ready.reset()


def fused(metadata):
    return [chunk for chunk in metadata.prefill.chunks if hasattr(chunk, engine.MARK)]


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([700, 300, 65], [9000, 15011, 0]), ([256], [200000]), ([9, 2], [100, 40000]), ([3000], [5])],
)
def test_the_op_selects_what_upstream_selects(monkeypatch, heads, queries, contexts):
    world = World(monkeypatch, queries, contexts, heads)
    plan = world.build()
    together = min(queries) >= grouping.FEWEST_ROWS
    assert len(fused(plan)) == (1 if together else len(queries))
    world.check(world.call(plan))
    monkeypatch.setenv("VLLM_LITETOPK", "0")
    plan = world.build()
    assert not fused(plan)
    world.check(world.call(plan))


def test_a_cut_chunk_takes_upstreams_path(monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "8")
    world = World(monkeypatch, [700, 300], [9000, 15011])
    monkeypatch.setattr(engine, "_why_not_these", lambda *arguments: "a test")
    world.check(world.call(world.build()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_rows_together_are_the_whole(monkeypatch, ranks):
    """Upstream's row sharding, each rank in turn on this card."""
    world = World(monkeypatch, [700, 300], [9000, 15011])
    if not hasattr(world.op, "PrefillRowShard"):
        pytest.skip("this line has no row sharding")
    plan = world.build()
    whole = world.call(plan).sort(1).values
    sizes = [1000 // ranks] * (ranks - 1)
    sizes.append(1000 - sum(sizes))
    world.out.fill_(-7)
    k = torch.empty(world.total, DIM, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(world.total, 4, dtype=torch.uint8, device="cuda")
    for rank in range(ranks):
        shard = world.op.PrefillRowShard(0, sizes, rank)
        left = engine.run_chunks(
            plan.prefill, world.cache, world.q, None, world.weights, k, scale, world.out, world.k, shard
        )
        assert left.chunks == []
    assert torch.equal(world.out.sort(1).values, whole)


def test_the_run_without_a_batch_checks_and_reserves(monkeypatch):
    world = World(monkeypatch, [8], [0])
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    world.call(None)
    device, shape = world.q.device, eligible.Indexer(64, 128, 2048)
    assert ready.why_not(shape, device) == ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    world.call(None)
    needed = backend.current.most_workspace(64, 2048, device)
    assert torch.cuda.max_memory_allocated() - before >= needed + (1 << 20)


def test_a_fused_chunk_allocates_no_more_than_was_reserved(monkeypatch):
    world = World(monkeypatch, [2048], [(1 << 18) - 2048])
    plan = world.build()
    world.call(plan)  # the gather's workspace is allocated at first use
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    world.call(plan)
    extra = torch.cuda.max_memory_allocated() - before - world.out.numel() * 4  # the clone of the ids
    assert extra <= backend.current.most_workspace(64, 2048, world.q.device) + (1 << 20)
