# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811 (fixtures of the module for wk and full)
"""``native`` without a GPU: what is sound, the graph, the generated code, the stream that it enters."""

import re
from dataclasses import replace

import pytest
import torch
from torch._dynamo import graph_bytecode_inputs as registry
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.layers import mla

if not hasattr(mla.MultiHeadLatentAttentionWrapper, "dsa_overlap"):
    pytest.skip("this line has no hook in layers/mla.py", allow_module_level=True)

from vllm.dsa.overlap import feature
from vllm.dsa.overlap import gates as shared_gates
from vllm.dsa.overlap.compiled import attach as attaching
from vllm.dsa.overlap.compiled import runner
from vllm.dsa.overlap.native import compiler, ops, order, probe, stream
from vllm.dsa.overlap.native.layer import NativeOverlap
from vllm.dsa.overlap.streams import Lane
from vllm.model_executor.layers import sparse_attn_indexer as indexer_module

from . import overlap_compiled_cases as cases
from . import test_overlap_compiled as compiled
from .overlap_compiled_streams import Detector, Device
from .test_overlap_compiled import device, engine, outcomes, pieces, small  # noqa: F401

START = torch.ops.vllm.dsa_native_start.default


# What is sound.


def step(name: str, reads: str = "", writes: str = "", changes: str = "", **more) -> order.Step:
    return order.Step(name, *(frozenset(part.split()) for part in (reads, writes, changes)), **more)


SIDE = {"marked": True, "late": True}
#: A piece as Inductor has it: the empty allocation is early, a changed buffer has a new name.
PIECE = (
    step("alloc", "", "q8", empty=True, **SIDE),
    step("norm", "x", "h"),
    step("qkv", "h w", "kv"),
    step("q_norm", "kv", "qc"),
    step("fork", "h qc pos", "h2 qc2", "h qc", fork=True),
    step("rope", "kv pos", "kpe", late=True),
    step("wk", "h2 w2", "kw", **SIDE),
    step("wq", "qc2 w3", "iq", **SIDE),
    step("q_b", "qc2 w4", "q", late=True),
    step("quant", "iq kw q8 pos", "q8b", "q8", **SIDE),
    step("k_norm", "kw pos", "k", **SIDE),
)
OUTPUTS, MARKED = ("h", "q", "kpe", "q8", "k"), (3, 4)
FIRST = {"h2": "h", "qc2": "qc", "q8b": "q8"}


def planned(steps=PIECE, outputs=OUTPUTS, marked=MARKED) -> order.Plan:
    return order.plan(steps, outputs, marked, FIRST)


def changed(name: str, **fields) -> tuple[order.Step, ...]:
    sets = {
        key: frozenset(value.split()) if isinstance(value, str) else value for key, value in fields.items()
    }
    return tuple(replace(one, **sets) if one.name == name else one for one in PIECE)


def test_main_comes_first_and_the_fork_before_what_follows_it():
    found = planned()
    assert found.early == ("norm", "qkv", "q_norm") and found.fork == "fork" and found.late == ("rope", "q_b")
    assert found.side == ("wk", "alloc", "wq", "quant", "k_norm")


def test_marks_lost_after_the_first_step_are_found_again():
    for name in ("quant", "k_norm", "alloc"):
        assert set(planned(changed(name, marked=False)).side) == {"wk", "wq", "alloc", "quant", "k_norm"}


@pytest.mark.parametrize(
    "steps, said",
    [
        (changed("fork", fork=False), "0 forks"),
        ((*PIECE, step("again", "h2", fork=True)), "2 forks"),
        (changed("wk", marked=False), "quant reads kw, which the fork was not given"),
        (changed("wq", reads="kv w3"), "wq reads kv, which the fork was not given"),
        (changed("k_norm", reads="kw kpe"), "k_norm reads kpe, which the fork was not given"),
        (changed("q_b", reads="qc2 k"), r"outputs \[1, 3, 4\]"),
        (changed("wk", changes="x"), "wk changes x, which is not"),
        (changed("wk", changes="kv"), "wk changes kv, which is not"),
        (changed("rope", changes="pos"), "rope changes what the side stream reads"),
        (changed("rope", changes="h"), "rope changes what the side stream reads"),
        (changed("wk", reads="h2 q8"), "wk fills an allocation"),
        (changed("fork", reads="h qc kpe"), "the fork reads what comes after it"),
    ],
)
def test_anything_else_stays_on_one_stream(steps, said: str):
    with pytest.raises(order.Unsound, match=said):
        planned(steps)


@pytest.mark.parametrize("marked", [(), (3,), (2, 3, 4)])
def test_the_side_stream_gives_the_marked_outputs_and_no_other(marked: tuple[int, ...]):
    with pytest.raises(order.Unsound, match=r"outputs \[3, 4\] of the piece"):
        planned(marked=marked)


# The stream that generated code enters.


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "get_external_object_by_index", registry.get_external_object_by_index)
    stream.install()


def test_nested_compiled_calls_cannot_replace_the_stream(resolver):
    first = registry.get_external_object_by_index
    stream.install()
    assert registry.get_external_object_by_index is first
    other = torch.Stream(device="cpu")
    registry.store_user_object_weakrefs(other)
    assert first(0) is other and first(stream.INDEX) is stream.SIDE
    registry.reset_user_object_tracking()
    assert first(stream.INDEX) is stream.SIDE
    with pytest.raises(AssertionError, match="not registered"):
        first(0)


def test_the_stream_is_none_unless_something_forked(device: Device):
    side = stream.SideStream()
    with side:
        device.enqueue("a")
    overlap = NativeOverlap("layer", torch.nn.Linear(2, 2), "side", "attention")
    overlap._indexer_lane.fork()
    side.region = overlap
    with pytest.raises(ZeroDivisionError), side:
        device.enqueue("b")
        1 / 0  # noqa: B018
    device.enqueue("c")
    assert device.log == [
        *(("main", "a"), ("main", "record"), ("side", "wait"), ("side", "b"), ("main", "c")),
    ]


# A layer.


def attach_all(model: cases.Model, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    layers = dict(model.registered())
    for layer in model.layers:
        name, linear = f"{layer.prefix}.dsa_overlap", layer.indexer.wk_weights_proj
        overlap = NativeOverlap(name, linear, "side", layer.mla_attn.layer_name)
        layer.dsa_overlap = layers[name] = overlap
        runner.install(layer.indexer.k_cache, layer.mla_attn, overlap)
    monkeypatch.setitem(compiled.BODIES, START, ops.dsa_native_start)
    return layers


def as_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter the stream around the region, as Inductor's code does."""

    def index(_self, indexer, *args):
        prepared = []
        operation = indexer.indexer_op
        late, operation._forward_method = operation._forward_method, lambda *args: prepared.append(args)
        try:
            with stream.SIDE:
                indexer(*args)
        finally:
            operation._forward_method = late
        return operation(*prepared[0])

    monkeypatch.setattr(NativeOverlap, "index", index)


@pytest.mark.parametrize("graph", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
@pytest.mark.parametrize("region", ["side", "main"])
def test_same_bits_and_no_races(device: Device, monkeypatch: pytest.MonkeyPatch, region: str, graph):
    model = cases.Model()
    expected, _ = compiled.run(model, model.registered(), device)
    if region == "side":
        as_generated(monkeypatch)
    model = cases.Model()
    layers = attach_all(model, monkeypatch)
    for _ in range(2):
        out, races = compiled.run(model, layers, device, graph)
        assert torch.equal(out, expected) and not races
    forked = {("native forked", ""): 6}
    if region == "main":  # not compiled: as F2
        forked["native region on the main stream", ""] = 6
    assert outcomes() == forked
    on_side = [what for where, what in device.log if where == "side"]
    assert on_side.count("aten.topk.default") == 6
    assert on_side.count("aten.mm.default") == (12 if region == "side" else 0)
    assert stream.SIDE.region is None and all(layer.dsa_overlap._held is None for layer in model.layers)


def test_the_detector_sees_a_region_that_does_not_wait(device: Device, monkeypatch: pytest.MonkeyPatch):
    as_generated(monkeypatch)
    monkeypatch.setattr(Lane, "wait_for_fork", lambda _self: None)
    model = cases.Model(layers=1)
    _, races = compiled.run(model, attach_all(model, monkeypatch), device)
    assert any(" against " in race for race in races)


def test_what_the_region_reads_is_held_until_the_join(device: Device, monkeypatch: pytest.MonkeyPatch):
    overlap = NativeOverlap("layer", torch.nn.Linear(2, 2), "side", "attention")
    layers = {"layer": overlap, "model.attn": object()}
    overlap._mla_name = "model.attn"

    def once(hold: bool) -> list[str]:
        detector = Detector(device, {START: ops.dsa_native_start})
        with cases.override_forward_context(cases.context(layers, 8)), detector:
            h, q, positions = torch.ones(8, 2) + 1, torch.ones(8, 2) + 1, torch.arange(8) + 1
            overlap.start(h, q, positions)
            with stream.SIDE:
                _read = h + 1, q + 1, positions + 1
            if not hold:
                overlap._held = ()
            del h, q, positions
            overlap.run_indexer(lambda **_kwargs: None, (), {"topk_indices_buffer": None}, "")
            overlap.join_indexer()
            torch.ones(1)  # the main stream goes on
        return detector.races

    assert not once(hold=True)
    assert len([race for race in once(hold=False) if "freed while" in race]) == 3


@pytest.mark.parametrize(
    "graph, context, reason",
    [
        (CUDAGraphMode.PIECEWISE, {}, shared_gates.PIECEWISE),
        (CUDAGraphMode.NONE, {"metadata": False}, shared_gates.PROFILE_RUN),
        (CUDAGraphMode.FULL, {"ubatch_slices": [object()]}, shared_gates.MICROBATCHES),
    ],
)
def test_gates(device: Device, monkeypatch: pytest.MonkeyPatch, graph, context: dict, reason: str):
    """The generated code is the same, so a piece that is captured alone stays whole: nothing is entered."""
    as_generated(monkeypatch)
    model = cases.Model(layers=1)
    _, races = compiled.run(model, attach_all(model, monkeypatch), device, graph, **context)
    assert not races and "side" not in device.clocks
    assert outcomes() == {("native inline", reason): 1}


def test_what_a_failed_pass_left_is_forgotten(device: Device, monkeypatch: pytest.MonkeyPatch):
    as_generated(monkeypatch)
    model = cases.Model(layers=1)
    layers = attach_all(model, monkeypatch)
    expected, _ = compiled.run(model, layers, device)
    attention = model.layers[0].mla_attn.impl
    working = attention.do_kv_cache_update
    attention.do_kv_cache_update = lambda *_args: pytest.fail("out of memory", pytrace=False)
    with pytest.raises(pytest.fail.Exception):
        compiled.run(model, layers, device)
    assert model.layers[0].dsa_overlap._deferred is not None
    attention.do_kv_cache_update = working
    for graph in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        out, races = compiled.run(model, layers, device, graph)
        assert torch.equal(out, expected) and not races


# The graph.


@pytest.fixture(scope="module")
def graphs():
    """The graphs of native and off; three layers."""
    patch = pytest.MonkeyPatch()
    patch.setattr(cases.deepseek_v2, "per_token_group_quant_fp8", cases.quantise)
    Device().install(patch.setattr)
    model = cases.Model(layers=3)
    attach_all(model, patch)
    found = {"native": cases.trace(model), "off": cases.trace(cases.Model(layers=3))}
    patch.undo()
    indexer_module.dsa_runner = None
    return found


def test_the_indexer_is_marked_and_nothing_else(graphs):
    marked = [node for node in graphs["native"].graph.nodes if node.meta.get("custom", {}).get(compiler.MARK)]
    products = [str(node.args[1]) for node in marked if "linear" in str(node.target)]
    assert len(products) == 6 and all("wq_b" in name or "wk_weights" in name for name in products)
    text = [str(node.target) for node in marked]
    assert text.count("vllm.sparse_attn_indexer") == 3
    assert not any("dsa_native_start" in name or "mla" in name or "dsa_wk" in name for name in text)


def test_pieces_are_upstreams_and_only_those_with_marks_compile_otherwise(graphs):
    split, items = pieces(graphs["native"])
    upstream = pieces(graphs["off"])[1]
    assert len(items) == len(upstream)
    assert len(compiled.kinds(items)) == len(compiled.kinds(upstream))
    prepared = 0
    for item in items:
        options: dict[str, object] = {}
        marks = compiler.marked_outputs(item.graph)
        has_region = "dsa_native_start" in str(item.graph.graph)
        if item.is_splitting_graph:
            assert not has_region
            continue
        with compiler.prepare(item.graph, options):
            assert torch._functorch.config.cse is not has_region
        assert torch._functorch.config.cse
        assert bool(options) is has_region and bool(marks) is has_region
        if not has_region:
            continue
        prepared += 1
        assert options["_pre_fusion_custom_pass"].marked == marks
        assert options["triton.autotune_at_compile_time"] is False
        streams = {node.meta.get("custom", {}).get("stream") for node in item.graph.graph.nodes}
        assert streams == {None, stream.INDEX}
        # All that the side stream gives goes to the indexer's op and nowhere else.
        (call,) = split.graph.find_nodes(op="call_module", target=item.submod_name)
        for user in call.users:
            if user.args[1] not in marks:
                continue
            assert user.users
            for reader in user.users:
                arguments = getattr(split, reader.target).graph.find_nodes(op="placeholder")
                inner = list(arguments)[reader.args.index(user)]
                assert {str(node.target) for node in inner.users} == {"vllm.sparse_attn_indexer"}
    assert prepared == 3


def test_marks_survive_pickling(graphs):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from vllm.compilation.caching import VllmSerializableFunction

    split, items = pieces(graphs["native"])
    for module in split.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            node.meta = {"custom": node.meta["custom"]} if "custom" in node.meta else {}
    data = VllmSerializableFunction.serialize_graph_module(split)
    again = VllmSerializableFunction.deserialize_graph_module(data, FakeTensorMode(shape_env=ShapeEnv()))
    for item in items:
        before, after = item.graph, getattr(again, item.submod_name)
        assert compiler.marked_outputs(after) == compiler.marked_outputs(before)
        assert cases.text(after) == cases.text(before)


# The generated code.


def launches(text: str) -> list[str]:
    found = (
        r"with \w+:|(?:triton_\w+|quantise_0)\.run|extern_kernels\.\w+|torch\.ops\.vllm\.\w+(?=\.default\()"
    )
    found += "|empty_strided_cuda"
    return re.findall(found, text[text.index("set_device") :])


@pytest.mark.parametrize("case, packing", [(1, "quantise_0.run"), (4, "torch.ops.vllm.dsa_pack_index_q")])
def test_inductor_puts_the_region_on_the_side_stream(case: int, packing: str):
    text = compiled.generated_code()[case]
    assert f"stream1 = get_external_object_by_index({stream.INDEX})" in text
    found = launches(text)
    fork, region = found.index("torch.ops.vllm.dsa_native_start"), found.index("with stream1:")
    assert found.index("with default_stream:") == 0 and found.count("with stream1:") == 1
    early, late, side = (
        [what for what in part if what != "empty_strided_cuda"]
        for part in (found[1:fork], found[fork + 1 : region], found[region + 1 :])
    )
    # Norm, QKV-A and the query's norm; then rotation, norm and q_b.
    assert [what.partition("_")[0] for what in early] == ["triton", "extern", "triton"]
    assert sorted(what.partition("_")[0] for what in late) == ["extern", "triton", "triton"]
    assert side.count("extern_kernels.mm") == 2 and side.count(packing) == 1
    assert found[region + 1 : region + 3] == ["empty_strided_cuda", "extern_kernels.mm"]
    # Memory of the side stream is allocated on it, and kernels are launched with the stream of the moment.
    inside = text[text.index("with stream1:") :]
    assert "stream=raw_stream0" not in inside and inside.count("stream=raw_stream)") == (
        3 if case == 1 else 2
    )
    made = set(re.findall(r"(buf\d+) = (?:empty_strided_cuda|torch|reinterpret_tensor|buf)", inside))
    before = set(re.findall(r"(buf\d+) = empty_strided_cuda", text[: text.index("with stream1:")]))
    # It reads the two tensors that the fork got; one goes to the indexer's op, the layer holds the other.
    given = re.search(r"dsa_native_start\.default\((buf\d+), (buf\d+), arg\d+_1, arg\d+_1\)", text).groups()
    read = set(re.findall(r"buf\d+", inside[: inside.index("return (")])) - made
    assert read & before == set(given)
    assert "reuse" not in inside


@pytest.mark.parametrize("case", [2, 3])
def test_what_is_not_sound_is_compiled_on_one_stream(case: int):
    found = launches(compiled.generated_code()[case])
    assert not any(what.startswith("with ") and "stream" in what for what in found)
    assert found.count("torch.ops.vllm.dsa_native_start") == 1


# Attaching.


@pytest.fixture
def native(engine, monkeypatch: pytest.MonkeyPatch, resolver):
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "native")
    engine.compilation.backend = "inductor"
    for linear in (engine.layer.q_b_proj, engine.layer.indexer.wq_b):
        linear.quant_method = engine.layer.indexer.wk_weights_proj.quant_method
    return engine


def test_attach(native):
    keys = set(native.layer.state_dict())
    overlap = attaching.attach(native.layer)
    native.layer.dsa_overlap = overlap
    assert type(overlap) is NativeOverlap and overlap.native and not overlap.indexer_first
    assert native.compilation.static_forward_context == {"model.layers.0.self_attn.dsa_overlap": overlap}
    assert indexer_module.dsa_runner is runner.run and native.layer.mla_attn.dsa_overlap is overlap
    assert set(native.layer.state_dict()) == keys
    assert registry.get_external_object_by_index(stream.INDEX) is stream.SIDE


def _no_compilation(engine):
    engine.compilation.mode = CompilationMode.NONE


def _other_backend(engine):
    engine.compilation.backend = "eager"


def _not_split(engine):
    engine.compilation.splitting_ops = []


def _shared_scratch(engine):
    engine.layer.indexer.wq_b.quant_method = type("MarlinLinearMethod", (), {})()


@pytest.mark.parametrize(
    "change, said",
    [
        (_shared_scratch, "wq_b runs MarlinLinearMethod, which may share scratch memory between streams"),
        (_no_compilation, "native needs vLLM's compilation"),
        (_other_backend, "native needs Inductor's standalone compile"),
        (_not_split, "indexer and attention do not split the graph"),
    ],
)
def test_what_does_not_fit_declines(native, change, said: str):
    change(native)
    assert attaching.attach(native.layer) is None
    assert outcomes() == {("declined", said): 1} and not native.compilation.static_forward_context


def test_another_torch_declines(native, monkeypatch: pytest.MonkeyPatch):
    assert probe.why_not_torch() is None
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert attaching.attach(native.layer) is None
    assert outcomes() == {("declined", "native was written for torch 2.13.x, not 2.14.1"): 1}
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(probe, "_USED", (("torch._inductor.scheduler", "Scheduler.nothing"),))
    assert probe.why_not_torch() == "this torch has no torch._inductor.scheduler.Scheduler.nothing"


def test_native_at_start_up(native, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feature, "compiled_line", lambda: True)
    assert str(feature.probe(None)) == "active (mode native)"
    monkeypatch.setattr(feature, "compiled_line", lambda: False)
    assert str(feature.probe(None)) == f"off ({feature.NATIVE_IS_OFF})"


def test_the_fake_fork_has_the_schema_of_the_real_one():
    arguments = START._schema.arguments
    assert [a.name for a in arguments if a.alias_info] == ["hidden_states", "q_c"]
    assert [a.name for a in arguments][:3] == ["hidden_states", "q_c", "positions"]
    assert not START._schema.returns and torch.Tag.needs_fixed_stride_order in START.tags
