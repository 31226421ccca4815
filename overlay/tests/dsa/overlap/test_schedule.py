# SPDX-License-Identifier: Apache-2.0
"""The overlap on upstream's patched attention module of line 0.33.0, on streams without a GPU.

Order, joins, lifetimes and results of every mode; then mutations of the schedule: each must be found.
"""

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.dsa import counters, features

ATTENTION = Path(importlib.util.find_spec("vllm.models.deepseek_v32.attention").origin)
if "vllm.dsa.overlap.schedule" not in ATTENTION.read_text():
    pytest.skip("this line does not call vllm.dsa.overlap.schedule", allow_module_level=True)

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.dsa.overlap import schedule, streams  # noqa: E402

from .attention_double import NORMS, SERIAL, SHARED, Model  # noqa: E402

FORK, JOIN = "fork", "join"
F1 = [FORK, "fused_qkv_a_proj", ("aux", "wk_weights_proj"), JOIN]
REST = ["attention", "o_proj"]
WK = [*F1, "fused_norm_rope", "q_b_proj", "wq_b", "fused_q both", "top-k", *REST]
KEY_NORM = "fused_norm_rope of the indexer"
KEY = [FORK, "fused_qkv_a_proj", ("aux", "wk_weights_proj"), ("aux", KEY_NORM), NORMS, "wq_b", JOIN]
F2 = [FORK, "q_b_proj", "fused_q mqa", ("aux", "fused_q index"), ("aux", "top-k"), JOIN]
FULL = [*KEY, *F2, *REST]


def build(monkeypatch: pytest.MonkeyPatch, mode: str, **options) -> Model:
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", mode)
    return Model(monkeypatch, **options)


def lanes(model: Model) -> list[streams.Lane]:
    overlaps = [layer._indexer_overlap for layer in model.layers]
    return [overlap._lane for overlap in overlaps if overlap is not None and overlap._lane is not None]


def trace(model: Model) -> list:
    """Steps in the order of recording, side steps with their stream, forks and joins as main sees them."""
    starts = {id(lane._start) for lane in lanes(model)}
    dones = {id(lane._done) for lane in lanes(model)}
    found: list = []
    for stream, kind, what in model.machine.log:
        if kind == "step":
            found.append(what if stream == "main" else (stream, what))
        elif stream == "main" and kind == "record" and id(what) in starts:
            found.append(FORK)
        elif stream == "main" and kind == "wait" and id(what) in dones:
            found.append(JOIN)
    return found


def problems(model: Model) -> list[str]:
    """Everything that is wrong with what the machine saw; empty for a right schedule."""
    found = list(model.machine.violations)
    found += [f"{stream} was not joined" for stream in model.machine.unjoined()]
    for lane in lanes(model):
        events = {id(lane._start): "start", id(lane._done): "done"}
        seen = [(s, k, events[id(what)]) for s, k, what in model.machine.log if id(what) in events]
        turn = [("main", "record", "start"), ("aux", "wait", "start")]
        turn += [("aux", "record", "done"), ("main", "wait", "done")]
        if seen != turn * (len(seen) // 4) or not seen:
            found.append(f"not one join per fork: {seen}")
    forked = False
    for step in trace(model):
        forked = step == FORK or (forked and step != JOIN)
        if forked and isinstance(step, str) and step.startswith("collective"):
            found.append(f"{step} on the main stream between fork and join")
    return found


@pytest.mark.parametrize(("mode", "layer"), [("off", SERIAL), ("wk", WK), ("full", FULL), ("native", SERIAL)])
@pytest.mark.parametrize("runtime", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_order_of_each_mode(monkeypatch, mode, layer, runtime):
    """NONE is also what the V2 runner sets while it captures a FULL graph; FULL is the V1 runner's."""
    model = build(monkeypatch, mode)
    model.run(passes=2, cudagraph_runtime_mode=runtime)
    assert trace(model) == [*layer, *SHARED, *layer] * 2
    assert problems(model) == []
    assert {lane.stream for lane in lanes(model)} <= {model.machine.aux}


@pytest.mark.parametrize("small_group", [False, True])
def test_every_mode_gives_the_same_bits(monkeypatch, small_group):
    results = {}
    for mode in ("off", "wk", "full"):
        with monkeypatch.context() as patch:
            model = build(patch, mode, small_group=small_group)
            results[mode] = model.run(tokens=7)
            assert len(lanes(model)) == (0 if mode == "off" else 2) and not model.machine.violations
            caches = [layer.indexer.k_cache.kv_cache for layer in model.layers if layer.indexer is not None]
            results[f"{mode} ids"], results[f"{mode} keys"] = model.topk.clone(), torch.cat(caches)
    assert results["off"].std() > 0 and len(results["off ids"][:7].unique()) > 4
    assert results["off keys"].any()
    for mode in ("wk", "full"):
        for what in ("", " ids", " keys"):
            assert torch.equal(results[f"off{what}"], results[f"{mode}{what}"])


def test_dcp_has_its_collectives_outside_or_on_the_side(monkeypatch):
    model = build(monkeypatch, "full", layers=(True,), parallel={"decode_context_parallel_size": 2})
    model.run(passes=1)
    steps = trace(model)
    assert problems(model) == []
    assert steps.index(("aux", "collective: top-k")) < len(steps) - 1 - steps[::-1].index(JOIN)
    assert steps.index("collective: query gather") > len(steps) - 1 - steps[::-1].index(JOIN)


def test_a_layer_that_reuses_top_k_does_not_fork(monkeypatch):
    """MTP: the first draft step selects, the others set skip_topk on the same layer."""
    model = build(monkeypatch, "full", layers=(True,))
    model.run(passes=1)
    model.layers[0].skip_topk = True
    model.run(passes=1)
    model.layers[0].skip_topk = False
    model.run(passes=1)
    assert trace(model) == [*FULL, *SHARED, *FULL]
    assert problems(model) == []


def test_a_batch_without_real_tokens_is_joined_although_attention_returns_early(monkeypatch):
    model = build(monkeypatch, "full", layers=(True,))
    metadata = model.context(5).attn_metadata
    next(iter(metadata.values())).num_actual_tokens = 0
    model.run(passes=1, attn_metadata=metadata)
    assert trace(model) == [step for step in FULL if step != "attention"]
    assert problems(model) == []


def test_a_short_prefill_by_dense_attention_is_joined(monkeypatch):
    """It reads no top-k, and its query is not packed; upstream's indexer op then returns early by itself."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    results = {}
    for mode in ("off", "full"):
        with monkeypatch.context() as patch:
            model = build(patch, mode, layers=(True,))
            layer = model.layers[0]

            def forward_impl(q, kv_c, k_pe, kv_cache, metadata, output, model=model):
                model.machine.note("attention")
                sums = q.sum(-1, keepdim=True) + kv_c.sum(-1)[:, None, None]
                output.copy_(sums.repeat(1, 1, 4).view(5, -1))

            layer._use_sparse_mha = lambda metadata: True
            layer.forward_impl = forward_impl
            results[mode] = model.run(passes=1)
            assert trace(model) == (FULL if mode == "full" else SERIAL)
            assert model.machine.violations == [] and model.machine.unjoined() == []
    assert torch.equal(results["off"], results["full"])


def test_the_ready_event_is_recorded_once_on_the_side_stream(monkeypatch):
    """The conversion of the ids (and HiSparse's swap-in) waits for this event alone."""
    model = build(monkeypatch, "full", layers=(True,))
    model.run(passes=1)
    ready = model.group.logical_topk_ready
    seen = [(stream, kind) for stream, kind, what in model.machine.log if what is ready]
    assert seen == [("aux", "record"), ("conversion", "wait")]


def test_one_report_and_counts(monkeypatch):
    model = build(monkeypatch, "full")
    model.run(passes=3)
    assert features._reported["overlap"] == features.Status(features.State.ACTIVE, "full")
    rows = {(row["outcome"], row["reason"]): row["count"] for row in counters.snapshot("overlap")}
    assert rows[("forked", "full")] == 6


# --- failures between fork and join


@contextmanager
def out_of_memory_at(model: Model, step: str):
    """The machine's ``step`` raises after it was recorded."""
    with pytest.MonkeyPatch.context() as patch:
        note = model.machine.note

        def failing(name):
            note(name)
            if name == step:
                raise RuntimeError("out of memory")

        patch.setattr(model.machine, "note", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            yield


@pytest.mark.parametrize("where", ["wk_weights_proj", KEY_NORM, "fused_q index", "top-k"])
def test_a_side_branch_that_raises_is_joined_first(monkeypatch, where):
    """Ending a capture with a stream that did not come back fails with an error that hides the real one."""
    model = build(monkeypatch, "full", layers=(True,))
    with out_of_memory_at(model, where):
        model.run(passes=1)
    assert model.machine.unjoined() == []
    assert model.machine.current is model.machine.main
    assert [lane.pending for lane in lanes(model)] == [False]
    model.machine.log.clear()
    model.run(passes=1)
    assert trace(model) == FULL and problems(model) == []


@pytest.mark.parametrize("where", ["fused_qkv_a_proj", "wq_b", "q_b_proj"])
def test_a_main_branch_that_raises_leaves_nothing_on_the_side(monkeypatch, where):
    model = build(monkeypatch, "full", layers=(True,))
    with out_of_memory_at(model, where):
        model.run(passes=1)
    assert model.machine.unjoined() == []
    model.machine.log.clear()
    model.run(passes=1)
    assert trace(model) == FULL and problems(model) == []


def test_norms_that_raise_beside_the_side_branch_are_made_up_for(monkeypatch):
    """They are upstream's call between the side branch of F1 and its join: the next pass joins it."""
    model = build(monkeypatch, "full", layers=(True,))
    with out_of_memory_at(model, NORMS):
        model.run(passes=1)
    assert [lane.pending for lane in lanes(model)] == [True]
    model.run(passes=1)
    assert model.machine.unjoined() == [] and model.machine.violations == []
    model.machine.log.clear()
    model.run(passes=1)
    assert trace(model) == FULL and problems(model) == []


def test_a_lane_refuses_what_is_out_of_order(monkeypatch):
    model = build(monkeypatch, "full")
    lane = streams.Lane(model.machine.aux)
    with pytest.raises(RuntimeError, match="without a fork"):
        lane.run(lambda: None)
    with pytest.raises(RuntimeError, match="without a side branch"):
        lane.join()
    lane.fork()
    lane.side(lambda: None)
    with pytest.raises(RuntimeError, match="never joined"):
        lane.fork()
    lane.join()
    lane.fork()


# --- mutations: each breaks the schedule in one way, and `problems` must name it


def no_wait_for_the_fork(monkeypatch):
    def side(self, body, *args):
        with torch.cuda.stream(self.stream):
            self.pending = True
            result = body(*args)
            self._done.record()
        return result

    monkeypatch.setattr(streams.Lane, "side", side)


def no_join(monkeypatch):
    def join(self):
        self.pending = False

    monkeypatch.setattr(streams.Lane, "join", join)


def join_at_the_next_fork(monkeypatch):
    fork = streams.Lane.fork

    def late(self):
        if self.pending:
            self.join()
        fork(self)

    monkeypatch.setattr(streams.Lane, "fork", late)
    monkeypatch.setattr(streams.Lane, "run", streams.Lane.side)


def join_after_attention(monkeypatch):
    monkeypatch.setattr(streams.Lane, "run", streams.Lane.side)
    begin = schedule.LayerOverlap.begin

    def start(self, *args):
        if self._lane is not None and self._lane.pending:
            self._lane.join()
        return begin(self, *args)

    monkeypatch.setattr(schedule.LayerOverlap, "begin", start)


def read_before_the_join(monkeypatch):
    wk = schedule.LayerOverlap.wk_weights_proj
    monkeypatch.setattr(schedule.LayerOverlap, "wk_weights_proj", lambda self, x: (wk(self, x)[0] + 0, None))


def key_normed_by_main_too(monkeypatch):
    monkeypatch.setattr(schedule.LayerOverlap, "key_on_side", False)


def end_recorded_on_the_main_stream(monkeypatch):
    def side(self, body, *args):
        with torch.cuda.stream(self.stream):
            self._start.wait()
            self.pending = True
            result = body(*args)
        self._done.record()
        return result

    monkeypatch.setattr(streams.Lane, "side", side)


def end_recorded_before_the_body(monkeypatch):
    def side(self, body, *args):
        with torch.cuda.stream(self.stream):
            self._start.wait()
            self.pending = True
            self._done.record()
            return body(*args)

    monkeypatch.setattr(streams.Lane, "side", side)


def second_fork_at_the_first_place(monkeypatch):
    fork = streams.Lane.fork

    def once(self):
        if self.forked_before:
            self.forked = True
        else:
            fork(self)
        self.forked_before = not self.forked_before

    monkeypatch.setattr(streams.Lane, "forked_before", False, raising=False)
    monkeypatch.setattr(streams.Lane, "fork", once)


def body_on_another_stream(monkeypatch):
    from .vector_clock import Stream

    side = streams.Lane.side

    def elsewhere(self, body, *args):
        other = Stream(self.stream.machine, "other")

        def moved(*args):
            with torch.cuda.stream(other):
                return body(*args)

        return side(self, moved, *args)

    monkeypatch.setattr(streams.Lane, "side", elsewhere)


def ready_event_recorded_before_top_k(monkeypatch):
    indexer = schedule.LayerOverlap._indexer

    def early(self, *args):
        self.layer.impl.record_logical_topk_ready()
        record, self.layer.impl.record_logical_topk_ready = (
            self.layer.impl.record_logical_topk_ready,
            lambda: None,
        )
        indexer(self, *args)
        self.layer.impl.record_logical_topk_ready = record

    monkeypatch.setattr(schedule.LayerOverlap, "_indexer", early)


def input_freed_before_the_join(monkeypatch):
    def run(self, body, first, *rest):
        copy = first.clone()  # on main, referenced by nobody but this frame
        result = self.side(body, copy, *rest)
        del copy
        torch.empty(1)  # main allocates again
        self.join()
        return result

    monkeypatch.setattr(streams.Lane, "run", run)


def collective_beside_the_side_branch(monkeypatch):
    fork = schedule.LayerOverlap.fork_indexer

    def with_collective(self, *args):
        forked = fork(self, *args)
        self.layer.fused_qkv_a_proj.machine.note("collective: of the main branch")
        return forked

    monkeypatch.setattr(schedule.LayerOverlap, "fork_indexer", with_collective)


MUTATIONS = {
    no_wait_for_the_fork: "reads before the write on main",
    no_join: "reads before the write on aux",
    join_at_the_next_fork: "reads before the write on aux",
    join_after_attention: "reads before the write on aux",
    key_normed_by_main_too: "reads before the write on aux",
    read_before_the_join: "reads before the write on aux",
    end_recorded_on_the_main_stream: "reads before the write on aux",
    end_recorded_before_the_body: "reads before the write on aux",
    second_fork_at_the_first_place: "reads before the write on main",
    body_on_another_stream: "reads before the write on",
    ready_event_recorded_before_top_k: "reads before the write on aux",
    input_freed_before_the_join: "memory of main may be used again while aux reads it",
    collective_beside_the_side_branch: "on the main stream between fork and join",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_is_found(monkeypatch, mutation):
    import re

    mutation(monkeypatch)
    # The group's own stream waits for the ready event before it converts ids, which would hide a late join.
    model = build(monkeypatch, "full", small_group=mutation is not ready_event_recorded_before_top_k)
    model.run(passes=2)
    found = problems(model)
    assert any(re.search(MUTATIONS[mutation], problem) for problem in found), found


def test_recording_the_side_first_is_seen(monkeypatch):
    """Not wrong, but measured slower: the order of recording is part of the schedule."""
    wk = schedule.LayerOverlap.wk_weights_proj
    model = build(monkeypatch, "wk", layers=(True,))
    qkv = model.layers[0].fused_qkv_a_proj

    def first(x):
        model.kept = wk(model.layers[0]._indexer_overlap, x)
        return qkv(x)

    model.layers[0].fused_qkv_a_proj = first
    monkeypatch.setattr(schedule.LayerOverlap, "wk_weights_proj", lambda self, x: model.kept)
    model.run(passes=1)
    assert trace(model) != WK
