# SPDX-License-Identifier: Apache-2.0
"""The overlap of line 0.33.0 on a card: same bits whatever is late, and what a captured graph looks like.

Upstream's patched attention module with its own kernels (overlap/gpu_layer.py), decode steps of three layers.
"""

import json
import subprocess
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if "overlap.schedule" not in Path(find_spec("vllm.models.deepseek_v32.attention").origin).read_text():
    pytest.skip("this line does not call vllm.dsa.overlap.schedule", allow_module_level=True)

from torch.profiler import ProfilerActivity, profile
from vllm.config import CUDAGraphMode
from vllm.dsa import counters
from vllm.dsa.overlap import gates, schedule
from vllm.dsa.overlap.streams import Lane
from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v32.common import kernels
from vllm.v1.worker import workspace

from .overlap.gpu_layer import Model

ATTENTION = Path(find_spec("vllm.models.deepseek_v32.attention").origin)
MODES = ("off", "wk", "full")
CONTEXT = 8192
#: Clock cycles of a delay: some 5 ms, far more than three layers take.
DELAY = 10_000_000
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(
        prefill_context_parallel_size=1, use_ubatching=False, enable_dbo=False, decode_context_parallel_size=1
    ),
    compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
    lora_config=None,
)


@pytest.fixture(autouse=True)
def scratch():
    """The scratch memory that upstream's top-k takes from the engine's workspace manager."""
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cuda:0"))
    with torch.inference_mode():
        yield


def build(monkeypatch, mode: str, tokens: int, **options) -> Model:
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
    model = Model(tokens, options.pop("context", CONTEXT), **options)
    for layer in model.layers:
        layer._indexer_overlap = schedule.make_overlap(layer, CONFIG)
    assert (model.layers[0]._indexer_overlap is None) is (mode == "off")
    return model


def hold_up(monkeypatch, where: str) -> None:
    """Make one branch late: a missing wait then reads what is not there yet."""
    fork, side = Lane.fork, Lane.side

    def late_main_before_the_fork(self):
        torch.cuda._sleep(DELAY)
        fork(self)

    def late_main_after_the_fork(self):
        fork(self)
        torch.cuda._sleep(DELAY)

    def late_side(self, body, *args):
        def delayed(*args):
            torch.cuda._sleep(DELAY)
            return body(*args)

        return side(self, delayed, *args)

    def late_side_end(self, body, *args):
        def delayed(*args):
            result = body(*args)
            torch.cuda._sleep(DELAY)
            return result

        return side(self, delayed, *args)

    if where == "main before":
        monkeypatch.setattr(Lane, "fork", late_main_before_the_fork)
    elif where == "main after":
        monkeypatch.setattr(Lane, "fork", late_main_after_the_fork)
    elif where == "side begin":
        monkeypatch.setattr(Lane, "side", late_side)
    elif where == "side end":
        monkeypatch.setattr(Lane, "side", late_side_end)


def forks() -> dict[str, int]:
    return {r["reason"]: r["count"] for r in counters.snapshot("overlap") if r["outcome"] == "forked"}


WHERE = ["nowhere", "main before", "main after", "side begin", "side end"]


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("where", WHERE)
def test_eager_gives_the_same_bits(monkeypatch, where, tokens):
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch:
            counters.reset()
            model = build(patch, mode, tokens)
            hold_up(patch, where)
            with override_forward_context(model.context):
                results[mode] = [model(model.hidden(seed)).clone() for seed in range(3)]
            assert forks() == ({} if mode == "off" else {mode: 9})
    check(results)


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("where", WHERE)
def test_a_full_graph_gives_the_same_bits(monkeypatch, where, tokens):
    """Captured with runtime mode NONE, as the V2 model runner does; new inputs at each replay."""
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch:
            model = build(patch, mode, tokens)
            hold_up(patch, where)
            static = model.hidden(0)
            graph, out = capture(model, static)
            assert sum(forks().values()) == (0 if mode == "off" else 6)
            counters.reset()
            results[mode] = []
            for seed in range(20 if where == "nowhere" else 3):
                static.copy_(model.hidden(seed))
                graph.replay()
                results[mode].append(out.clone())
    check(results)


@pytest.mark.parametrize(("heads", "index_heads"), [(16, 64), (8, 32)])
def test_a_short_context_gives_the_same_bits(monkeypatch, heads, index_heads):
    """Fewer keys than top-k selects: the buffer that the fused norms clear keeps its -1."""
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch:
            model = build(patch, mode, 4, context=700, heads=heads, index_heads=index_heads)
            with override_forward_context(model.context):
                results[mode] = [model(model.hidden(seed)).clone() for seed in range(3)]
            assert (model.topk == -1).any() and (model.topk >= 0).any()
    check(results)


@pytest.mark.parametrize("where", WHERE)
def test_projections_that_share_scratch_memory_give_the_same_bits(monkeypatch, where):
    """Marlin's locks, which no side branch uses: eagerly, and in replays of a FULL graph."""
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch:
            counters.reset()
            model = build(patch, mode, 16, marlin_projections=True)
            assert gates.shared_scratch(model.layers[0].q_b_proj) == "MarlinFP8ScaledMMLinearKernel"
            hold_up(patch, where)
            with override_forward_context(model.context):
                results[mode] = [model(model.hidden(seed)).clone() for seed in range(3)]
            static = model.hidden(0)
            graph, out = capture(model, static)
            assert forks() == ({} if mode == "off" else {mode: 15})
            for seed in range(3, 6):
                static.copy_(model.hidden(seed))
                graph.replay()
                results[mode].append(out.clone())
    check(results)


def capture(model: Model, static: torch.Tensor):
    with override_forward_context(model.context):
        model(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
    return graph, out


def check(results: dict[str, list[torch.Tensor]]) -> None:
    off = results["off"]
    assert all(tensor.isfinite().all() for tensor in off)
    assert len({tuple(tensor[0, :64].tolist()) for tensor in off}) == len(off)
    for mode in MODES[1:]:
        for wanted, found in zip(off, results[mode], strict=True):
            assert torch.equal(wanted, found), mode


# --- the packing of the indexer's query alone


@pytest.mark.parametrize("switch", ["auto", "off"])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 64, 1024])
def test_the_index_query_is_packed_alone_to_the_same_bits(monkeypatch, tokens, interleave, switch):
    """In upstream's kernel and in the one in blocks of rows."""
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", switch)
    torch.manual_seed(tokens)
    positions = torch.randint(0, 512, (tokens,), device="cuda")
    cache = torch.randn(512, 64, device="cuda")
    q = torch.randn(tokens, 16, 192, device="cuda").bfloat16()
    index_q = torch.randn(tokens, 64, 128, device="cuda").bfloat16()
    weights = torch.randn(tokens, 192, device="cuda").bfloat16()[:, 128:]
    absorbed = torch.randn(16, tokens, 512, device="cuda").bfloat16().transpose(0, 1)
    scale = torch.ones(1, device="cuda")

    def pack(q_pe, ql_nope, has_indexer=True):
        options = {"has_indexer": has_indexer, "index_rope_interleave": interleave, "quantize_mqa": False}
        return kernels.fused_q(
            positions, q_pe, cache, index_q, cache, ql_nope, scale, weights, 0.088, 0.125, **options
        )

    both = pack(q[..., 128:], absorbed)
    alone = pack(index_q[:, :0, :64], index_q[:, :0])
    main = pack(q[..., 128:], absorbed, has_indexer=False)
    assert torch.equal(both[0].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(both[1], alone[1])
    assert torch.equal(both[2], main[2])


# --- what a captured graph looks like


def kernels_of(work, tmp_path: Path) -> list[dict]:
    """Kernels of ``work`` in the order of their start, with stream, start and end in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    trace = tmp_path / "trace.json"
    prof.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    return sorted(events, key=lambda event: event["ts"])


@pytest.mark.parametrize("mode", MODES)
def test_streams_and_memory_of_a_captured_graph(monkeypatch, tmp_path, record_property, mode):
    """One side stream however many layers; memory grows by the side's own scratch, once, not per layer."""
    reserved, streams = {}, {}
    for layers in (2, 6):
        model = build(monkeypatch, mode, 16, layers=layers)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph, _ = capture(model, model.hidden(0))
        reserved[layers] = (torch.cuda.memory_reserved() - before) / 2**20
        streams[layers] = len({event["args"]["stream"] for event in kernels_of(graph.replay, tmp_path)})
        del graph
    record_property("graph_MiB", reserved)
    print(f"mode={mode} graph_MiB={reserved} streams={streams}")
    assert max(streams.values()) <= (1 if mode == "off" else 2)
    assert reserved[6] - reserved[2] < 64


def pristine(tmp_path: Path) -> type:
    """The attention class without this project's patches, from the checkout that the test is run in."""
    line = next((p for f in Path(__file__).parents if (p := f / "patches/0.33.0").is_dir()), None)
    if line is None:
        pytest.skip("not run in a checkout: patches/0.33.0 is not here")
    name = "vllm/models/deepseek_v32/attention.py"
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(ATTENTION.read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for patch in reversed((line / "series").read_text().split("\n")):
        path = (line / patch).resolve()
        if patch.endswith(".patch") and f"+++ b/{name}" in path.read_text():
            command = ["git", "apply", "-R", f"--include={name}", str(path)]
            subprocess.run(command, cwd=tmp_path, check=True)
    assert "vllm.dsa" not in file.read_text()
    spec = spec_from_file_location("pristine_attention", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DeepseekV32Attention


@pytest.mark.parametrize("variable", ["VLLM_DISABLE_INDEXER_STREAM=1", "VLLM_DSA=0"])
def test_switched_off_the_kernels_are_upstreams_in_upstreams_order(monkeypatch, tmp_path, variable):
    monkeypatch.setenv("VLLM_DSA_FUSED_Q", "off")
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "full")
    monkeypatch.setenv(*variable.split("="))
    names = {}
    for who, options in (("ours", {}), ("upstream", {"attention_class": pristine(tmp_path / "pristine")})):
        model = Model(16, CONTEXT, **options)
        if who == "ours":
            for layer in model.layers:
                layer._indexer_overlap = schedule.make_overlap(layer, CONFIG)
        with override_forward_context(model.context):
            model(model.hidden(0))
            (tmp_path / who).mkdir()
            found = kernels_of(lambda model=model: model(model.hidden(0)), tmp_path / who)
        names[who] = [event["name"] for event in found]
        assert len({event["args"]["stream"] for event in found}) == 1
    assert len(names["ours"]) > 30
    assert names["ours"] == names["upstream"]


def together(events: list[dict]) -> float:
    """Microseconds in which two or more kernels run."""
    edges = sorted((t, step) for e in events for t, step in ((e["ts"], 1), (e["ts"] + e["dur"], -1)))
    total, running, since = 0.0, 0, 0.0
    for now, step in edges:
        total += now - since if running > 1 else 0.0
        running, since = running + step, now
    return total


def test_full_runs_its_branches_at_the_same_time(monkeypatch, tmp_path):
    """More than off, where only a dependent launch lets two kernels touch."""
    found = {}
    for mode in ("off", "full"):
        with monkeypatch.context() as patch:
            model = build(patch, mode, 16)
            graph, _ = capture(model, model.hidden(0))
            graph.replay()
            found[mode] = together(kernels_of(graph.replay, tmp_path))
    print(f"microseconds with two kernels: {found}")
    assert found["full"] > found["off"] + 1.0
