# SPDX-License-Identifier: Apache-2.0
"""Overlap on the compiled line, on a card: the small model of overlap_compiled_cases with real streams.

The side stream is held up before its work (a missing join shows) and the main stream before its fork (a
missing wait at the fork shows). Eagerly every result has the bits of ``off``. A compiled mode is other code
than ``off``, which may round otherwise, so it is compared bit by bit with itself on one stream: same code, no
fork.
"""

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers import mla

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if not hasattr(mla.MultiHeadLatentAttentionWrapper, "dsa_overlap"):
    pytest.skip("this line has no hook in layers/mla.py", allow_module_level=True)

from vllm.dsa import counters
from vllm.dsa.overlap.compiled import attach, runner
from vllm.dsa.overlap.compiled.layer import LayerOverlap
from vllm.dsa.overlap.mode import Mode
from vllm.dsa.overlap.streams import Lane
from vllm.model_executor.layers import sparse_attn_indexer as indexer_module
from vllm.model_executor.models import deepseek_v2
from vllm.utils.torch_utils import aux_stream

from . import overlap_compiled_cases as cases

MODES = ("off", "wk", "full", "native")
#: Clock cycles of a delay: about 5 ms, hundreds of times what the layer takes.
DELAY = 10_000_000
#: Passes of a compiled or captured model with fresh inputs.
ROUNDS = 20


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", cases.quantise)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
    torch._dynamo.reset()


def build(mode: str, monkeypatch: pytest.MonkeyPatch, tokens: int, graph: CUDAGraphMode):
    """A model, and the forward context that it runs in."""
    model = cases.Model(layers=3)
    layers = dict(model.registered())
    for layer in model.layers if mode != "off" else ():
        whole = mode == "full"
        name, linear = f"{layer.prefix}.dsa_overlap", layer.indexer.wk_weights_proj
        if mode == "native":
            overlap = attach.make_native(name, linear, aux_stream(), layer.mla_attn.layer_name)
        else:
            overlap = LayerOverlap(
                name, linear, aux_stream(), lambda _tokens: Mode(mode), whole=whole, pieces=not whole
            )
        layer.dsa_overlap = layers[overlap.name] = overlap
        if whole or overlap.native:
            runner.install(layer.indexer.k_cache, layer.mla_attn, overlap)

    def run_indexer(_op, args, kwargs):
        return runner.run(cases.indexer_kernel, args, kwargs)

    monkeypatch.setattr(indexer_module, "dsa_runner", run_indexer)
    return model, cases.context(layers, tokens, graph)


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.arange(tokens), torch.randn(tokens, cases.HIDDEN, generator=generator)


def hold_up(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "side":
        run = Lane.run

        def late(self, body, *args, **kwargs):
            def delayed(*args, **kwargs):
                torch.cuda._sleep(DELAY)
                return body(*args, **kwargs)

            return run(self, delayed, *args, **kwargs)

        monkeypatch.setattr(Lane, "run", late)
        wait = Lane.wait_for_fork

        def late_region(self):
            wait(self)
            torch.cuda._sleep(DELAY)

        monkeypatch.setattr(Lane, "wait_for_fork", late_region)
    elif where == "main":
        fork = Lane.fork

        def late_fork(self):
            torch.cuda._sleep(DELAY)
            fork(self)

        monkeypatch.setattr(Lane, "fork", late_fork)


def on_one_stream(context) -> None:
    """From now on nothing forks; what was compiled stays."""
    for layer in context.no_compile_layers.values():
        if isinstance(layer, LayerOverlap):
            layer._choose = lambda _tokens: Mode.OFF


def forked() -> set[str]:
    return {row["outcome"] for row in counters.snapshot("overlap") if row["outcome"].endswith("forked")}


EXPECTED = {
    "off": set(),
    "wk": {"wk forked"},
    "full": {"wk forked", "indexer forked"},
    "native": {"native forked"},
}


def compare(results: dict[str, list[torch.Tensor]]) -> None:
    """All modes have off's bits."""
    for mode in set(results) - {"off"}:
        for expected, found in zip(results["off"], results[mode], strict=True):
            assert torch.equal(expected, found), mode


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("where", ["nowhere", "side", "main"])
def test_eager_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, where: str, tokens: int):
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch, torch.inference_mode():
            counters.reset()
            model, context = build(mode, patch, tokens, CUDAGraphMode.NONE)
            hold_up(patch, where)
            with override_forward_context(context):
                results[mode] = [model(*inputs(tokens, seed)).clone() for seed in range(3)]
            assert forked() == EXPECTED[mode]
    compare(results)


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("where", ["nowhere", "side", "main"])
def test_a_full_graph_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, where: str, tokens: int):
    results = {}
    for mode in MODES:
        with monkeypatch.context() as patch, torch.inference_mode():
            model, context = build(mode, patch, tokens, CUDAGraphMode.FULL)
            hold_up(patch, where)
            positions, x = inputs(tokens, 0)
            with override_forward_context(context):
                model(positions, x)
                counters.reset()
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = model(positions, x)
            assert forked() == EXPECTED[mode]
            found = results[mode] = []
            for seed in range(ROUNDS if where == "nowhere" else 3):
                x.copy_(inputs(tokens, seed)[1])
                graph.replay()
                found.append(out.clone())
    assert len({tuple(t.flatten().tolist()) for t in results["off"]}) == len(results["off"])
    compare(results)


def compiled(mode: str, monkeypatch: pytest.MonkeyPatch, tokens: int, graph: CUDAGraphMode):
    """A model whose pieces are Inductor's, and its forward context; for ``native`` with streams in them."""
    torch._dynamo.reset()
    counters.reset()
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
    model, context = build(mode, monkeypatch, tokens, graph)
    return torch.compile(model, backend=cases.compile_pieces, fullgraph=True), context


def on_the_main_stream() -> bool:
    return any("region on the main" in row["outcome"] for row in counters.snapshot("overlap"))


@pytest.mark.parametrize("graph", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_compiled_pieces_give_the_bits_of_one_stream(monkeypatch: pytest.MonkeyPatch, graph: CUDAGraphMode):
    """Inductor's code for the pieces between the ops that split the graph; wk also with captured pieces."""
    tokens, results = 16, {}
    for mode in MODES:
        with monkeypatch.context() as patch, torch.inference_mode():
            model, context = compiled(mode, patch, tokens, graph)
            with override_forward_context(context):
                results[mode] = [model(*inputs(tokens, seed)).clone() for seed in range(3)]
                inline = graph is CUDAGraphMode.PIECEWISE and mode in ("full", "native")
                assert forked() == (set() if inline else EXPECTED[mode])
                assert not on_the_main_stream()
                counters.reset()
                on_one_stream(context)
                serial = [model(*inputs(tokens, seed)).clone() for seed in range(3)]
                assert forked() == set()
        compare({"off": serial, mode: results[mode]})
    for mode in MODES:
        for expected, found in zip(results["off"], results[mode], strict=True):
            torch.testing.assert_close(expected, found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["nowhere", "side", "main"])
@pytest.mark.parametrize("mode", ["wk", "full", "native"])
def test_compiled_pieces_in_a_full_graph_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, mode: str, where: str
):
    """Replayed with forks, eagerly without."""
    tokens = 16
    with monkeypatch.context() as patch, torch.inference_mode():
        model, context = compiled(mode, patch, tokens, CUDAGraphMode.FULL)
        hold_up(patch, where)
        positions, x = inputs(tokens, 0)
        with override_forward_context(context):
            for _ in range(2):
                model(positions, x)
            counters.reset()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = model(positions, x)
            assert forked() == EXPECTED[mode] and not on_the_main_stream()
            found, serial = [], []
            for seed in range(ROUNDS if where == "nowhere" else 3):
                x.copy_(inputs(tokens, seed)[1])
                graph.replay()
                found.append(out.clone())
            counters.reset()
            on_one_stream(context)
            for seed in range(len(found)):
                serial.append(model(positions, inputs(tokens, seed)[1]).clone())
            assert forked() == set()
    compare({"off": serial, mode: found})
