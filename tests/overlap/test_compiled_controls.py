"""bench/compiled_controls.py and what of bench/e2e_decode.py is for line 0.28.0, without an engine."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def decode() -> ModuleType:
    return importlib.import_module("e2e_decode")


def checked(*hashes: str, tokens: int = 5) -> dict[str, Any]:
    return {"logits": [f"{name} 1.5" for name in hashes], "tokens": [[tokens]]}


def test_a_control_is_compared_with_the_same_compiled_graph(decode: ModuleType, tmp_path: Path) -> None:
    """Not with off, whose code rounds otherwise; where two own passes differ, with the one that is closer."""
    args = decode.parser().parse_args(["check", "--modes", "off,full", "--raw", str(tmp_path)])
    key = "B=1 ctx=700"
    controls = {
        "again": {"points": {key: checked("y", "b", "x")}},
        "serial": {"points": {key: checked("y", "b", "x")}},
        "side-end": {"points": {key: checked("y", "z", "c", tokens=6)}},
    }
    full = {"points": {key: checked("y", "b", "c")}, "controls": controls}
    rows = decode.check_rows(args, {"off": [{"points": {key: checked("a", "b", "c")}}], "full": [full]})
    head = "mode=full phase=check heads=16 index=64 graph=FULL B=1 ctx=700"
    assert [(row["case"], row["metric"], row["ours"], row.get("own_passes")) for row in rows] == [
        (head, "equal logits", pytest.approx(2 / 3), None),
        (head, "equal tokens", 1.0, None),
        (f"{head} control=again", "equal logits", pytest.approx(2 / 3), [pytest.approx(2 / 3)]),
        (f"{head} control=again", "equal tokens", 1.0, [pytest.approx(2 / 3)]),
        (f"{head} control=serial", "equal logits", 1.0, [pytest.approx(2 / 3), 1.0]),
        (f"{head} control=serial", "equal tokens", 1.0, [pytest.approx(2 / 3), 1.0]),
        (f"{head} control=side-end", "equal logits", pytest.approx(2 / 3), [pytest.approx(2 / 3), 1 / 3]),
        (f"{head} control=side-end", "equal tokens", 0.0, [pytest.approx(2 / 3), 1 / 3]),
    ]


def test_rows_say_where_a_control_differs(decode: ModuleType) -> None:
    controls = importlib.import_module("compiled_controls")
    one = {"rows": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "caches": {"layers.0": 10, "layers.1": 11}}
    other = {"rows": [[[1, 2], [3, 9]], [[0, 6], [0, 8]]], "caches": {"layers.0": 10, "layers.1": 12}}
    assert controls.differences(one, other) == {
        "rows": 4,
        "hidden_rows_differ": 1,
        "logit_rows_differ": 2,
        "caches_differ": ["layers.1"],
    }
    assert controls.differences(one, {}) == {}


def test_rows_against_off_say_what_of_the_caches_differs(decode: ModuleType, tmp_path: Path) -> None:
    """Of two engines that did the same; within one engine the caches also hold what older requests left."""
    args = decode.parser().parse_args(["check", "--modes", "off,full", "--raw", str(tmp_path)])
    one = checked("a") | {"rows": [[[1], [2]]], "caches": {"layers.0": 1}}
    other = checked("b") | {"rows": [[[1], [3]]], "caches": {"layers.0": 2}}
    full = {"points": {"p": other}, "controls": {"serial": {"points": {"p": one}}}}
    rows = decode.check_rows(args, {"off": [{"points": {"p": one}}], "full": [full]})
    assert rows[0]["logit_rows_differ"] == 1 and rows[0]["caches_differ"] == ["layers.0"]
    assert rows[2]["logit_rows_differ"] == 1 and "caches_differ" not in rows[2]


class Overlap:
    """Stands for `vllm.dsa.overlap.compiled.layer.LayerOverlap`."""

    def __init__(self) -> None:
        self._choose = self.own = lambda _tokens: "full"
        self._wk_lane, self._indexer_lane = SimpleNamespace(stream=1), SimpleNamespace(stream=2)


class Graphs:
    """Stands for vLLM's CUDAGraphWrapper."""

    def __init__(self) -> None:
        self.cleared, self.graph_pool = 0, None

    def clear_graphs(self) -> None:
        self.cleared += 1


class Runner:
    """What a capture finds: which layers may fork, and through which lanes."""

    def __init__(self, overlaps: list[Overlap]) -> None:
        context = {"a": object()} | {str(index): one for index, one in enumerate(overlaps)}
        compilation = SimpleNamespace(static_forward_context=context)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)
        self.overlaps, self.seen = overlaps, []

    def capture_model(self) -> None:
        self.seen.append([(one._choose(1), one._wk_lane, one._indexer_lane) for one in self.overlaps])


PLAN = SimpleNamespace(points=[(1, 700), (3, 20)], late_points=[(3, 20)], check_steps=2)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def fake_engine(
    monkeypatch: pytest.MonkeyPatch, overlaps: list[Overlap], graphs: list[Graphs]
) -> SimpleNamespace:
    import contextlib

    pools = iter(range(100))
    cuda = SimpleNamespace(graph_pool_handle=lambda: next(pools), synchronize=lambda: None)
    counters = SimpleNamespace(reset=lambda: None, snapshot=lambda _name: [])
    mode = SimpleNamespace(OFF="off")
    for made in (
        module("torch", cuda=cuda),
        module("vllm"),
        module("vllm.config", set_current_vllm_config=lambda _config: contextlib.nullcontext()),
        module("vllm.compilation.cuda_graph", CUDAGraphWrapper=SimpleNamespace(_all_instances=graphs)),
        module("vllm.dsa", counters=counters),
        module("vllm.dsa.overlap.mode", Mode=mode),
        module("vllm.dsa.overlap.compiled.layer", LayerOverlap=Overlap),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return SimpleNamespace(runner=Runner(overlaps), check=lambda _b, _c, _s: checked("a"))


def test_each_control_captures_the_graphs_anew(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    controls = importlib.import_module("compiled_controls")
    monkeypatch.setattr(controls, "late_lane", lambda where, stream: (where, stream))
    overlaps, graphs = [Overlap(), Overlap()], [Graphs()]
    engine = fake_engine(monkeypatch, overlaps, graphs)
    args = argparse.Namespace(controls=["serial", "side-begin", "again"])
    result: dict[str, Any] = {}
    own = overlaps[0]._wk_lane, overlaps[0]._indexer_lane
    controls.measure(args, engine, PLAN, result)
    serial, late, again = (seen[0] for seen in engine.runner.seen)
    assert serial == ("off", *own)
    assert late == ("full", ("side-begin", 1), ("side-begin", 2))
    assert again == ("full", *own)
    assert all(seen[0][0] == seen[1][0] for seen in engine.runner.seen)
    assert graphs[0].cleared == 3 and graphs[0].graph_pool == 2
    assert list(result["controls"]) == args.controls
    assert list(result["controls"]["serial"]["points"]) == ["B=1 ctx=700", "B=3 ctx=20"]
    assert list(result["controls"]["side-begin"]["points"]) == ["B=3 ctx=20"]
    assert "control serial done" in capsys.readouterr().out


def test_off_has_nothing_but_another_pass(decode: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    controls = importlib.import_module("compiled_controls")
    result: dict[str, Any] = {}
    engine = fake_engine(monkeypatch, [], [Graphs()])
    controls.measure(argparse.Namespace(controls=["again", "serial", "main-after"]), engine, PLAN, result)
    assert list(result["controls"]) == ["again"]


def test_an_unknown_control_is_named(decode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main(["check", "--controls", "serial,late"])
    assert "not late" in capsys.readouterr().err


def test_inductors_options_reach_the_engine(decode: ModuleType) -> None:
    args = decode.parser().parse_args(["check", "--inductor", '{"combo_kernels": false}'])
    assert decode.settings(args)["inductor"] == {"combo_kernels": False}


def test_prefill_is_reported_beside_decode(decode: ModuleType, tmp_path: Path) -> None:
    command = ["time", "--context", "4096", "--batch", "1", "--long-batch", "", "--modes", "off,full"]
    args = decode.parser().parse_args([*command, "--prefill", "3", "--profile", "0", "--raw", str(tmp_path)])

    def start(*taken: float) -> dict[str, Any]:
        return {"points": {}, "graph_MiB": [1.0], "prefill_ms": {"4096": list(taken)}}

    found = {"off": [start(9, 10, 30), start(12, 12, 12)], "full": [start(10, 11, 12)]}
    rows = {row["case"]: row for row in decode.time_rows(args, found) if row["metric"] == "prefill"}
    tail = "phase=prefill heads=16 index=64 graph=FULL B=1 ctx=4096"
    assert (rows[f"mode=off {tail}"]["baseline"], rows[f"mode=off {tail}"]["ours"]) == (10, 12)
    assert (rows[f"mode=full {tail}"]["baseline"], rows[f"mode=full {tail}"]["ours"]) == (11, 11)
    assert rows[f"mode=full {tail}"]["runs"] == 3
