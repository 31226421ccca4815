# SPDX-License-Identifier: Apache-2.0
"""Overlap on the compiled line without a GPU: order, lifetimes, gates, graphs; streams are doubles."""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.dsa import counters, features
from vllm.dsa.features import State
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers import mla

if not hasattr(mla.MultiHeadLatentAttentionWrapper, "dsa_overlap"):
    pytest.skip("this line has no hook in layers/mla.py", allow_module_level=True)

from vllm.dsa.overlap import gates as shared_gates
from vllm.dsa.overlap.compiled import attach as attaching
from vllm.dsa.overlap.compiled import gates, ops, runner
from vllm.dsa.overlap.compiled.layer import CHOSEN_OFF, LayerOverlap
from vllm.dsa.overlap.mode import Mode
from vllm.dsa.overlap.streams import Lane
from vllm.model_executor.layers import sparse_attn_indexer as indexer_module
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.models import deepseek_v2

from . import overlap_compiled_cases as cases
from .overlap_compiled_streams import Detector, Device

TOKENS = 8
V = torch.ops.vllm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", cases.quantise)
    monkeypatch.setattr(indexer_module, "dsa_runner", None)
    monkeypatch.delenv("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", raising=False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    found.install(monkeypatch.setattr)
    return found


def attach_all(model: cases.Model, mode: str, *, choose=None) -> dict[str, object]:
    """What the constructors do in an engine; returns the layers by name."""
    layers = dict(model.registered())
    for layer in model.layers if mode != "off" else ():
        whole = mode == "full"
        overlap = LayerOverlap(
            f"{layer.prefix}.dsa_overlap",
            layer.indexer.wk_weights_proj,
            "side",
            choose or (lambda _tokens: Mode(mode)),
            whole=whole,
            pieces=not whole,
        )
        layer.dsa_overlap = layers[overlap.name] = overlap
        if whole:
            runner.install(layer.indexer.k_cache, layer.mla_attn, overlap)
    return layers


def indexer_op(*args, **kwargs):
    if indexer_module.dsa_runner is None:
        return cases.indexer_kernel(*args, **kwargs)
    return indexer_module.dsa_runner(cases.indexer_kernel, args, kwargs)


BODIES = {
    V.sparse_attn_indexer.default: indexer_op,
    V.dsa_wk_fork.default: ops.dsa_wk_fork,
    V.dsa_wk_join.default: ops.dsa_wk_join,
    V.unified_mla_kv_cache_update.default: mla_attention.unified_mla_kv_cache_update,
    V.unified_mla_attention_with_output.default: mla_attention.unified_mla_attention_with_output,
}


def run(model: cases.Model, layers: dict, device: Device, mode=CUDAGraphMode.NONE, **context):
    """One forward pass; returns its output and the races."""
    detector = Detector(device, BODIES)
    with override_forward_context(cases.context(layers, TOKENS, mode, **context)), detector:
        positions, x = cases.batch(TOKENS)
        out = model(positions, x)
    return out, detector.races


def outcomes() -> dict[tuple[str, str], int]:
    return {(row["outcome"], row["reason"]): row["count"] for row in counters.snapshot("overlap")}


# Order, lifetimes, results.


@pytest.mark.parametrize("graph", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
@pytest.mark.parametrize("mode", ["wk", "full"])
def test_results_are_the_same_bits_and_nothing_races(device: Device, mode: str, graph: CUDAGraphMode):
    model = cases.Model()
    expected, races = run(model, attach_all(model, "off"), device)
    assert not races and "side" not in device.clocks

    model = cases.Model()
    layers = attach_all(model, mode)
    for _ in range(2):  # the second pass reuses events and memory
        out, races = run(model, layers, device, graph)
        assert torch.equal(out, expected) and not races
    assert outcomes()[("wk forked", "")] == 6
    assert outcomes().get(("indexer forked", ""), 0) == (6 if mode == "full" else 0)


def test_the_main_branch_is_enqueued_first(device: Device):
    model = cases.Model(layers=1)
    run(model, attach_all(model, "full"), device)
    log = device.log
    forks = [i for i, entry in enumerate(log) if entry == ("main", "record")]
    starts = [i for i, entry in enumerate(log) if entry == ("side", "wait")]
    ends = [i for i, entry in enumerate(log) if entry == ("side", "record")]
    joins = [i for i, entry in enumerate(log) if entry == ("main", "wait")]
    assert len(forks) == len(starts) == len(ends) == len(joins) == 2
    for fork, start, end, join in zip(forks, starts, ends, joins, strict=True):
        assert fork < start < end and join == end + 1
        assert {stream for stream, _ in log[start : end + 1]} == {"side"}
        assert {stream for stream, _ in log[fork:start]} == {"main"}

    def between(fork: int, start: int) -> list[str]:
        return [what for stream, what in log[fork:start] if stream == "main"]

    # F1: the QKV-A product; F2: q_b, both rotations, the cache write and the W_UK product.
    assert between(forks[0], starts[0]).count("aten.mm.default") == 1
    second = between(forks[1], starts[1])
    assert second.count("aten.mm.default") == 1 and second.count("aten.bmm.out") == 1
    assert "aten.index_put_.default" in second
    side = [what for stream, what in log if stream == "side"]
    assert side.count("aten.mm.out") == 1 and side.count("aten.topk.default") == 1


def _no_start(self):
    self.forked = True
    self._start.record = lambda: None
    self._start.wait = lambda: None


def _no_wait(self):
    self.pending = False


@pytest.mark.parametrize("name, mutation", [("fork", _no_start), ("join", _no_wait)])
@pytest.mark.parametrize("mode", ["wk", "full"])
def test_the_detector_sees_a_broken_schedule(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str, mutation, mode: str
):
    monkeypatch.setattr(Lane, name, mutation)
    model = cases.Model(layers=1)
    _, races = run(model, attach_all(model, mode), device)
    assert any(" against " in race for race in races)


def test_the_detector_sees_an_output_allocated_at_the_join(device: Device, monkeypatch: pytest.MonkeyPatch):
    finish = LayerOverlap.finish_wk

    def late(self, hidden_states):
        (out, forked), self._wk = self._wk, None
        self._wk = (torch.empty_like(out), forked)
        return finish(self, hidden_states)

    monkeypatch.setattr(LayerOverlap, "finish_wk", late)
    model = cases.Model(layers=1)
    _, races = run(model, attach_all(model, "wk"), device)
    assert any("may still use otherwise" in race for race in races)


def test_the_detector_sees_arguments_that_are_dropped_before_the_join(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LayerOverlap, "join_indexer", lambda self: None)
    started = LayerOverlap.run_indexer

    def at_once(self, op, args, kwargs, mla_name):
        out = started(self, op, args, kwargs, mla_name)
        deferred, self._deferred = self._deferred, None
        self._indexer_lane.side(deferred.op, *deferred.args)  # nothing holds the arguments after this
        self._indexer_lane.pending = False
        return out

    monkeypatch.setattr(LayerOverlap, "run_indexer", at_once)
    model = cases.Model(layers=1)
    _, races = run(model, attach_all(model, "full"), device)
    assert any("freed while" in race for race in races)


def test_the_side_stream_reads_what_the_fork_got(device: Device):
    """x is an argument of the join, so it lives until then whatever the caller does with it."""
    for op in (V.dsa_wk_fork.default, V.dsa_wk_join.default):
        assert op._schema.arguments[0].name == "hidden_states"
        assert torch.Tag.needs_fixed_stride_order in op.tags
    assert [a.name for a in V.dsa_wk_fork.default._schema.arguments if a.alias_info] == ["hidden_states"]
    assert not V.dsa_wk_fork.default._schema.returns
    assert not any(a.alias_info for a in V.dsa_wk_join.default._schema.arguments)
    assert not any(r.alias_info for r in V.dsa_wk_join.default._schema.returns)


# Symmetry.


def test_a_join_without_its_fork_is_an_error(device: Device):
    model = cases.Model(layers=1)
    layers = attach_all(model, "wk")
    with override_forward_context(cases.context(layers, TOKENS)):
        overlap = model.layers[0].dsa_overlap
        x = torch.randn(TOKENS, cases.HIDDEN)
        overlap.fork(x)
        overlap.join(x, x)
        with pytest.raises(RuntimeError, match=r"model\.layers\.0.*without its fork"):
            overlap.join(x, x)


def test_what_a_failed_pass_left_is_forgotten(device: Device):
    model = cases.Model(layers=2)
    layers = attach_all(model, "full")
    expected, _ = run(model, layers, device)
    last = model.layers[1]
    working = last.mla_attn.impl.do_kv_cache_update

    def fails(*_args):
        raise RuntimeError("out of memory")

    last.mla_attn.impl.do_kv_cache_update = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, layers, device)
    assert last.dsa_overlap._deferred is not None
    stale = last.dsa_overlap._deferred
    last.mla_attn.impl.do_kv_cache_update = working

    # A pass that does not fork: neither its indexer nor its join may run what the failed one left.
    with override_forward_context(cases.context(layers, TOKENS)):
        last.dsa_overlap.join_indexer()
    assert last.dsa_overlap._deferred is None
    last.dsa_overlap._deferred = stale
    out, races = run(model, layers, device, CUDAGraphMode.PIECEWISE)
    assert torch.equal(out, expected) and not races
    out, races = run(model, layers, device)
    assert torch.equal(out, expected) and not races


# Gates.


@pytest.mark.parametrize(
    "context, piecewise, otherwise",
    [
        ({}, None, None),
        ({"metadata": False}, None, shared_gates.PROFILE_RUN),
        ({"ubatch_slices": [object()]}, shared_gates.MICROBATCHES, shared_gates.MICROBATCHES),
    ],
)
def test_gates_of_the_context(context: dict, piecewise: str | None, otherwise: str | None):
    for mode, expected in (
        (CUDAGraphMode.PIECEWISE, piecewise),
        (CUDAGraphMode.NONE, otherwise),
        (CUDAGraphMode.FULL, otherwise),
    ):
        made = cases.context({}, TOKENS, mode, **context)
        assert gates.why_inline(made, TOKENS, pieces=True) == expected, mode
        if mode is CUDAGraphMode.PIECEWISE:
            inline = gates.why_inline(made, TOKENS, pieces=False)
            assert inline in (shared_gates.PIECEWISE, otherwise)


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_gates_of_the_token_count(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode):
    context = cases.context({}, TOKENS, mode)
    said = {n: gates.why_inline(context, n, pieces=True) for n in (0, 1, 1024, 1025)}
    assert said == {0: shared_gates.NO_TOKENS, 1: None, 1024: None, 1025: shared_gates.TOO_MANY_TOKENS}
    monkeypatch.setenv("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "16")
    assert gates.why_inline(context, 17, pieces=True) == shared_gates.TOO_MANY_TOKENS


def test_microbatches_by_their_metadata():
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        context = cases.context({}, TOKENS, mode)
        context.attn_metadata = [{}, {}]
        assert gates.why_inline(context, TOKENS, pieces=True) == shared_gates.MICROBATCHES


def test_breakable_capture_never_forks(monkeypatch: pytest.MonkeyPatch):
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    monkeypatch.setattr(BreakableCUDAGraphCapture, "is_active", classmethod(lambda _cls: True))
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        context = cases.context({}, TOKENS, mode)
        assert gates.why_inline(context, TOKENS, pieces=True) == shared_gates.BREAKABLE


@pytest.mark.parametrize(
    "mode, graph, wk, indexer",
    [
        ("wk", CUDAGraphMode.PIECEWISE, True, None),
        ("full", CUDAGraphMode.PIECEWISE, False, False),
        ("wk", CUDAGraphMode.FULL, True, None),
        ("full", CUDAGraphMode.FULL, True, True),
    ],
)
def test_what_forks_in_which_graph_mode(device: Device, mode: str, graph, wk: bool, indexer: bool | None):
    model = cases.Model(layers=1)
    run(model, attach_all(model, mode), device, graph)
    forked = outcomes()
    assert (("wk forked", "") in forked) is wk
    assert (("wk inline", shared_gates.PIECEWISE) in forked) is not wk
    assert (("indexer forked", "") in forked) is bool(indexer)
    assert (("indexer inline", shared_gates.PIECEWISE) in forked) is (indexer is False)


def test_the_profile_run_is_inline(device: Device, monkeypatch: pytest.MonkeyPatch):
    model = cases.Model(layers=1)
    layers = attach_all(model, "full")
    _, races = run(model, layers, device, metadata=False)
    assert not races and "side" not in device.clocks
    assert outcomes() == {
        ("wk inline", shared_gates.PROFILE_RUN): 1,
        ("indexer inline", shared_gates.PROFILE_RUN): 1,
    }


def test_no_fork_where_attention_would_not_join(device: Device):
    model = cases.Model(layers=1)
    layers = attach_all(model, "full")
    (name,) = [name for name in layers if name.endswith(".attn")]
    for metadata in ({}, {name: SimpleNamespace(num_actual_tokens=0)}):
        context = cases.context(layers, TOKENS)
        context.attn_metadata = metadata
        assert gates.why_no_join(context, name) == gates.NO_JOIN
    assert gates.why_no_join(cases.context(layers, TOKENS), name) is None


def under_dcp(model: cases.Model, device: Device) -> None:
    """Let every attention layer gather queries over two ranks, as with decode context parallelism."""

    def gather(q: torch.Tensor) -> torch.Tensor:
        device.enqueue("collective")
        return q

    def forward_mqa(self, q, cache, metadata, layer):
        out, _ = cases.Impl.forward_mqa(
            self, q.split([cases.KV_LORA, cases.ROPE], dim=-1), cache, metadata, layer
        )
        return out, out[..., 0]

    manager = SimpleNamespace(query_gather=gather, combine=lambda out, _lse, **_kwargs: out)
    for layer in model.layers:
        layer.mla_attn.dcp_manager, layer.mla_attn.impl.dcp_world_size = manager, 2
        layer.mla_attn.impl.forward_mqa = forward_mqa.__get__(layer.mla_attn.impl)


def test_the_join_comes_before_a_collective(device: Device):
    """Two branches with collectives could issue them in another order on each rank."""
    plain = cases.Model(layers=2)
    under_dcp(plain, device)
    decode = {"decode": None, "seq_lens": torch.ones(1), "query_start_loc": torch.zeros(2)}
    expected, _ = run(plain, attach_all(plain, "off"), device, metadata_fields=decode)
    device.log.clear()
    model = cases.Model(layers=2)
    under_dcp(model, device)
    out, races = run(model, attach_all(model, "full"), device, metadata_fields=decode)
    assert torch.equal(out, expected) and not races
    kinds = ("record", "wait", "collective")
    seen = [entry for entry in device.log if entry[1] in kinds]
    layer = [
        *(("main", "record"), ("side", "wait"), ("side", "record"), ("main", "wait")),  # F1
        *(("main", "record"), ("side", "wait"), ("side", "record"), ("main", "wait")),  # F2
        ("main", "collective"),
    ]
    assert seen == 2 * layer


def test_auto_chooses_by_token_count(device: Device):
    model = cases.Model(layers=1)
    modes = {TOKENS: Mode.WK}
    run(model, attach_all(model, "full", choose=lambda tokens: modes[tokens]), device)
    assert outcomes() == {("wk forked", ""): 1, ("indexer inline", CHOSEN_OFF): 1}
    modes[TOKENS] = Mode.OFF
    run(model, attach_all(model, "full", choose=lambda tokens: modes[tokens]), device)
    assert outcomes()[("wk inline", CHOSEN_OFF)] == 1


def test_layers_that_share_top_k_do_not_fork(device: Device):
    model = cases.Model(layers=2)
    layers = attach_all(model, "full")
    model.layers[1].skip_topk = True
    _, races = run(model, layers, device)
    assert not races and outcomes() == {("wk forked", ""): 1, ("indexer forked", ""): 1}
    plain = cases.Model(layers=1, indexer=False)
    plain.layers[0].indexer = None
    counters.reset()
    plain.layers[0].mla_attn.impl.topk_indices_buffer.zero_()
    run(plain, plain.registered(), device)
    assert outcomes() == {}


def test_calls_of_other_layers_run_as_upstreams(device: Device):
    model = cases.Model(layers=2)
    layers = attach_all(model, "full")
    del model.layers[1].indexer.k_cache.dsa_overlap
    _, races = run(model, layers, device)
    assert not races and outcomes()[("indexer forked", "")] == 1
    # A forward context without layers, as upstream's own tests make one.
    called = []
    with override_forward_context(SimpleNamespace()):
        runner.run(lambda *args, **kwargs: called.append((args, kwargs)), (1,), {"k_cache_prefix": "x"})
    assert called == [((1,), {"k_cache_prefix": "x"})]


# Attaching.


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, device: Device):
    """An engine's configuration, and a layer that the feature applies to."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    compilation = SimpleNamespace(
        mode=CompilationMode.VLLM_COMPILE,
        use_inductor_graph_partition=False,
        splitting_ops=cases.splitting_ops(),
        static_forward_context={},
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, use_ubatching=False, enable_dbo=False
        ),
        lora_config=None,
        additional_config={},
    )
    monkeypatch.setattr(attaching, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _self: True)
    monkeypatch.setattr(attaching, "card_here", lambda: "h200")
    monkeypatch.setattr("vllm.utils.torch_utils.aux_stream", lambda: "side")
    layer = cases.Model(layers=1).layers[0]
    layer.indexer.wk_weights_proj.quant_method = UnquantizedLinearMethod()
    return SimpleNamespace(config=config, layer=layer, compilation=compilation)


@pytest.mark.parametrize("mode", ["wk", "full"])
def test_attach(engine, monkeypatch: pytest.MonkeyPatch, mode: str):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
    keys = set(engine.layer.state_dict())
    overlap = attaching.attach(engine.layer)
    engine.layer.dsa_overlap = overlap
    assert overlap.indexer_first is (mode == "full")
    assert engine.compilation.static_forward_context == {"model.layers.0.self_attn.dsa_overlap": overlap}
    assert set(engine.layer.state_dict()) == keys
    assert not list(dict(engine.layer.named_modules()).keys() & {"dsa_overlap"})
    assert (indexer_module.dsa_runner is runner.run) is (mode == "full")
    assert (engine.layer.mla_attn.dsa_overlap is overlap) is (mode == "full")
    assert engine.config.additional_config == {"vllm_dsa_overlap": [mode]}
    found = {known.name: features.status(known) for known in features.KNOWN}["overlap"]
    assert found.state is State.ACTIVE and mode in found.reason
    with pytest.raises(ValueError, match=r"Duplicate layer name: model\.layers\.0\.self_attn\.dsa_overlap"):
        attaching.attach(engine.layer)


@pytest.mark.parametrize(
    "switch",
    [
        {"VLLM_DSA": "0"},
        {"VLLM_INDEXER_OVERLAP": "off"},
        {"VLLM_INDEXER_OVERLAP": "full", "VLLM_DISABLE_INDEXER_STREAM": "1"},
        {"VLLM_INDEXER_OVERLAP": "auto"},
    ],
)
def test_off_attaches_nothing(engine, monkeypatch: pytest.MonkeyPatch, switch: dict[str, str]):
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    assert attaching.attach(engine.layer) is None
    assert not engine.compilation.static_forward_context and indexer_module.dsa_runner is None
    assert engine.config.additional_config == {}


def test_what_is_traced_is_part_of_the_key_of_artifacts(engine, monkeypatch: pytest.MonkeyPatch):
    """``auto`` and a mode that declines trace other graphs with the same switch, so on another card."""
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    config = VllmConfig()

    def key(*splitting_ops: str) -> str:
        engine.compilation.static_forward_context.clear()
        engine.compilation.splitting_ops = splitting_ops
        attaching.attach(engine.layer)
        config.additional_config = engine.config.additional_config
        return config.compute_hash()

    given = engine.config.additional_config
    keys = [config.compute_hash(), key()]  # no more than wk
    engine.config.additional_config = given
    keys.append(key(*cases.splitting_ops()))
    assert len(set(keys)) == 3
    assert key(*cases.splitting_ops()) == keys[-1]  # another layer
    assert given == {}


def _hashed_otherwise(engine):
    engine.config.additional_config = object()


def _pcp(engine):
    engine.config.parallel_config.prefill_context_parallel_size = 2


def _dbo(engine):
    engine.config.parallel_config.use_ubatching = True


def _lora(engine):
    engine.config.lora_config = object()


def _quantised(engine):
    engine.layer.indexer.wk_weights_proj.quant_method = object()


def _other_indexer(engine):
    engine.layer.indexer = torch.nn.Identity()


def _other_layer(engine):
    engine.layer.__class__ = type("Other", (type(engine.layer),), {})


def _no_lora_rank(engine):
    engine.layer.q_lora_rank = None


@pytest.mark.parametrize(
    "change, said",
    [
        (_pcp, "prefill context parallelism"),
        (_dbo, "dual batch overlap"),
        (_lora, "LoRA"),
        (_quantised, "quantised wk_weights_proj"),
        (_other_indexer, "indexer of type Identity"),
        (_other_layer, "attention layer of type Other"),
        (_no_lora_rank, "no fused QKV-A projection"),
        (_hashed_otherwise, "additional_config is no dictionary"),
    ],
)
def test_what_does_not_fit_declines_with_its_reason(
    engine, monkeypatch: pytest.MonkeyPatch, change, said: str
):
    change(engine)
    for mode, counted in (("auto", {}), ("full", {("declined", said): 1})):  # auto does so silently
        monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
        assert attaching.attach(engine.layer) is None
        assert outcomes() == counted
    assert not engine.compilation.static_forward_context


def test_batch_invariance_declines(engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "wk")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert attaching.attach(engine.layer) is None
    assert outcomes() == {("declined", "VLLM_BATCH_INVARIANT=1"): 1}


@pytest.mark.parametrize(
    "field, value, fits",
    [
        ("mode", CompilationMode.NONE, True),
        ("mode", CompilationMode.STOCK_TORCH_COMPILE, False),
        ("use_inductor_graph_partition", True, False),
        ("splitting_ops", [], False),
        ("splitting_ops", None, False),
        ("splitting_ops", ["vllm::sparse_attn_indexer"], False),
    ],
)
def test_whole_needs_ops_that_split_the_graph(
    engine, monkeypatch: pytest.MonkeyPatch, field: str, value, fits: bool
):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    setattr(engine.compilation, field, value)
    overlap = attaching.attach(engine.layer)
    assert overlap is not None and overlap.indexer_first is fits
    assert (indexer_module.dsa_runner is not None) is fits
    assert bool([row for row in outcomes() if row[0] == "declined"]) is not fits


def measure(monkeypatch: pytest.MonkeyPatch, points: tuple) -> None:
    """Let ``auto`` know the test's model on the test's card."""
    from vllm.dsa.overlap import auto, measured

    entry = auto.Entry("0.28.0", "h200", cases.HEADS, cases.INDEX_HEADS, "FULL", points)
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset({"0.28.0"}))
    monkeypatch.setattr(measured, "MEASURED", (entry,))
    monkeypatch.setattr(attaching.provenance, "read", lambda: SimpleNamespace(line="0.28.0"))


@pytest.mark.parametrize(
    "points, whole",
    [(((1, "wk"), (64, "off")), False), (((1, "full"), (64, "wk")), True)],
)
def test_auto_builds_what_the_measurement_needs(
    engine, monkeypatch: pytest.MonkeyPatch, points: tuple, whole: bool
):
    measure(monkeypatch, points)
    overlap = attaching.attach(engine.layer)
    assert overlap.indexer_first is whole and not overlap._pieces
    assert [overlap._choose(tokens) for tokens in (1, 64)] == [Mode(mode) for _, mode in points]
    engine.layer.num_heads += 1  # another shape is not measured
    engine.compilation.static_forward_context.clear()
    assert attaching.attach(engine.layer) is None


@pytest.mark.parametrize(
    ("sequences", "captured", "runs"),
    [
        (64, None, True),
        (65, None, False),
        (65, 128, False),
        (1024, 64, True),
        (1024, 512, False),
        (64, 512, True),
    ],
)
def test_auto_leaves_upstreams_graph_where_larger_batches_may_come(
    engine, monkeypatch: pytest.MonkeyPatch, sequences: int, captured: int | None, runs: bool
):
    """Their decode graphs would be of the same compiled code, in which they were not measured."""
    from vllm.dsa.overlap import auto, measured

    measure(monkeypatch, ((1, "full"), (64, "full"), (512, "off")))  # at 512 it was not faster
    further = auto.Entry(
        "0.28.0", "h200", cases.HEADS + 1, cases.INDEX_HEADS, "FULL", ((1, "full"), (512, "full"))
    )
    monkeypatch.setattr(measured, "MEASURED", (*measured.MEASURED, further))
    engine.config.scheduler_config = SimpleNamespace(max_num_seqs=sequences)
    engine.compilation.max_cudagraph_capture_size = captured
    assert (attaching.attach(engine.layer) is not None) is runs
    most = min(sequences, captured or sequences)
    reason = f"auto acts as off: measured up to 64 sequences, decode graphs hold up to {most}"
    assert auto.unmeasured(engine.config) == (None if runs else reason)


def test_auto_forks_no_larger_batch_than_its_decode_graphs_hold(engine, monkeypatch: pytest.MonkeyPatch):
    """A prefill of 65 to 256 tokens may run without a graph, where a fork costs the host's time."""
    from vllm.dsa.overlap import measured

    measure(monkeypatch, ((1, "full"), (64, "full"), (256, "full")))
    other = dataclasses.replace(
        measured.MEASURED[0], heads=cases.HEADS + 1, points=((1, "full"), (64, "full"))
    )
    monkeypatch.setattr(measured, "MEASURED", (*measured.MEASURED, other))
    overlap = attaching.attach(engine.layer)
    chosen = [overlap._choose(tokens) for tokens in (1, 64, 65, 256)]
    assert chosen == [Mode.FULL, Mode.FULL, Mode.OFF, Mode.OFF]


def test_auto_leaves_models_that_are_not_compiled(engine, monkeypatch: pytest.MonkeyPatch):
    """Full graphs of decodes can be captured without compilation too; nothing was measured there."""
    from vllm.dsa.overlap import auto

    measure(monkeypatch, ((1, "full"), (64, "full")))
    engine.compilation.mode = CompilationMode.NONE
    engine.compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert attaching.attach(engine.layer) is None
    assert auto.unmeasured(engine.config) == "auto acts as off: not measured without vLLM's compilation"


@pytest.mark.parametrize("case", ["split", "invariant", "unmeasured"])
def test_auto_says_where_it_cannot_do_what_was_measured(engine, monkeypatch: pytest.MonkeyPatch, case: str):
    """Not wk in place of full, which was not chosen; and nothing is said where nothing was measured."""
    measure(monkeypatch, ((1, "full"), (64, "full")))
    if case == "split":
        engine.compilation.splitting_ops = []
        reason = "indexer and attention do not split the graph"
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        reason = "VLLM_BATCH_INVARIANT=1"
    if case == "unmeasured":
        engine.layer.num_heads += 1
    assert attaching.attach(engine.layer) is None and engine.config.additional_config == {}
    declined = [row for row in outcomes() if row[0] == "declined"]
    assert [row[1] for row in declined] == ([] if case == "unmeasured" else [reason])


# Graphs.


@pytest.fixture(scope="module")
def graphs():
    """The graph of each mode: off, wk, full; three layers."""
    patch = pytest.MonkeyPatch()
    patch.setattr(deepseek_v2, "per_token_group_quant_fp8", cases.quantise)
    Device().install(patch.setattr)
    found = {}
    for mode in ("off", "wk", "full"):
        model = cases.Model(layers=3)
        attach_all(model, mode)
        found[mode] = cases.trace(model)
    patch.undo()
    indexer_module.dsa_runner = None
    return found


def script(name: str, *arguments: str, tree: Path = Path(cases.__file__).parents[2], **variables: str) -> str:
    """Run one of the scripts beside this file on a tree; returns what it printed."""
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, str(Path(cases.__file__).with_name(name)), *arguments]
    done = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def generated_code() -> list[str]:
    """What Inductor generates for an H200: of wk, and four times of native."""
    return script("overlap_native_inductor.py").split("CODE\n")[1:]


def test_off_is_upstreams_graph(graphs):
    pristine = os.environ.get("PRISTINE_TREE")
    if pristine is None:
        pytest.skip("needs the pristine tree beside the patched one (series overlay-test)")
    shown = script("overlap_compiled_graph.py", tree=Path(pristine))
    upstreams = shown.split("GRAPH\n", 1)[1].strip()
    assert "unified_mla_attention_with_output" in upstreams
    assert cases.text(graphs["off"]) == upstreams


def calls(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["wk", "full"])
def test_fork_and_join_enclose_the_qkv_a_projection(graphs, mode: str):
    nodes = list(graphs[mode].graph.nodes)
    forks = [i for i, node in enumerate(nodes) if "dsa_wk_fork" in str(node.target)]
    joins = [i for i, node in enumerate(nodes) if "dsa_wk_join" in str(node.target)]
    assert len(forks) == len(joins) == 3
    for fork, join in zip(forks, joins, strict=True):
        (product,) = [node for node in nodes[fork:join] if "linear" in str(node.target)]
        assert "fused_qkv_a_proj" in str(product.args[1])
        x = nodes[fork].args[0]
        assert product.args[0] is x and nodes[join].args[:2] == (x, product)
    assert not any("wk_weights_proj" in str(node.target) for node in nodes)
    off = calls(graphs["off"])
    assert len(calls(graphs[mode])) == len(off) + 3  # a fork and a join instead of a product


def test_full_calls_the_indexer_before_the_query_projection(graphs):
    def order(mode: str) -> list[str]:
        found = []
        for node in graphs[mode].graph.nodes:
            if "sparse_attn_indexer" in str(node.target):
                found.append("indexer")
            elif "linear" in str(node.target) and "q_b_proj" in str(node.args[1]):
                found.append("q_b")
            elif "unified_mla_attention" in str(node.target):
                found.append("attention")
        return found

    assert order("off") == order("wk") == ["q_b", "indexer", "attention"] * 3
    assert order("full") == ["indexer", "q_b", "attention"] * 3


def pieces(graph: torch.fx.GraphModule):
    from vllm.compilation.backends import split_graph

    copied = torch.fx.GraphModule(graph, torch.fx.Graph())
    copied.graph.graph_copy(graph.graph, mapping := {})
    copied.graph.output(torch.fx.map_arg(graph.graph.output_node().args[0], lambda node: mapping[node]))
    return split_graph(copied, cases.splitting_ops())


def kinds(items) -> set[str]:
    """The different compiled pieces: names of layers and values do not count, as in the compiler's cache."""
    found = set()
    for item in items:
        if not item.is_splitting_graph:
            found.add(_numbered(re.sub(r"layers_modules_\d+|norms_modules_\d+", "layer", item.graph.code)))
    return found


def _numbered(code: str) -> str:
    order: dict[str, str] = {}
    return re.sub(r"\b[a-z_0-9]+\b", lambda match: order.setdefault(match[0], f"n{len(order)}"), code)


def test_pieces_stay_as_many_and_as_alike(graphs):
    split = {mode: pieces(graph)[1] for mode, graph in graphs.items()}
    assert len(split["wk"]) == len(split["off"]) and len(kinds(split["wk"])) == len(kinds(split["off"]))
    # F2 puts the query projection into a piece of its own, alike in all layers.
    assert len(split["full"]) == len(split["off"]) + 6
    assert len(kinds(split["full"])) == len(kinds(split["off"])) + 1
    for items in split.values():
        for item in items:
            found = [name for name in calls(item.graph) if "dsa_wk" in name]
            assert found in ([], ["vllm.dsa_wk_fork", "vllm.dsa_wk_join"]), "a fork left its piece"
            assert not (found and item.is_splitting_graph)


@pytest.mark.parametrize("mode", ["wk", "full"])
def test_layer_names_are_inputs_and_not_constants(graphs, mode: str):
    for node in graphs[mode].graph.nodes:
        if "dsa_wk" in str(node.target):
            assert isinstance(node.args[-1], torch.fx.Node) and node.args[-1].op == "placeholder"


@pytest.mark.parametrize("mode", ["wk", "full"])
def test_the_split_graph_survives_pickling(graphs, mode: str):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from vllm.compilation.caching import VllmSerializableFunction

    split, _ = pieces(graphs[mode])
    for module in split.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            node.meta = {}
    data = VllmSerializableFunction.serialize_graph_module(split)
    assert isinstance(data, bytes)
    again = VllmSerializableFunction.deserialize_graph_module(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert cases.text(again) == cases.text(split)
    for name, module in split.named_children():
        assert cases.text(getattr(again, name)) == cases.text(module)


def test_inductor_keeps_the_order_and_copies_nothing():
    """The code for an H200, generated without one: norm, fork, product, join, in place and in this order."""
    code = generated_code()[0]
    steps = re.findall(
        r"triton_\w+\.run|extern_kernels\.\w+\(.*\)|torch\.ops\.vllm\.\w+\.default\(.*\)", code
    )
    x = re.fullmatch(r"torch\.ops\.vllm\.dsa_wk_fork\.default\((buf\d+), 192, arg\d+_1\)", steps[1])[1]
    qkv = re.fullmatch(rf"extern_kernels\.mm\({x}, arg\d+_1, out=(buf\d+)\)", steps[2])[1]
    join = rf"torch\.ops\.vllm\.dsa_wk_join\.default\({x}, {qkv}, 192, arg\d+_1\)"
    assert steps[0].startswith("triton_") and re.fullmatch(join, steps[3])
    assert not any("dsa_wk" in step or "mm(" in step for step in steps[4:])
    # x is written once, by the norm, and neither copied nor given up before the join.
    before = code[: code.index("dsa_wk_join.default(")]
    assert len(re.findall(rf"^ *{x} = ", code, re.M)) == 1 and f"del {x}\n" not in before
    assert "copy_(" not in code and "clone" not in code


@pytest.mark.timeout(1800)  # two processes that compile: a minute on an idle machine
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_compiled_model_is_saved_and_works_in_a_new_process(tmp_path: Path):
    """vLLM's own backend with Inductor: pieces, one artifact, reload; the reloaded graph forks as before."""
    found = []
    for _ in range(2):
        out = script("overlap_compiled_aot.py", "full", "native", VLLM_CACHE_ROOT=str(tmp_path))
        found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    for cold, warm in zip(*found, strict=True):
        assert (cold["num_aot_artifacts_saved"], cold["num_aot_artifacts_loaded"]) == (1, 0)
        assert (warm["num_aot_artifacts_loaded"], warm["num_inductor_compiles"]) == (1, 0)
        assert cold["close"] and len(cold["outputs"]) == 22 * cases.HIDDEN
        assert warm["outputs"] == pytest.approx(cold["outputs"], rel=1e-5, abs=1e-6)
        assert cold["forked"] == warm["forked"]
    # Two layers and five pieces; the query projections of both layers share one artifact.
    cold, native = found[0]
    assert cold["num_piecewise_capturable_graphs_seen"] == 5 and cold["num_compiled_artifacts_saved"] == 4
    assert cold["forked"] == {"wk forked": 8, "indexer forked": 8}
    # Upstream's pieces. Each of eight forks is waited for by the region, as it came from the compiler or from
    # the artifact, and by the indexer's op.
    for run in (native, found[1][1]):
        assert run["forked"] == {"native forked": 8} and run["waits"] == 16
    assert native["num_piecewise_capturable_graphs_seen"] == 3


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fake_join_has_the_shape_and_strides_of_the_real_one(device: Device, tokens: int, dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = cases.Model(layers=1).to(dtype)
    layers = attach_all(model, "wk")
    wide = torch.randn(tokens, 2 * cases.HIDDEN, dtype=dtype)
    for x in (wide[:, : cases.HIDDEN].contiguous(), wide[:, : cases.HIDDEN]):
        with override_forward_context(cases.context(layers, tokens)):
            overlap = model.layers[0].dsa_overlap
            overlap.fork(x)
            real = overlap.join(x, x)
            assert torch.equal(real, torch.nn.functional.linear(x, overlap._linear.weight))
        with FakeTensorMode() as mode:
            fake_x = mode.from_tensor(x)
            assert ops.dsa_wk_fork_fake(fake_x, 20, overlap.name) is None
            fake = ops.dsa_wk_join_fake(fake_x, fake_x, 20, overlap.name)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("branch", ["inplace", "fused", "plain"])
def test_every_branch_of_the_indexer_takes_the_product(monkeypatch: pytest.MonkeyPatch, branch: str):
    model = cases.Model(layers=1).to(torch.bfloat16)
    indexer = model.layers[0].indexer
    positions, x = cases.batch(TOKENS)
    x, qr = x.bfloat16(), torch.randn(TOKENS, cases.Q_LORA).bfloat16()
    got = []
    monkeypatch.setattr(indexer_module.SparseAttnIndexer, "forward_cuda", lambda self, *args: args)
    indexer.indexer_op._forward_method = lambda *args: got.append(args)
    rope = model.layers[0].indexer_rope_emb
    if branch == "inplace":
        monkeypatch.setattr(type(deepseek_v2.current_platform), "is_rocm", lambda _self: True)
        indexer.is_inplace_rope = True
    elif branch == "fused":
        indexer.use_fused_indexer_q = True
        monkeypatch.setattr(
            deepseek_v2, "fused_indexer_q_rope_quant", lambda _p, q, _c, weights, *_args: (q, weights * 2)
        )
    indexer(x, qr, positions, rope)
    kw, _ = indexer.wk_weights_proj(x)
    monkeypatch.setattr(indexer.wk_weights_proj, "forward", lambda _x: pytest.fail("computed again"))
    indexer(x, qr, positions, rope, kw)
    for expected, found in zip(got[0], got[1], strict=True):
        assert torch.equal(expected, found)


def test_the_op_still_runs_at_once_without_a_runner(monkeypatch: pytest.MonkeyPatch):
    assert indexer_module.dsa_runner is None
    wrapped = indexer_module._through_dsa_runner(lambda *args, **kwargs: (args, kwargs))
    assert wrapped(1, b=2) == ((1,), {"b": 2})
    monkeypatch.setattr(
        indexer_module, "dsa_runner", lambda op, args, kwargs: ("runner", op(*args, **kwargs))
    )
    assert wrapped(1, b=2) == ("runner", ((1,), {"b": 2}))


def test_the_stand_in_for_the_indexer_stays_on_its_device():
    """Its inputs are on a card in test_overlap_compiled_gpu.py; what it makes itself must be there too."""
    tokens, like = 8, {"device": "meta"}
    cache, k = (
        torch.empty(cases.MAX_TOKENS, cases.INDEX_DIM, **like),
        torch.empty(tokens, cases.INDEX_DIM, **like),
    )
    q = torch.empty(tokens, cases.INDEX_HEADS, cases.INDEX_DIM, **like)
    weights = torch.empty(tokens, cases.INDEX_HEADS, **like)
    buffer = torch.empty(cases.MAX_TOKENS, cases.TOPK, dtype=torch.int32, **like)
    found = cases.indexer_kernel(k, "", cache, q, None, k, weights, *[None] * 6, buffer)
    assert found is buffer
