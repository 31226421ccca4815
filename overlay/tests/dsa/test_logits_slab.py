# SPDX-License-Identifier: Apache-2.0
"""The logits slab on the CPU: sizes against upstream's planner, decisions, and the hooks in upstream's op."""

import inspect
import random
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import envs
from vllm.dsa import counters, features
from vllm.dsa.logits_slab import extension, feature, selfcheck, slab
from vllm.dsa.logits_slab.layout import Layout
from vllm.utils import deep_gemm
from vllm.v1.worker import workspace

from .logits_slab_cases import PlainDeepGemm, case, valid

COMPRESSED = slab.COMPRESSED
POISON = -54321.0


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slab, "_decided", {})
    monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", "on")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """A card of compute capability 9.0 as far as the decision is concerned, and an empty workspace."""
    card = SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: SimpleNamespace(major=9, minor=0)
    )
    monkeypatch.setattr(slab, "current_platform", card)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    return workspace.current_workspace_manager()


def query(tokens: int = 4, heads: int = 32, dim: int = 128) -> torch.Tensor:
    return torch.zeros(tokens, heads, dim, dtype=torch.float8_e4m3fn)


def planner():
    from vllm.v1.attention.backends.mla import indexer

    if hasattr(indexer, "split_indexer_prefill_chunks"):
        return indexer.split_indexer_prefill_chunks
    return indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks


@pytest.mark.parametrize("heads", [32, 64])
def test_planned_bytes_hold_every_chunk_that_upstream_plans(heads: int):
    rng = random.Random(heads)
    split = planner()
    largest = 0.0
    for _ in range(120):
        budget = rng.choice([1 << 12, 1 << 16, 1 << 20])
        most_queries, most_keys = rng.choice([1, 7, 64, 512]), rng.choice([1, 100, 5000, 40000])
        requests = rng.randint(1, 5)
        query_lens = [rng.randint(1, max(1, most_queries // requests)) for _ in range(requests)]
        seq_lens = [rng.randint(1, most_keys) for _ in range(requests)]
        if sum(query_lens) > most_queries:
            continue
        layout = Layout(heads, COMPRESSED)
        planned = layout.most_bytes(budget, most_queries, most_keys)
        for reqs, rows in split(torch.tensor(seq_lens), torch.tensor(query_lens), most_keys, budget):
            shape = layout.shape(rows.stop - rows.start, sum(seq_lens[reqs]))
            assert prod(shape) * 4 <= planned, (budget, most_queries, most_keys, reqs, rows)
            largest = max(largest, prod(shape) * 4 / planned)
    assert largest > 0.5  # the bound is one that is nearly reached


def test_the_bound_is_close_to_the_budget_for_a_real_configuration():
    size = Layout(64, COMPRESSED).most_bytes(512 << 20, 16384, 40 * 163840)
    assert 512 << 20 < size < 1.2 * (512 << 20)


@pytest.mark.parametrize("queries,keys,heads", [(1, 1, 32), (5, 255, 64), (64, 1024, 32), (33, 700, 64)])
def test_logits_equal_deepgemm_s_own_and_stay_inside(monkeypatch, queries: int, keys: int, heads: int):
    plain = PlainDeepGemm(COMPRESSED).install(monkeypatch)
    q, kv, weights, ks, ke = case(queries, keys, heads, 128, seed=queries)
    args = (keys,) if COMPRESSED else ()
    kwargs = {} if COMPRESSED else {"clean_logits": False}
    own = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, ks, ke, *args, **kwargs)
    size = Layout(heads, COMPRESSED).most_bytes(4 * queries * keys, queries, keys) + 1024
    whole = torch.full((size // 4 + 2048,), POISON)
    buffer = whole[1024:-1024].view(torch.uint8)
    logits = slab.Logits(buffer)
    got = logits(q, kv, weights, ks, ke, *args, **kwargs)
    mask = valid(ks, ke, keys, COMPRESSED)
    assert got.shape == own.shape and got.stride() == own.stride() and plain.calls == 1
    assert torch.equal(got[mask], own[mask])
    assert buffer.data_ptr() <= got.data_ptr() < buffer.data_ptr() + 1024
    assert (whole[:1024] == POISON).all() and (whole[-1024:] == POISON).all()
    again = logits(q, kv, weights, ks, ke, *args, **kwargs)
    assert again.data_ptr() == got.data_ptr()


def test_a_chunk_that_does_not_fit_gets_a_tensor_of_its_own(monkeypatch):
    plain = PlainDeepGemm(COMPRESSED).install(monkeypatch)
    q, kv, weights, ks, ke = case(8, 512, 32, 128, seed=1)
    args, kwargs = ((512,), {}) if COMPRESSED else ((), {"clean_logits": False})
    got = slab.Logits(torch.zeros(4096, dtype=torch.uint8))(q, kv, weights, ks, ke, *args, **kwargs)
    own = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, ks, ke, *args, **kwargs)
    mask = valid(ks, ke, 512, COMPRESSED)
    assert plain.calls == 0 and torch.equal(got[mask], own[mask])
    assert counters.snapshot("logits_slab") == [
        {
            "feature": "logits_slab",
            "outcome": "declined",
            "reason": "a chunk is larger than planned",
            "count": 1,
        }
    ]


def decide(keys: int = 1000, q_scale=None, heads: int = 32) -> tuple:
    return slab.workspace_specs(query(heads=heads), q_scale, torch.zeros(256, 64, dtype=torch.int32), keys)


def test_active_with_a_patched_deepgemm(monkeypatch, hopper):
    PlainDeepGemm(COMPRESSED).install(monkeypatch)
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    (((size,), dtype),) = decide()
    assert dtype == torch.uint8 and size == Layout(32, COMPRESSED).most_bytes(1 << 20, 256, 1000) + 1024
    assert features.status(feature.FEATURE).state is features.State.ACTIVE
    assert counters.snapshot("logits_slab")[0]["outcome"] == "active"
    hopper.lock()
    assert decide() == (((size,), dtype),), "decided once: the lock comes after the profile run"


@pytest.mark.parametrize(
    "what,reason",
    [
        ("locked", "its memory was not planned in the profile run"),
        ("fp4", "the indexer's cache is FP4"),
        ("values", "other logits"),
        ("stride", "row stride"),
        ("outside", "it wrote outside of the buffer"),
    ],
)
def test_declines_with_one_reason(monkeypatch, hopper, what: str, reason: str):
    PlainDeepGemm(COMPRESSED, fault=what).install(monkeypatch)
    if what == "locked":
        hopper.lock()
    assert decide(q_scale=torch.zeros(1) if what == "fp4" else None) == ()
    (row,) = counters.snapshot("logits_slab")
    assert row["outcome"] == "declined" and reason in str(row["reason"])


@pytest.mark.parametrize("patched", [True, False])
def test_an_unmeasured_card_or_an_unpatched_build_leaves_deepgemm_alone(monkeypatch, hopper, patched: bool):
    """DeepGEMM is imported when upstream would import it, not earlier."""
    monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", "auto")
    monkeypatch.setattr(feature, "MEASURED", frozenset() if patched else frozenset({(9, 0)}))
    monkeypatch.setattr(extension, "patched", lambda: patched)

    def imported() -> None:
        raise AssertionError("DeepGEMM was imported")

    monkeypatch.setattr(deep_gemm, "_import_deep_gemm", imported)
    monkeypatch.setattr(deep_gemm, "_lazy_init", imported)
    assert decide() == ()


def test_the_probe_sets_deepgemm_s_cache_folder_up_before_it_imports_it(monkeypatch):
    plain, order = PlainDeepGemm(COMPRESSED), []
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(deep_gemm, "_lazy_init", lambda: order.append("set up"))
    monkeypatch.setattr(deep_gemm, "_import_deep_gemm", lambda: order.append("import") or plain)
    assert deep_gemm.has_mqa_logits_out() and order == ["set up", "import"]


def test_unpatched_or_unmeasured_says_nothing_at_run_time(monkeypatch, hopper):
    PlainDeepGemm(COMPRESSED, with_out=False).install(monkeypatch)
    assert not deep_gemm.has_mqa_logits_out() and decide() == ()
    PlainDeepGemm(COMPRESSED).install(monkeypatch)
    monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", "auto")
    monkeypatch.setattr(feature, "MEASURED", frozenset())
    assert decide(keys=1001) == ()
    assert counters.snapshot("logits_slab") == []
    monkeypatch.setattr(feature, "MEASURED", frozenset({(9, 0)}))
    assert decide(keys=1002) != ()


@pytest.mark.parametrize(
    "capability,switch,state,word",
    [
        ((9, 0), "on", "active", "prefill logits"),
        ((10, 0), "on", "declined", "10.0"),
        (None, "auto", "declined", "no NVIDIA GPU"),
    ],
)
def test_status_by_card(capability, switch: str, state: str, word: str):
    status = feature.card_status(capability, switch)
    assert status.state.value == state and word in status.reason


def test_the_check_at_start_up_passes_for_both_layouts(monkeypatch):
    PlainDeepGemm(COMPRESSED).install(monkeypatch)
    for heads in (32, 64):
        assert selfcheck.failure(Layout(heads, COMPRESSED), 128, torch.device("cpu")) is None
    wrong = selfcheck.failure(Layout(32, not COMPRESSED), 128, torch.device("cpu"))
    assert wrong is not None and "check at start-up" in wrong


def test_patched_extensions_are_told_by_their_files(tmp_path: Path):
    assert not extension.patched(tmp_path)
    (tmp_path / "_C.cpython-311.so").write_bytes(b"\0fp8_fp4_mqa_logits_out\0")
    assert extension.patched(tmp_path)
    (tmp_path / "_C.cpython-312.so").write_bytes(b"\0fp8_fp4_mqa_logits\0")
    assert not extension.patched(tmp_path), "all of them or none"
    (tmp_path / "_C.cpython-312.so").write_bytes(b"")
    assert not extension.patched(tmp_path)


def profile_run(monkeypatch) -> tuple[int, list[int]]:
    """Upstream's op in a profile run on the CPU: bytes of the workspace, and of each dummy it allocates."""
    from vllm.model_executor.layers import sparse_attn_indexer as module

    dummies: list[int] = []
    empty = torch.empty

    def watched(*args, **kwargs):
        if kwargs.get("dtype") == torch.uint8 and isinstance(args[0], int):
            dummies.append(args[0])
        return empty(*args, **kwargs)

    monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    monkeypatch.setattr(module, "_resolve_layer_name", lambda name: name)
    for name in ("_reserve_row_shard_exchange_transient",):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *a: None)
    monkeypatch.setattr(torch, "empty", watched)
    monkeypatch.setattr(module.current_platform, "fp8_dtype", lambda: torch.float8_e4m3fn, raising=False)
    call(module, query(8), torch.zeros(8, 32), torch.zeros(256, 64, dtype=torch.int32))
    manager = workspace.current_workspace_manager()
    return manager._workspace_size_bytes(manager._current_workspaces[0]), [n for n in dummies if n > 0]


def test_the_profile_run_plans_the_buffer_in_place_of_upstream_s_dummy(monkeypatch, hopper):
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "2")
    monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", "off")
    PlainDeepGemm(COMPRESSED).install(monkeypatch)
    without, dummies = profile_run(monkeypatch)
    assert (2 << 20) in dummies
    monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", "on")
    hopper._current_workspaces[0] = None
    with_slab, dummies = profile_run(monkeypatch)
    assert (2 << 20) not in dummies
    planned = Layout(32, COMPRESSED).most_bytes(2 << 20, 256, 4096) + 1024
    assert 0 <= with_slab - without - planned < 512


def prefill(monkeypatch, keys_of: list, q: torch.Tensor, weights: torch.Tensor, chunks: list) -> torch.Tensor:
    """Upstream's op on the CPU for a batch of prefill chunks: what it writes to the top-k buffer.

    The two CUDA ops around the logits, which gather K and select, are plain PyTorch here; the metadata holds
    what the op reads of it.
    """
    from vllm.config import CUDAGraphMode
    from vllm.dsa.litetopk.reference import top_positions
    from vllm.model_executor.layers import sparse_attn_indexer as module

    def gather(_cache, k_quant, k_scale, table, _cu_seq_lens):
        values, scales = keys_of[table]
        k_quant[: len(values)] = values
        k_scale[: len(values)] = scales.view(torch.uint8).view(-1, 4)

    def select(logits, starts, ends, indices, rows, *_strides_and_k):
        indices[:rows] = top_positions(logits[:rows], starts, ends, indices.shape[1])

    monkeypatch.setattr(module.ops, "cp_gather_indexer_k_quant_cache", gather)
    monkeypatch.setattr(module.ops, "top_k_per_row_prefill", select)
    monkeypatch.setattr(module, "_resolve_layer_name", lambda name: name)
    monkeypatch.setattr(module.current_platform, "fp8_dtype", lambda: torch.float8_e4m3fn, raising=False)
    metadata = object.__new__(module.DeepseekV32IndexerMetadata)
    planned = []
    for table, start, end, ks, ke in chunks:
        total = len(keys_of[table][0])
        planned.append(
            SimpleNamespace(
                token_start=start,
                token_end=end,
                cu_seqlen_ks=ks,
                cu_seqlen_ke=ke,
                local_cu_seq_lens=torch.tensor([0, total]),
                max_local_total_seq_lens=total,
                local_total_seq_lens=total,
                max_seqlen_k=int((ke - ks).max()),
                block_table=table,
                skip_kv_gather=False,
                pcp_deinterleave_idx=None,
            )
        )
    for name, value in {
        "slot_mapping": torch.zeros(q.shape[0]),
        "num_decodes": 0,
        "num_prefills": len(chunks),
        "num_decode_tokens": 0,
        "prefill": SimpleNamespace(chunks=planned, row_shard_sizes=None),
        "decode": None,
    }.items():
        object.__setattr__(metadata, name, value)
    context = SimpleNamespace(attn_metadata={"layer": metadata}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    found = torch.full((256, 16), -7, dtype=torch.int32)
    call(module, q, weights, found)
    return found


def call(module, q: torch.Tensor, weights: torch.Tensor, buffer: torch.Tensor) -> None:
    arguments = {
        "hidden_states": torch.zeros(q.shape[0], 16),
        "k_cache_prefix": "layer",
        "kv_cache": torch.zeros(1),
        "q_quant": q,
        "q_scale": None,
        "k": None,
        "weights": weights,
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": buffer.shape[1],
        "head_dim": 128,
        "max_model_len": 4096,
        "total_seq_lens": 4096,
        "topk_indices_buffer": buffer,
        "skip_k_cache_insert": True,
        "use_pcp": False,
        "pcp_shard_decode_requests": False,
        "dense_mha_metadata_layer_name": "",
    }
    op = getattr(module.sparse_attn_indexer, "__wrapped__", module.sparse_attn_indexer)
    known = inspect.signature(op).parameters
    op(**{name: value for name, value in arguments.items() if name in known})


def test_a_prefill_of_upstream_s_op_selects_the_same_with_the_buffer(monkeypatch, hopper):
    sizes, keys_of, chunks, parts = [(40, 900), (64, 900), (17, 300), (90, 2000)], [], [], []
    start = 0
    for seed, (queries, keys) in enumerate(sizes):
        q, kv, weights, ks, ke = case(queries, keys, 32, 128, seed)
        keys_of.append(kv)
        chunks.append((seed, start, start + queries, ks, ke))
        parts.append((q[0], weights))
        start += queries
    q, weights = (torch.cat(list(both)) for both in zip(*parts, strict=True))
    plain = PlainDeepGemm(COMPRESSED).install(monkeypatch)
    found = {}
    for switch in ("off", "on", "off again"):
        monkeypatch.setenv("VLLM_INDEXER_LOGITS_SLAB", switch.split()[0])
        before = plain.calls
        found[switch] = prefill(monkeypatch, keys_of, q, weights, chunks)
        used = plain.calls - before - (len(selfcheck.CASES) if switch == "on" else 0)
        assert used == (len(chunks) if switch == "on" else 0)
    assert torch.equal(found["off"], found["on"]) and torch.equal(found["off"], found["off again"])
    assert (found["on"][: q.shape[0]] >= -1).all() and (found["on"][: q.shape[0]] >= 0).any(1).sum() > 100
    assert (found["on"][q.shape[0] :] == -7).all()


def test_upstream_s_call_is_reached_through_the_hook_alone():
    source = (Path(vllm.__file__).parent / "model_executor/layers/sparse_attn_indexer.py").read_text()
    body = source[
        source.index("\ndef sparse_attn_indexer(") : source.index("\ndef sparse_attn_indexer_fake(")
    ]
    assert body.count(" fp8_fp4_mqa_logits\n") == 1, "one assignment"
    assert "fp8_fp4_mqa_logits(" not in body.replace("fp8_fp4_paged_mqa_logits(", ""), "no call beside it"
    assert body.count("*logits_slab") + body.count("extend(logits_slab)") == 2, "planned and used alike"
    assert envs.VLLM_INDEXER_LOGITS_SLAB == "on"
