# SPDX-License-Identifier: Apache-2.0
"""LiteTopK in the engine, without a GPU: upstream's planner and op with the reference as kernel."""

import ast
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
import vllm.envs as envs
from vllm.dsa import counters, features, switches
from vllm.dsa.litetopk import backend, controls, dispatch, eligible, engine, ready
from vllm.dsa.litetopk.feature import FEATURE
from vllm.v1.attention.backends.mla import indexer

from . import litetopk_batches as batches

TREE = Path(vllm.__file__).parents[1]
CPU = torch.device("cpu")


class Kernel:
    """A kernel that fits everywhere, or not."""

    def __init__(self, wrong: str = "", why: str = ""):
        self.wrong, self.why, self.checks = wrong, why, 0

    def why_not(self, heads, dim, k, device):
        return self.why

    def check(self, heads, k, device):
        self.checks += 1
        return self.wrong


@pytest.fixture(autouse=True)
def on(monkeypatch):
    ready.reset()
    monkeypatch.setattr(backend, "current", Kernel())
    monkeypatch.setenv("VLLM_LITETOPK", "1")
    yield
    ready.reset()


def upstream_specs(builder, seq_lens, query_lens, budget, offset):
    owner = indexer.DeepseekV32IndexerMetadataBuilder
    split = getattr(owner, "_split_indexer_prefill_chunks", None) or indexer.split_indexer_prefill_chunks
    return split(seq_lens, query_lens, builder.max_prefill_buffer_size, budget, request_offset=offset)


def planned(builder, queries, keys, decodes, budget=512 << 20):
    """Upstream's specs and ours for requests with so many new tokens and keys."""
    starts = torch.zeros(len(queries) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(queries).cumsum(0)
    lens = torch.tensor(keys, dtype=torch.int32)
    specs = upstream_specs(builder, lens[decodes:], torch.diff(starts)[decodes:], budget, decodes)
    return specs, engine.plan_chunks(builder, specs, decodes, lens, starts), starts.tolist()


def rows_of(specs, starts):
    return [
        (starts[requests.start] + rows.start, starts[requests.start] + rows.stop) for requests, rows in specs
    ]


@pytest.fixture(scope="module")
def builder():
    return batches.make_builder(batches.make_config(max_model_len=1 << 20, max_tokens=64, k=2048))


def test_real_steps_have_the_ids_of_upstream():
    """build() and the op on random steps: plans, marks, rows, ids, sharding, memory (see the script)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LITETOPK")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"TRITON_INTERPRET": "1", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "1"}
    script = Path(__file__).with_name("litetopk_steps.py")
    done = subprocess.run(
        [sys.executable, str(script), "6"], env=env, cwd=TREE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    *steps, reserved, end = rows
    assert len(steps) == 6
    for row in steps:
        assert row["problems"] == [], row
    # The steps were of the kinds that they are meant to be.
    assert sum(row["fused"] > 0 for row in steps) >= 2 and any(row["fused"] == 0 for row in steps)
    assert any(row["sliced"] for row in steps) and any(row["together"] for row in steps)
    assert any(row.get("ranks") for row in steps) == hasattr(indexer, "balanced_prefill_row_shard")
    assert reserved["problems"] == []
    outcomes = {row["outcome"] for row in end["counters"]}
    assert outcomes == {"active", "fused", "declined"}


def test_without_its_blocks_build_returns_the_same(monkeypatch):
    """build() with the hook, switched off, against build() with the hook cut out of its source."""
    source = textwrap.dedent(inspect.getsource(indexer.DeepseekV32IndexerMetadataBuilder.build))
    tree = ast.parse(source)

    class Cut(ast.NodeTransformer):
        cut = 0

        def visit_If(self, node):
            if ast.unparse(node.test) == "envs.VLLM_LITETOPK":
                self.cut += 1
                return None
            return self.generic_visit(node)

    cutter = Cut()
    tree = cutter.visit(tree)
    assert cutter.cut == 2 and "litetopk" not in ast.unparse(tree)
    scope = dict(vars(indexer))
    exec(compile(ast.fix_missing_locations(tree), "build", "exec"), scope)

    class Kernel:
        """In place of the Triton kernel; both sides have the same."""

        def __call__(self, *arguments, **keywords):
            for out in arguments[4:7]:
                out.zero_()

    monkeypatch.setattr(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", Kernel())
    monkeypatch.setattr(indexer, "torch", batches.Zeroed)
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    monkeypatch.setenv("VLLM_LITETOPK", "0")
    monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "bogus")  # not looked at while the feature is off
    chunks = 0
    for seed in range(60):
        rng = random.Random(seed)
        config = batches.make_config(max_model_len=1024)
        queries, contexts = batches.random_sizes(rng, 900, 800)
        step = batches.make_step(queries, contexts, 32, rng)
        found, wanted = batches.make_builder(config), batches.make_builder(config)
        metadata = found.build(0, step)
        chunks += len(metadata.prefill.chunks)
        assert batches.plain(metadata) == batches.plain(scope["build"](wanted, 0, step))
        assert set(vars(found)) == set(vars(wanted))
    assert chunks > 100


def test_every_row_is_planned_once_and_declined_rows_as_upstream(builder, monkeypatch):
    monkeypatch.setattr(backend, "current", Kernel())
    rng = random.Random(1)
    seen = {"fused": 0, "declined": 0, "mixed": 0, "together": 0}
    for _ in range(120):
        decodes, prefills = rng.randint(0, 3), rng.randint(1, 6)
        queries = [1] * decodes + [rng.choice([2, 8, 64, 512, 2000, 8192]) for _ in range(prefills)]
        keys = [q + rng.choice([0, 1000, 1 << 17, 1 << 18, (1 << 20) - 8192]) for q in queries]
        budget = rng.choice([128 << 20, 512 << 20, 4 << 30])
        always = rng.random() < 0.3
        monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "always" if always else "measured")
        specs, ours, starts = planned(builder, queries, keys, decodes, budget)
        again = planned(batches_copy(builder), queries, keys, decodes, budget)[1]
        assert (ours, ours.fused) == (again, again.fused)  # another rank
        rows = rows_of(ours, starts)
        assert sorted(rows) == rows and rows[0][0] == starts[decodes] and rows[-1][1] == starts[-1]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        alone = {spec.start for spec, _ in specs if spec.stop - spec.start == 1}
        fused, together = set(), 0
        for spec, (start, end) in zip(ours, rows, strict=True):
            members = range(spec[0].start, spec[0].stop)
            if (start, end) not in ours.fused:
                continue
            fused |= set(members)
            shortest, longest = min(keys[r] for r in members), max(keys[r] for r in members)
            assert ours.fused[start, end] == longest and not spec[1].start
            assert always or dispatch.worthwhile(end - start, shortest)
            if len(members) > 1:
                together += 1
                assert sum(keys[r] for r in members) <= 1 << 20
                assert min(queries[r] for r in members) >= 8
        assert len(ours.fused) == sum(row in ours.fused for row in rows)
        for r in range(decodes, len(queries)):  # what is worth a launch alone has one, or shares one
            if keys[r] <= 1 << 20 and (always or (r in alone and dispatch.worthwhile(queries[r], keys[r]))):
                assert r in fused
        for spec, (start, end) in zip(ours, rows, strict=True):
            requests = range(spec[0].start, spec[0].stop)
            if (start, end) in ours.fused:
                continue
            assert fused.isdisjoint(requests)
            # Nothing that upstream would not allow: within the budget, or one row.
            total = sum(keys[r] for r in requests)
            assert (end - start) * total * 4 <= budget or end - start == 1
        kept = [flat(s) for s in specs if fused.isdisjoint(range(s[0].start, s[0].stop))]
        among = set(kept)
        assert [flat(s) for s in ours if flat(s) in among] == kept
        seen["fused"] += len(fused)
        seen["declined"] += prefills - len(fused)
        seen["mixed"] += bool(fused) and len(fused) < prefills
        seen["together"] += together
    assert min(seen.values()) > 20, seen


def flat(spec):
    return (spec[0].start, spec[0].stop, spec[1].start, spec[1].stop)


def batches_copy(builder):
    return SimpleNamespace(**{name: getattr(builder, name) for name in vars(builder) if name[0] != "_"})


def test_a_request_of_a_million_keys_is_one_chunk(builder):
    specs, ours, _ = planned(builder, [8192], [1 << 20], 0)
    assert len(specs) == 64 and ours == [(slice(0, 1), slice(0, 8192))] and set(ours.fused) == {(0, 8192)}
    assert counters.snapshot("litetopk") == [
        {"feature": "litetopk", "outcome": "active", "reason": "", "count": 1},
        {"feature": "litetopk", "outcome": "fused", "reason": "", "count": 1},
    ]


def test_requests_that_share_a_chunk_share_a_launch_or_stay_in_it(builder, monkeypatch):
    specs, ours, _ = planned(builder, [8] * 4, [70000] * 4, 0)
    assert len(specs) == 1 and ours == specs and ours.fused == {(0, 32): 70000}
    # Of 128 rows together 70000 keys are too few; alone, 32 rows would be worth a launch, but not of four.
    specs, ours, _ = planned(builder, [32] * 4, [70000] * 4, 0)
    assert len(specs) == 1 and ours == specs and not ours.fused
    declined = {row["reason"]: row["count"] for row in counters.snapshot("litetopk") if row["reason"]}
    assert declined == {dispatch.SHARED: 4}
    assert planned(builder, [32], [70000], 0)[1].fused == {(0, 32): 70000}
    # Neighbours join across upstream's chunks; a short one, or one of few keys, parts them.
    queries, keys = [4096, 4096, 4, 4096, 4096], [1 << 17, 1 << 18, 1 << 17, 1 << 18, 70000]
    ours = planned(builder, queries, keys, 0)[1]
    assert ours.fused == {(0, 8192): 1 << 18, (8192, 8196): 1 << 17, (8196, 16388): 1 << 18}
    ours = planned(builder, [4096, 64, 4096], [1 << 18, 1000, 1 << 18], 0)[1]
    assert ours.fused == {(0, 4096): 1 << 18, (4160, 8256): 1 << 18}
    # A long one, which the budget gives chunks of its own, is fused beside short ones that are not.
    assert planned(builder, [8, 8, 8192], [4000, 4000, 1 << 18], 0)[1].fused == {(16, 8208): 1 << 18}
    # One launch takes 2^20 keys.
    monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "always")
    assert list(planned(builder, [8] * 4, [1 << 19] * 4, 0)[1].fused) == [(0, 16), (16, 32)]
    assert list(planned(builder, [8] * 4, [70000] * 4, 0)[1].fused) == [(0, 32)]


def test_sizes_that_decline_are_counted_by_reason(builder, monkeypatch):
    planned(builder, [8192, 64], [1 << 14, 1 << 14], 0)
    planned(builder, [8192], [(1 << 20) + 1], 0)
    monkeypatch.setenv("VLLM_LITETOPK_MIN_KEYS", "1000000")
    planned(builder, [8192], [1 << 19], 0)
    assert [(row["outcome"], row["reason"], row["count"]) for row in counters.snapshot("litetopk")] == [
        ("declined", dispatch.BELOW_MIN, 1),
        ("declined", dispatch.TOO_MANY_KEYS, 1),
        ("declined", dispatch.SMALL, 2),
    ]
    assert backend.current.checks == 0  # nothing needed the kernel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v4"}, "model type deepseek_v4"),
        ({"model_type": "glm5next"}, "model type glm5next"),
        ({"heads": 16}, "16 index heads"),
        ({"decode_context_parallel_size": 2}, "DCP"),
        ({"prefill_context_parallel_size": 2}, "PCP"),
        ({"enable_dbo": True}, "DBO"),
    ],
)
def test_configurations_decline_with_their_reason(change, words, caplog_vllm):
    config = batches.make_config(max_model_len=1 << 20, k=2048, **change)
    assert words in eligible.why_not(config)
    builder = SimpleNamespace(vllm_config=config, compress_ratio=1, device=CPU)
    builder.max_prefill_buffer_size = 1 << 23
    for _ in range(2):
        specs, ours, _ = planned(builder, [8192, 64], [1 << 20, 1 << 19], 0)
        assert ours == specs and not ours.fused
    (row,) = counters.snapshot("litetopk")
    assert words in row["reason"] and (row["outcome"], row["count"]) == ("declined", 4)
    (line,) = [text for record in caplog_vllm.records if (text := record.getMessage()).startswith("vllm.dsa")]
    assert words in line and "upstream's path is used" in line


def test_other_caches_decline():
    config = batches.make_config()
    assert eligible.why_not(config) == ""
    assert eligible.why_not(batches.make_config(model_type="glm_moe_dsa")) == ""
    config.model_config.hf_text_config.candidate_block_size = 64
    assert eligible.why_not(config) == "candidate blocks"
    config = batches.make_config()
    config.attention_config = SimpleNamespace(resolve_indexer_kv_dtype=lambda default: "mxfp4")
    assert "mxfp4" in eligible.why_not(config)
    builder = SimpleNamespace(vllm_config=batches.make_config(), compress_ratio=4)
    assert "compressed by 4" in engine._why_not_at_all(builder)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [(Kernel(wrong="scores differ"), "scores differ"), (Kernel(why="no library"), "no library")],
)
def test_a_kernel_that_fails_is_one_warning(builder, monkeypatch, caplog_vllm, kernel, words):
    monkeypatch.setattr(backend, "current", kernel)
    for _ in range(3):
        specs, ours, _ = planned(builder, [8192], [1 << 20], 0)
        assert ours == specs and not ours.fused
    (line,) = caplog_vllm.records
    assert line.levelname == "WARNING" and words in line.getMessage()
    assert kernel.checks == (1 if kernel.wrong else 0)
    (row,) = counters.snapshot("litetopk")
    assert row["count"] == 3 and words in row["reason"]


def test_a_kernel_that_raises_declines(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(backend.current, "check", broken)
    assert "RuntimeError: illegal address" in ready.why_not(eligible.Indexer(64, 128, 2048), CPU)


@pytest.mark.parametrize("usable", [0, 1])
def test_ranks_agree_on_the_kernel(monkeypatch, usable):
    """This rank's check is good; the group's minimum decides."""
    from vllm.distributed import parallel_state

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MIN and group == "cpu group" and tensor.tolist() == [1]
        tensor.fill_(usable)

    group = SimpleNamespace(world_size=2, cpu_group="cpu group")
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    reason = ready.why_not(eligible.Indexer(64, 128, 2048), CPU)
    assert reason == ("" if usable else "another tensor-parallel rank cannot use the kernel")


def test_all_shares_of_a_request_must_be_worth_it():
    measured = controls.Controls(on=True, always=False, min_keys=0)
    assert dispatch.shares(0, 100, None) == [100]
    assert dispatch.shares(0, 100, [50, 30, 40]) == [50, 30, 20]
    assert dispatch.shares(60, 70, [50, 30, 40]) == [10]
    assert dispatch.why_not([8192, 7168], 1 << 17, 2048, measured) == ""
    # One rank has so few rows of it that upstream's path is faster there.
    assert dispatch.why_not([8192, 1000], 1 << 17, 2048, measured) == dispatch.SMALL
    assert dispatch.why_not([8192, 60], 1 << 17, 2048, measured) == ""
    assert "was not measured" in dispatch.why_not([8192], 1 << 20, 512, measured)


def test_a_step_that_tensor_parallel_ranks_share(builder, monkeypatch):
    """With upstream's row sharding the decision is taken on what each rank scores."""
    if not hasattr(indexer, "balanced_prefill_row_shard"):
        pytest.skip("this line has no row sharding")
    config = batches.make_config(max_model_len=1 << 20, max_tokens=64, k=2048, tp=8)
    config.attention_config.indexer_tp_shard_min_rows = 4096
    builder = batches.make_builder(config)
    monkeypatch.setattr(indexer, "tp_prefill_row_sharding_supported", lambda *arguments: True)
    assert not planned(builder, [8192], [1 << 17], 0)[1].fused  # about 1000 rows each
    assert planned(builder, [8192], [1 << 18], 0)[1].fused.keys() == {(0, 8192)}
    monkeypatch.setattr(indexer, "tp_prefill_row_sharding_supported", lambda *arguments: False)
    assert planned(builder, [8192], [1 << 17], 0)[1].fused.keys() == {(0, 8192)}


def test_controls_are_checked_only_when_on(monkeypatch):
    monkeypatch.setenv("VLLM_LITETOPK", "0")
    monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "bogus")
    monkeypatch.setenv("VLLM_LITETOPK_MIN_KEYS", "many")
    assert controls.read() == controls.Controls(on=False, always=False, min_keys=0)
    monkeypatch.setenv("VLLM_LITETOPK", "1")
    with pytest.raises(ValueError, match="VLLM_LITETOPK_DISPATCH"):
        controls.read()
    monkeypatch.setenv("VLLM_LITETOPK_DISPATCH", "always")
    with pytest.raises(ValueError, match=r"VLLM_LITETOPK_MIN_KEYS: .*many"):
        controls.read()
    monkeypatch.setenv("VLLM_LITETOPK_MIN_KEYS", "5")
    assert controls.read() == controls.Controls(on=True, always=True, min_keys=5)
    monkeypatch.setenv("VLLM_DSA", "0")
    assert not controls.read().on and not envs.VLLM_LITETOPK


def test_state(monkeypatch):
    known = next(known for known in features.KNOWN if known.name == "litetopk")
    assert known.switches[0] == FEATURE.switches[0] == controls.MAIN
    assert features.status(known).state in (features.State.DECLINED, features.State.UNAVAILABLE)
    monkeypatch.setenv("VLLM_LITETOPK", "0")
    assert features.status(known) == features.Status(features.State.OFF, "VLLM_LITETOPK=0")
    assert set(controls.ALL) <= set(features.all_switches())
    assert switches.get(controls.MIN_KEYS) == 0
