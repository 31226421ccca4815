"""bench/e2e_decode.py, its engine and bench/overlap_tp.py, as far as they run without an engine."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def decode() -> ModuleType:
    return importlib.import_module("e2e_decode")


@pytest.fixture
def checks() -> list[tuple[int, int]]:
    points: list[tuple[int, int]] = importlib.import_module("decode_plan").CHECKS
    return points


@pytest.fixture
def engine() -> ModuleType:
    return importlib.import_module("decode_engine")


def start(points: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"points": points, "graph_MiB": [100.0, 20.0], "torch": "2.14.0", "complete": True} | more


def timed(graph: float, block: float = 50.0, together: float = 0.0) -> dict[str, Any]:
    found = {"graph_us": [graph - 1, graph, graph + 9], "step_us": graph + 500, "block_us": block}
    return found | {"together": together, "streams": 2, "steps": 3}


def arguments(decode: ModuleType, tmp_path: Path, *more: str) -> Any:
    command = ["time", "--batch", "4", "--context", "4096", "--long-batch", "", "--raw", str(tmp_path), *more]
    return decode.parser().parse_args(command)


def test_points_and_what_the_engine_is_told(decode: ModuleType, checks: list[tuple[int, int]]) -> None:
    args = decode.parser().parse_args(["time"])
    assert decode.points(args)[:6] == [(1, 4096), (4, 4096), (16, 4096), (32, 4096), (64, 4096), (1, 8192)]
    assert decode.points(args)[-2:] == [(1, 131072), (4, 131072)] and len(decode.points(args)) == 17
    told = decode.settings(args)
    assert told["batches"] == [1, 4, 16, 32, 64] and told["max_len"] > 131072 + 300 + 10
    needed = 64 * (32768 + 300 + 10) // 64
    assert told["llm"]["num_gpu_blocks_override"] > 2 * needed
    args = decode.parser().parse_args(["check", "--mtp", "2", "--index-topk-freq", "4"])
    told = decode.settings(args)
    assert decode.points(args) == checks and told["per_step"] == 3
    assert told["hf"] == {"index_topk_freq": 4, "num_nextn_predict_layers": 1}
    assert told["llm"]["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 2}


def test_further_points_are_measured_last(decode: ModuleType) -> None:
    words = ["--batch", "1", "--context", "4096", "--long-batch", "", "--also", "256x900,512x300"]
    args = decode.parser().parse_args(["time", *words])
    assert decode.points(args) == [(1, 4096), (256, 900), (512, 300)]
    assert decode.settings(args)["batches"] == [1, 256, 512]
    check = decode.points(decode.parser().parse_args(["check", *words]))
    assert check[-2:] == [(256, 900), (512, 300)] and check[0] == (1, 700)


def test_auto_acts_in_a_start_that_is_to_show_what_it_does(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(BENCH.parent / "overlay"))
    auto, measured = (importlib.import_module(f"vllm.dsa.overlap.{name}") for name in ("auto", "measured"))
    monkeypatch.setattr(auto, "CHECKED_IN_ENGINE", frozenset())
    points = ((1, "full"), (64, "full"))
    off = (*points, (256, "off"), (512, "off"))
    one, other = auto.Entry("l", "c", 16, 64, "FULL", points), auto.Entry("l", "c", 8, 32, "FULL", off)
    monkeypatch.setattr(measured, "MEASURED", (one, other))
    told = importlib.import_module("decode_child")
    told.let_auto_act(64)
    assert (one, other) == measured.MEASURED and len(auto.CHECKED_IN_ENGINE) == 1
    told.let_auto_act(512)
    assert [entry.points for entry in measured.MEASURED] == [(*points, (512, "full"))] * 2
    assert measured.MEASURED[1].mode(100) is auto.Mode.FULL
    told.let_auto_act(weights="fp8")
    assert [entry.weights for entry in measured.MEASURED] == ["fp8"] * 2
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_forks_of_both_kinds_are_counted(decode: ModuleType, tmp_path: Path) -> None:
    args = arguments(decode, tmp_path, "--modes", "off,auto")
    outcomes = {"wk forked": 3, "indexer forked": 4, "wk inline": 5}
    forks = [{"outcome": outcome, "count": count} for outcome, count in outcomes.items()]
    auto = start({"B=1 ctx=700": checked("a")}) | {"forks": forks}
    rows = decode.check_rows(args, {"off": [start({"B=1 ctx=700": checked("a")})], "auto": [auto]})
    assert [row["forked"] for row in rows] == [7, 7]


def test_cases_are_as_the_results_format_has_them(decode: ModuleType) -> None:
    case = importlib.import_module("decode_rows").case
    args = decode.parser().parse_args(["time"])
    point = "B=16 ctx=4096"
    want = "mode=auto phase=decode heads=16 index=64 graph=FULL B=16 ctx=4096"
    assert case(args, "auto", "decode", point) == want
    args = decode.parser().parse_args(["time", "--mtp", "1", "--index-topk-freq", "4", "--tag=-mlp=256"])
    assert case(args, "auto", "decode", point) == f"{want} freq=4 mtp=1 mlp=256"


def test_rows_are_medians_over_starts_and_off_is_its_own_control(decode: ModuleType, tmp_path: Path) -> None:
    args = arguments(decode, tmp_path)
    key = "B=4 ctx=4096"
    found = {
        "off": [start({key: timed(100)}), start({key: timed(104)})],
        "wk": [start({key: timed(98)})],
        "full": [start({key: timed(90, 40, 0.5)}), start({key: timed(94, 42, 0.7)})],
    }
    rows = {(row["case"].split()[0], row["metric"]): row for row in decode.time_rows(args, found)}
    full = rows["mode=full", "graph"]
    assert (full["baseline"], full["ours"], full["ratio"]) == (102, 92, pytest.approx(102 / 92))
    assert full["baseline_starts"] == [100, 104] and full["runs"] == 2 * args.steps
    assert rows["mode=off", "graph"]["ratio"] == pytest.approx(100 / 104)
    assert rows["mode=full", "attention block"]["ratio"] == pytest.approx(50 / 41)
    assert rows["mode=full", "step"]["ours"] == 592
    assert rows["mode=full", "overlap fraction"]["ours"] == pytest.approx(0.6)
    assert rows["mode=full", "overlap fraction"]["ratio"] is None
    assert rows["mode=wk", "graph_MiB"]["ours"] == 120.0
    json.dumps(list(rows.values()), allow_nan=False)


def test_eager_starts_have_no_graph_rows(decode: ModuleType, tmp_path: Path) -> None:
    args = arguments(decode, tmp_path, "--profile", "0", "--modes", "off,full")
    eager = {"graph_us": [], "step_us": 900.0, "steps": 3}
    point = {"B=4 ctx=4096": eager}
    rows = decode.time_rows(args, {"off": [start(point)], "full": [start(point)]})
    assert [row["metric"] for row in rows] == ["step", "graph_MiB"]


def test_traces_without_blocks_have_no_block_rows(decode: ModuleType, tmp_path: Path) -> None:
    args = arguments(decode, tmp_path, "--modes", "off,full")
    off, full = timed(100), timed(90, together=0.25)
    del off["block_us"], full["block_us"]
    rows = decode.time_rows(
        args, {"off": [start({"B=4 ctx=4096": off})], "full": [start({"B=4 ctx=4096": full})]}
    )
    assert [row["metric"] for row in rows] == ["graph", "step", "overlap fraction", "graph_MiB"]
    assert (rows[2]["baseline"], rows[2]["ours"]) == (0.0, 0.25)


def checked(*hashes: str, tokens: int = 5) -> dict[str, Any]:
    return {"logits": [f"{name} 1.5" for name in hashes], "tokens": [[tokens]]}


def test_check_rows_count_steps_with_equal_bits(decode: ModuleType, tmp_path: Path) -> None:
    args = arguments(decode, tmp_path)
    found = {
        "off": [start({"B=1 ctx=700": checked("a", "b")})],
        "wk": [start({"B=1 ctx=700": checked("a", "b")})],
        "full": [start({"B=1 ctx=700": checked("a", "c", tokens=6)})],
    }
    rows = [(row["case"].split()[0], row["metric"], row["ours"]) for row in decode.check_rows(args, found)]
    assert rows == [
        ("mode=wk", "equal logits", 1.0),
        ("mode=wk", "equal tokens", 1.0),
        ("mode=full", "equal logits", 0.5),
        ("mode=full", "equal tokens", 0.0),
    ]
    assert decode.varied(found["off"][0])
    assert not decode.varied(start({"p": checked("a", "a", "a", "a")}))
    assert not decode.varied(start({"p": {"logits": ["a 0"], "tokens": []}}))


CHILD = """
import json, os, sys
from pathlib import Path
log = Path(sys.argv[sys.argv.index("--raw") + 1], "log")
file = Path(sys.argv[sys.argv.index("--child") + 1])
mode = os.environ["VLLM_INDEXER_OVERLAP"]
log.write_text((log.read_text() if log.exists() else "") + mode + " ")
if mode == "full" and not Path(log.parent, "works").exists():
    sys.exit(1)
point = {"graph_us": [1.0], "step_us": 1.0}
file.write_text(json.dumps({"points": {"B=4 ctx=4096": point}, "graph_MiB": [], "complete": True}))
"""


def test_starts_take_turns_and_what_is_measured_is_not_measured_again(
    decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(CHILD)
    monkeypatch.setattr(decode, "__file__", str(fake))
    out = tmp_path / "overlap" / "rows.json"
    raw = tmp_path / "raw"
    command = ["time", "--batch", "4", "--context", "4096", "--long-batch", "", "--profile", "0"]
    command += ["--raw", str(raw), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["e2e_decode.py", *command])
    assert decode.main(command) == 1
    assert "2 engine starts failed" in capsys.readouterr().err
    assert (raw / "log").read_text() == "off wk full off wk full "
    (raw / "works").touch()
    assert decode.main(command) == 0
    assert (raw / "log").read_text() == "off wk full off wk full full full "
    rows = json.loads(out.read_text())["rows"]
    assert {row["case"].split()[0] for row in rows} == {"mode=off", "mode=wk", "mode=full"}
    assert decode.main(["rows", *command[1:]]) == 0
    assert (raw / "log").read_text() == "off wk full off wk full full full "


class Turns:
    """An engine and its modes that only note what they are told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.mode = ""

    def capture(self, name: str, mode: str, late: str = "") -> dict[str, Any]:
        self.log.append(f"capture {name} {mode} {late}".rstrip())
        self.use(name)
        return {"graph_MiB": 7.0, "forks": []}

    def use(self, name: str) -> None:
        self.mode = name

    def time(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        self.log.append(f"time {self.mode} {batch} {context}")
        took = 90.0 if "full" in self.mode else 100.0
        return {"graph_us": [took], "step_us": 500.0, "steps": steps}

    def profile(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        self.log.append(f"profile {self.mode} {batch} {context}")
        return {"blocks": 1, "streams": 2, "block_us": 40.0, "together": 0.5, "kernels": []}

    def check(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        return checked("a", "a" if self.mode == "full+side-end" else "b")


def in_turn(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> tuple[Any, Turns]:
    """Run the one engine start of ``--in-process`` on `Turns`."""
    told = importlib.import_module("decode_child")
    monkeypatch.setattr(told, "finish", lambda result, file: file.write_text(json.dumps(result)))
    args, turns = decode.parser().parse_args(command), Turns()
    plan = told.Plan(
        {}, decode.points(args), decode.LATE_CHECKS, decode.EXACT_CHECKS, 2, decode.variants(args)
    )
    run = told.check_in_turn if args.what == "check" else told.time_in_turn
    if args.what == "check":
        counters = type(sys)("vllm.dsa")
        counters.counters = type("Counters", (), {"snapshot": staticmethod(lambda name: [])})
        monkeypatch.setitem(sys.modules, "vllm", type(sys)("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.dsa", counters)
    run(
        args,
        plan,
        lambda name, number: decode.raw_file(args, name, number),
        turns,
        turns,
        {"torch": "2.14.0", "card": "NVIDIA H200"},
    )
    return args, turns


def test_modes_take_turns_in_one_engine(
    decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["time", "--in-process", "--batch", "1,4", "--context", "4096", "--long-batch", ""]
    command += ["--modes", "off,full", "--profile-batch", "4", "--raw", str(tmp_path)]
    args, turns = in_turn(decode, monkeypatch, command)
    assert turns.log == [
        *("capture off 0 off", "capture full 0 full", "capture full 1 full", "capture off 1 off"),
        *("time off 0 1 4096", "time full 0 1 4096", "time full 1 1 4096", "time off 1 1 4096"),
        *("time off 0 4 4096", "time full 0 4 4096", "time full 1 4 4096", "time off 1 4 4096"),
        *("profile off 0 4 4096", "profile full 0 4 4096"),
    ]
    rows = decode.time_rows(args, decode.starts(args))
    found = {(r["case"].split()[0], r["case"].split()[5], r["metric"]): r["ours"] for r in rows}
    assert found["mode=full", "B=1", "graph"] == found["mode=full", "B=4", "graph"] == 90
    assert found["mode=full", "B=4", "overlap fraction"] == 0.5
    assert ("mode=full", "B=1", "overlap fraction") not in found
    assert decode.about(args, {})["in_process"] is True


def test_auto_takes_its_turn_when_the_rest_is_measured(
    decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows what the same engine measured."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(BENCH.parent / "overlay"))
    auto, measured = (importlib.import_module(f"vllm.dsa.overlap.{name}") for name in ("auto", "measured"))
    monkeypatch.setattr(measured, "MEASURED", ())
    command = ["time", "--in-process", "--batch", "1,4", "--context", "4096,8192,32768", "--long-batch", ""]
    command += ["--modes", "off,full,auto", "--profile", "0", "--raw", str(tmp_path)]
    args, turns = in_turn(decode, monkeypatch, command)
    begin = turns.log.index("capture auto 0 auto")
    assert turns.log[begin + 1] == "capture auto 1 auto"
    assert len(turns.log) == begin + 2 + 2 * 6 and not any("auto" in line for line in turns.log[:begin])
    known = auto.Entry("0.33.0", "h200", 16, 64, "FULL", ((1, "full"), (4, "full")))
    assert (known,) == measured.MEASURED and auto.CHECKED_IN_ENGINE
    rows = decode.time_rows(args, decode.starts(args))
    assert {row["case"].split()[0] for row in rows} == {f"mode={mode}" for mode in args.modes}
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_rows_of_an_order_that_is_gone_are_nothing_auto_would_choose(
    decode: ModuleType, tmp_path: Path
) -> None:
    table = importlib.import_module("overlap_table")
    args = arguments(decode, tmp_path, "--modes", "off,full.old")
    timings = {f"B=4 ctx={context}": timed(100) for context in (4096, 8192, 32768)}
    faster = {point: timed(60) for point in timings}
    args.context = [4096, 8192, 32768]
    rows = decode.time_rows(args, {"off": [start(timings)], "full.old": [start(faster)]})
    found = table.collect([("0.33.0", "h200", rows)])
    (points,) = found.values()
    assert points[4].choice() == "off" and "full.old" in table.reasons(found)


def test_where_off_differs_from_itself_a_mode_has_to_agree_with_one_of_its_passes(
    decode: ModuleType, tmp_path: Path
) -> None:
    args = arguments(decode, tmp_path)
    args.what, args.in_process = "check", True
    found = {
        "off": [start({"p": checked("a", "b", "c", "d")})],
        "off+again": [start({"p": checked("a", "b", "c", "x")})],
        "wk": [start({"p": checked("a", "b", "c", "x")})],
        "full": [start({"p": checked("y", "b", "c", "x")})],
    }
    rows = [row for row in decode.check_rows(args, found) if row["metric"] == "equal logits"]
    seen = {row["case"].split()[0]: (row["ours"], row.get("off_passes")) for row in rows}
    assert seen == {
        "mode=wk": (1.0, [0.75, 1.0]),
        "mode=full": (0.75, [0.5, 0.75]),
        "mode=off": (0.75, None),
    }


def test_a_check_in_one_engine_holds_branches_up(
    decode: ModuleType,
    checks: list[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["check", "--in-process", "--late", "main-after,side-end", "--raw", str(tmp_path)]
    args, turns = in_turn(decode, monkeypatch, command)
    assert turns.log[-2:] == [
        "capture full+main-after full main-after",
        "capture full+side-end full side-end",
    ]
    rows = decode.check_rows(args, decode.starts(args))
    assert len(rows) == 2 * (3 * len(checks) + 2 * len(decode.LATE_CHECKS))
    assert sum(row["case"].startswith("mode=off phase=check") for row in rows) == 2 * len(checks)
    unequal = [row["case"] for row in rows if row["metric"] == "equal logits" and row["ours"] != 1.0]
    assert len(unequal) == len(decode.LATE_CHECKS) and all("late=side-end" in name for name in unequal)
    with pytest.raises(SystemExit):
        decode.main(["check", "--late", "side-end"])
    assert "--late, --exact-topk and --known-auto need --in-process" in capsys.readouterr().err


def test_off_may_run_several_times_and_with_a_determined_top_k(
    decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["check", "--in-process", "--modes", "off,full", "--off-passes", "2", "--exact-topk"]
    exact = importlib.import_module("exact_topk")
    monkeypatch.setattr(exact, "take", lambda: {"tied": 1, "rows": 9} if exact.on else pytest.fail("not on"))
    args, turns = in_turn(decode, monkeypatch, [*command, "--raw", str(tmp_path)])
    assert [line.split()[1] for line in turns.log if line.startswith("capture")] == [
        *("off", "full", "off+again", "off+again2", "off+exact", "full+exact", "off+again+exact")
    ]
    found = decode.starts(args)
    found["off+again2"][0]["points"]["B=1 ctx=700"] = checked("z", "b")
    found["full"][0]["points"]["B=1 ctx=700"] = checked("z", "b")
    found["full+exact"][0]["points"]["B=16 ctx=3000"] = checked("a", "y") | {"ties": {"tied": 1, "rows": 9}}
    rows = {row["case"]: row for row in decode.check_rows(args, found) if row["metric"] == "equal logits"}
    head = "phase=check heads=16 index=64 graph=FULL"
    full = rows[f"mode=full {head} B=1 ctx=700"]
    assert (full["ours"], full["off_passes"]) == (1.0, [0.5, 0.5, 1.0])
    assert [rows[f"mode=off {head} B=1 ctx=700{end}"]["ours"] for end in ("", " pass=2")] == [1.0, 0.5]
    determined = {case: row["ours"] for case, row in rows.items() if case.endswith("topk=exact")}
    assert determined == {
        f"mode=full {head} B=16 ctx=3000 topk=exact": 0.5,
        f"mode=full {head} B=2 ctx=20000 topk=exact": 1.0,
        f"mode=off {head} B=16 ctx=3000 topk=exact": 1.0,
        f"mode=off {head} B=2 ctx=20000 topk=exact": 1.0,
    }
    assert all(row["ties"]["rows"] == 9 for case, row in rows.items() if "topk" in case)


def test_an_auto_that_knows_takes_its_turn_with_the_others(
    decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = importlib.import_module("decode_child")
    acts: list[str] = []
    monkeypatch.setattr(told, "let_auto_act", lambda *_: acts.append("auto"))
    command = [
        "time",
        "--in-process",
        "--known-auto",
        "--batch",
        "4",
        "--context",
        "4096",
        "--long-batch",
        "",
    ]
    command += ["--modes", "off,full,auto", "--profile", "0", "--raw", str(tmp_path)]
    _, turns = in_turn(decode, monkeypatch, command)
    order = ["off 0", "full 0", "auto 0", "auto 1", "full 1", "off 1"]
    assert turns.log[6:] == [f"time {name} 4 4096" for name in order] and acts == ["auto"]


def test_off_is_needed(decode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for modes in ("wk,full", "off,fast"):
        with pytest.raises(SystemExit) as stopped:
            decode.main(["time", "--modes", modes])
        assert stopped.value.code == 2 and "with off in it" in capsys.readouterr().err


# --- the engine's arithmetic


def kernel(name: str, at: float, took: float, stream: int = 7) -> dict[str, Any]:
    return {"name": name, "ts": at, "dur": took, "args": {"stream": stream}, "cat": "kernel"}


def test_a_trace_is_read_block_by_block(engine: ModuleType) -> None:
    layer = [
        kernel("void vllm::fused_add_rms_norm_kernel", 0, 2),
        kernel("gemm qkv_a", 2, 10),
        kernel("gemm wk", 4, 6, stream=9),
        kernel("_fused_norm_rope_kernel", 12, 3),
        kernel("gemm o_proj", 15, 5),
        kernel("void vllm::fused_add_rms_norm_kernel", 20, 2),
        kernel("gemm mlp", 22, 30),
        kernel("gemm shared experts", 23, 30, stream=9),
    ]
    second = [event | {"ts": event["ts"] + 60} for event in layer]
    found = engine.look([*second, *layer])
    assert found == {"blocks": 2, "streams": 2, "block_us": 18, "together": pytest.approx(6 / 18)}
    split = [
        *layer,
        kernel("_fused_norm_rope_kernel", 10, 1, stream=9),
    ]  # full: the indexer's key on the side
    assert engine.look(split) == {
        "blocks": 1,
        "streams": 2,
        "block_us": 18,
        "together": pytest.approx(7 / 18),
    }
    unfused = [kernel("gemm", 0, 8), kernel("gemm", 6, 4, stream=9)]
    assert engine.look(unfused) == {"blocks": 0, "streams": 2, "together": pytest.approx(2 / 10)}
    assert engine.look([]) == {"blocks": 0, "streams": 0}


def test_the_kernels_of_the_last_step_are_listed(engine: ModuleType) -> None:
    events = [
        kernel("a", 0, 1),
        kernel("b", 2, 1, stream=9),
        kernel("a", 10, 1),
        kernel("b", 12, 1, stream=9),
    ]
    assert engine.listing(events, 2) == [[7, 0, 1, "a"], [9, 2, 1, "b"]]
    assert engine.listing([], 2) == []


def test_time_together(engine: ModuleType) -> None:
    assert engine.together([kernel("a", 0, 10), kernel("b", 10, 10)]) == 0
    assert engine.together([kernel("a", 0, 10), kernel("b", 5, 10), kernel("c", 6, 2)]) == 5


def test_prompts_differ_and_repeat(engine: ModuleType) -> None:
    assert engine.prompt(50, 3) == engine.prompt(50, 3) != engine.prompt(50, 4)
    assert len(engine.prompt(50, 3)["prompt_token_ids"]) == 50


def test_the_same_model_is_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is in the key of vLLM's compiled artifacts; a new one would have each start compile anew."""
    model = importlib.import_module("e2e_model")
    monkeypatch.setattr(model.tempfile, "tempdir", str(tmp_path))
    first = model.write_config(16, 64, 3, {"a": 1})
    assert model.write_config(16, 64, 3, {"a": 1}) == first != model.write_config(16, 64, 3, {"a": 2})
    file = Path(first, "config.json")
    written = file.read_text()
    assert json.loads(written)["num_attention_heads"] == 16 and json.loads(written)["a"] == 1
    file.write_text(written[:20])  # of a start that was cut off
    model.write_config(16, 64, 3, {"a": 1})
    assert file.read_text() == written and list(Path(first).iterdir()) == [file]


# --- two ranks


def test_two_ranks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tp = importlib.import_module("overlap_tp")
    about = {"world": 2, "heads": 16, "index_heads": 64, "graph": "FULL", "torch": "2.14.0"}
    for mode, name in (("off", "a"), ("full", "a"), ("wk", "b")):
        data = about | {"mode": mode, "points": {"B=1 ctx=3000": checked(name, tokens=ord(name))}}
        (tmp_path / f"{mode}.json").write_text(json.dumps(data))
    off, full, wk = (str(tmp_path / f"{mode}.json") for mode in ("off", "full", "wk"))
    out = tmp_path / "rows.json"
    assert tp.main(["--compare", off, full, "--out", str(out)]) == 0
    assert tp.main(["--compare", off, wk]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["case"] == "mode=full phase=check heads=16 index=64 graph=FULL B=1 ctx=3000 tp=2"
    assert [row["ours"] for row in rows] == [1.0, 1.0]
    data = about | {"mode": "off", "points": {"B=1 ctx=3000": checked("b", tokens=ord("b"))}}
    (tmp_path / "again.json").write_text(json.dumps(data | {"tag": " budget=1024"}))
    assert tp.main(["--compare", off, wk, "--out", str(out)]) == 0  # off differs from itself
    rows = json.loads(out.read_text())["rows"][2:]
    assert [(row["ours"], row["off_passes"]) for row in rows] == [(1.0, [0.0, 1.0])] * 2 + [(0.0, [0.0])] * 2
    assert (
        rows[2]["case"] == "mode=off phase=check heads=16 index=64 graph=FULL B=1 ctx=3000 tp=2 budget=1024"
    )
    with pytest.raises(SystemExit):
        tp.main(["--mode", "off"])
    assert "--tokens" in capsys.readouterr().err
