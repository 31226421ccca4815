# SPDX-License-Identifier: Apache-2.0
"""LiteDSA between a layer and upstream's backend, on the CPU: which tokens go where, and what is declined.

The op's CPU implementation (the reference) stands for the kernels. Upstream's backends cannot be imported
without their CUDA extensions, so a class of the same name computes ``forward_mqa`` with the reference; that
upstream has those names is read from its source.
"""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.dsa import counters, features, kernels
from vllm.dsa.features import State
from vllm.dsa.litedsa import engine, fallback, feature, kernel, overlap, plan, reference, selfcheck

HEADS, K, BLOCK = 16, 24, 64
SCALE = 192**-0.5


class FlashAttnMLASparseImpl:
    """Computes what upstream's does, with the reference; keeps what it was called with."""

    def __init__(self, topk: torch.Tensor, **changed: Any) -> None:
        self.num_heads, self.scale = HEADS, SCALE
        self.kv_lora_rank, self.qk_rope_head_dim = 512, 64
        self.kv_cache_dtype, self.dcp_world_size = "auto", 1
        self.topk_indices_buffer = topk
        self.calls: list[int] = []
        for name, value in changed.items():
            setattr(self, name, value)

    def forward_mqa(self, q: Any, kv_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        tokens = q[0].shape[0]
        self.calls.append(tokens)
        rows = fallback.cache_rows(
            self.topk_indices_buffer[:tokens],
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            BLOCK,
            kv_cache.stride(0) // kv_cache.shape[2],
            1 << 20,
            0,
        )
        cache = engine.cache_rows(kv_cache, BLOCK)
        cache = reference.unpack_fp8(cache.contiguous()) if cache.shape[1] == 656 else cache
        return reference.attend(torch.cat(q, 2), cache, rows, self.scale)[0].to(torch.bfloat16), None


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that the kernels run on, as far as the decisions can tell."""
    monkeypatch.setattr(engine, "capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "why_not", lambda capability: "")
    monkeypatch.setattr(engine, "self_check", lambda heads, fp8: "")
    monkeypatch.setattr(plan, "WAVE", 1)  # small batches in whole groups, as the full rounds of large ones


def batch(
    decodes: list[int], prefills: list[int], fp8: bool = False, gap: int = 0
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, Any, torch.Tensor]:
    """``q, kv_cache, metadata, topk`` of a batch with these query lengths; ``gap`` rows between blocks."""
    g = torch.Generator().manual_seed(len(decodes) * 100 + len(prefills))
    lengths = decodes + prefills
    tokens, requests = sum(lengths), len(lengths)
    table = torch.randperm(4 * requests, generator=g).reshape(requests, 4).to(torch.int32)
    kv = torch.randn(4 * requests, BLOCK + gap, 576, generator=g).to(torch.bfloat16)
    if fp8:
        kv = reference.pack_fp8(kv.flatten(0, 1)).reshape(4 * requests, BLOCK + gap, 656)
    # Heads-major storage, as line 0.28.0's product leaves it.
    nope = torch.randn(HEADS, tokens, 512, generator=g).to(torch.bfloat16).transpose(0, 1)
    rope = torch.randn(tokens, HEADS, 192, generator=g).to(torch.bfloat16)[..., 128:]
    topk = torch.full((tokens + 5, K), -1, dtype=torch.int32)
    for t in range(tokens):
        n = 1 + t % K
        topk[t, :n] = torch.randperm(4 * BLOCK, generator=g)[:n].int()
    first = sum(decodes)
    metadata = SimpleNamespace(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        num_decode_tokens=first,
        num_actual_tokens=tokens,
        max_seq_len=4 * BLOCK,
        block_size=BLOCK,
        block_table=table,
        req_id_per_token=torch.repeat_interleave(torch.arange(requests), torch.tensor(lengths)).int(),
        prefill=SimpleNamespace(query_lens_cpu=torch.tensor(prefills)) if prefills else None,
    )
    return (nope, rope), kv[:, :BLOCK], metadata, topk


@pytest.mark.parametrize(
    ("decodes", "prefills", "fp8", "gap"),
    [([], [9], False, 0), ([], [5, 1, 8], True, 0), ([1, 2], [6, 3], False, 32), ([4], [4], True, 7)],
)
def test_prefills_are_grouped_and_decodes_are_upstreams(
    decodes: list[int], prefills: list[int], fp8: bool, gap: int
) -> None:
    q, kv, metadata, topk = batch(decodes, prefills, fp8, gap)
    impl = FlashAttnMLASparseImpl(topk, kv_cache_dtype="fp8_ds_mla" if fp8 else "auto")
    wanted, _ = impl.forward_mqa(q, kv, metadata, None)
    impl.calls.clear()
    found, lse = engine.grouped(impl).forward_mqa(q, kv, metadata, None)
    assert lse is None and found.is_contiguous()
    assert impl.calls == ([sum(decodes)] if decodes else [])
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
    assert features.status(feature.FEATURE).state is not State.DECLINED
    rows = [(r["outcome"], r["count"]) for r in counters.snapshot("litedsa")]
    assert rows == [("active", 1), ("grouped", 1)]


def test_groups_follow_the_requests() -> None:
    _, kv, metadata, _ = batch([1, 1, 1], [6, 1, 4])
    planned = engine.plan_batch(metadata, HEADS, kv.device)
    assert planned is not None and (planned.first, planned.tokens, planned.span) == (3, 14, 256)
    assert planned.starts.tolist() == [3, 7, 9, 10, 14]
    assert engine.plan_batch(metadata, HEADS, kv.device) is planned  # once per batch
    other = engine.plan_batch(metadata, 32, kv.device)
    assert other is not None and other.starts.tolist() == [3, 5, 7, 9, 10, 12, 14]


def test_a_batch_that_fills_no_round_has_smaller_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WAVE", 132)
    _, kv, metadata, _ = batch([1], [6, 2])
    planned = engine.plan_batch(metadata, HEADS, kv.device)
    assert planned is not None and planned.starts.tolist() == list(range(1, 10))


def test_a_batch_of_decodes_is_not_planned_or_counted() -> None:
    q, kv, metadata, topk = batch([1, 3], [])
    impl = FlashAttnMLASparseImpl(topk)
    engine.grouped(impl).forward_mqa(q, kv, metadata, None)
    assert impl.calls == [4] and counters.snapshot("litedsa") == []


def test_prefills_that_take_dense_attention_leave_only_decodes() -> None:
    q, kv, metadata, topk = batch([1, 3], [5])
    impl = FlashAttnMLASparseImpl(topk)
    engine.grouped(impl).forward_mqa((q[0][:4], q[1][:4]), kv, metadata, None)
    assert impl.calls == [4] and counters.snapshot("litedsa") == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefill": None}, "not known on the host"),
        ({"max_seq_len": (1 << 20) + 1}, "positions"),
        ({"prefill": SimpleNamespace(query_lens_cpu=torch.tensor([4]))}, "no request"),
    ],
)
def test_batches_that_cannot_be_planned_are_upstreams(change: dict[str, Any], says: str) -> None:
    q, kv, metadata, topk = batch([], [5])
    metadata.__dict__.update(change)
    impl = FlashAttnMLASparseImpl(topk)
    engine.grouped(impl).forward_mqa(q, kv, metadata, None)
    assert impl.calls == [5]
    (row,) = counters.snapshot("litedsa")
    assert row["outcome"] == "upstream" and says in str(row["reason"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": 64}, "64 query heads"),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"pcp_world_size": 2}, "context parallelism"),
        ({"kv_cache_dtype": "float16"}, "float16"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "nvfp4"),
        ({"qk_rope_head_dim": 0}, "512 and 512"),
        ({"topk_indices_buffer": torch.zeros(3, 4096, dtype=torch.int32)}, "4096"),
        ({"topk_indices_buffer": None}, "cannot judge"),
    ],
)
def test_layers_that_are_declined_keep_upstreams_object(change: dict[str, Any], says: str) -> None:
    impl = FlashAttnMLASparseImpl(torch.zeros(3, K, dtype=torch.int32))
    for name, value in change.items():
        setattr(impl, name, value)
    assert engine.grouped(impl) is impl and engine.grouped(impl) is impl
    status = features._reported["litedsa"]
    assert status.state is State.DECLINED and says in status.reason
    assert [row["count"] for row in counters.snapshot("litedsa")] == [1]  # decided once


def test_other_backends_are_declined() -> None:
    impl = SimpleNamespace()
    assert engine.grouped(impl) is impl
    assert "attention backend SimpleNamespace" in features._reported["litedsa"].reason


def test_a_failed_self_check_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "self_check", lambda heads, fp8: "the self-check failed: unions")
    impl = FlashAttnMLASparseImpl(torch.zeros(3, K, dtype=torch.int32))
    assert engine.grouped(impl) is impl


@pytest.mark.parametrize("what", ["float16 query", "one tensor", "wide cache", "split cache"])
def test_tensors_that_do_not_fit_are_upstreams(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, metadata, topk = batch([], [5])
    impl = FlashAttnMLASparseImpl(topk)
    seen: list[Any] = []
    monkeypatch.setattr(impl, "forward_mqa", lambda *arguments: (seen.append(arguments), (None, None))[1])
    given: Any = q
    if what == "float16 query":
        given = (q[0].half(), q[1].half())
    elif what == "one tensor":
        given = torch.cat(q, 2)
    elif what == "wide cache":
        kv = torch.zeros(4, BLOCK, 640, dtype=torch.bfloat16)
    else:
        kv = torch.zeros(4, 576, BLOCK, dtype=torch.bfloat16).transpose(1, 2)
    engine.grouped(impl).forward_mqa(given, kv, metadata, None)
    assert seen == [(given, kv, metadata, None)]
    assert features._reported["litedsa"].state is State.DECLINED


def test_a_kernel_that_refuses_is_upstreams_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise kernels.KernelError("dsa_litedsa_union failed")

    monkeypatch.setattr(kernel, "litedsa", refuse)
    q, kv, metadata, topk = batch([2], [5])
    impl = FlashAttnMLASparseImpl(topk)
    wanted, _ = impl.forward_mqa(q, kv, metadata, None)
    impl.calls.clear()
    front = engine.grouped(impl)
    for _ in range(2):
        assert torch.equal(front.forward_mqa(q, kv, metadata, None)[0], wanted)
    assert impl.calls == [7, 7]
    assert "dsa_litedsa_union failed" in features._reported["litedsa"].reason


def test_layers_with_large_unions_are_upstreams_until_they_are_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch is judged by the unions of two batches before; then upstream runs for a while."""
    monkeypatch.setattr(plan, "BREAK_EVEN", {HEADS: 0.6})
    monkeypatch.setattr(overlap, "PAUSE", 3)
    q, kv, metadata, topk = batch([], [8])
    topk[:, :] = torch.arange(K).repeat(13, 1)
    small = topk.clone()
    small[:, 4:] = -1
    impl = FlashAttnMLASparseImpl(small)
    front = engine.grouped(impl)

    def upstream_runs() -> int:
        impl.calls.clear()
        front.forward_mqa(q, kv, metadata, None)
        return len(impl.calls)

    assert [upstream_runs() for _ in range(6)] == [0] * 6
    impl.topk_indices_buffer = topk
    assert [upstream_runs() for _ in range(7)] == [0, 0, 1, 1, 1, 0, 0]  # seen one later, pause, again twice
    impl.topk_indices_buffer = small
    assert [upstream_runs() for _ in range(9)] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    rows = {(r["outcome"], r["reason"]): r["count"] for r in counters.snapshot("litedsa")}
    assert rows["layer_upstream", "unions above 0.6 times the top-k"] == 6


def test_sizes_that_have_not_arrived_are_not_waited_for() -> None:
    meter = overlap.Meter(HEADS, 10)
    meter.limit = 1.5
    late = SimpleNamespace(query=lambda: False)
    for entries in (100, 20, 20):
        meter._pending.append(overlap.Measured(torch.tensor(entries), 1, late))  # type: ignore[arg-type]
    assert meter.too_large() == ""
    late.query = lambda: True
    assert "unions above 1.5" in meter.too_large()  # of the second, 20 entries for one group with K 10
    assert meter.ratio == 2.0


def test_without_a_measured_limit_nothing_is_counted_on_the_device() -> None:
    meter = overlap.Meter(7, 10)
    assert meter.limit is None and meter.buffer(3, torch.device("cpu")) is None
    meter.take(None)
    assert meter.too_large() == ""


def test_the_self_check_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen: list[tuple[int, bool]] = []

    def check(device: str, heads: int, k: int, fp8: bool) -> str:
        seen.append((heads, fp8))
        return "unions" if fp8 else ""

    monkeypatch.setattr(selfcheck, "check", check)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(engine, "_checked", {})
    for _ in range(2):
        assert engine.self_check(8, False) == ""
        assert engine.self_check(8, True) == "the self-check failed: unions"
    assert seen == [(8, False), (8, True)]


def test_the_state_follows_the_switch_and_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert feature.hooked()
    assert str(features.status(feature.FEATURE)) == "off (VLLM_LITEDSA=0)"
    monkeypatch.setenv("VLLM_LITEDSA", "1")
    assert str(features.status(feature.FEATURE)) == "active (prefills with 8, 16 or 32 heads on a rank)"
    monkeypatch.setattr(engine, "capability", lambda: (10, 0))
    status = features.status(feature.FEATURE)
    assert status.state is State.DECLINED and "9.0" in status.reason


def test_without_a_hook_it_is_not_claimed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not feature.hooked(tmp_path)
    monkeypatch.setattr(feature, "hooked", lambda: False)
    assert str(feature.probe(None)) == (
        "unavailable (operator only: the patches of this build do not call it)"
    )


def test_the_sizes_are_those_of_the_models() -> None:
    """Heads of a rank: DeepSeek-V3.2 has 128, GLM-5.x 64."""
    assert {128 // 8, 64 // 8, 64 // 2} <= set(plan.HEADS)


def sources(*names: str) -> list[ast.Module]:
    root = Path(engine.__file__).parents[2]
    return [ast.parse((root / name).read_text(encoding="utf-8")) for name in names]


def test_the_names_are_upstreams() -> None:
    """Backend classes, fields of their metadata, and attributes of an implementation that `engine` reads."""
    backends = "v1/attention/backends/mla"
    files = sources(f"{backends}/flashattn_mla_sparse.py", f"{backends}/flashmla_sparse.py")
    common = sources("model_executor/layers/attention/sparse_mla_attention.py")
    both = [node for module in (*files, *common) for node in ast.walk(module)]
    classes = {node.name for node in both if isinstance(node, ast.ClassDef)}
    assert set(engine.BACKENDS) <= classes
    fields = {n.target.id for n in both if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    used = {"block_table", "req_id_per_token", "block_size", "num_decodes", "num_prefills", "prefill"}
    assert used | {"num_decode_tokens"} <= fields
    words = {node.arg for node in both if isinstance(node, ast.keyword)}
    assert {"num_actual_tokens", "max_seq_len", "query_lens_cpu"} <= words
    read = {node.attr for node in both if isinstance(node, ast.Attribute)}
    assert {"topk_indices_buffer", "num_heads", "kv_lora_rank", "dcp_world_size"} <= read
