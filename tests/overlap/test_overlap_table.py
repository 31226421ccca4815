"""bench/overlap_table.py: from measured rows to what ``auto`` knows."""

from __future__ import annotations

import importlib
import json
import runpy
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("overlap_table")


def results(folder: Path, ratios: dict[tuple[str, int], list[float]], graph: str = "FULL") -> None:
    """Rows of one card: (mode, batch) -> ratios at 4k, 8k and 32k; off is quiet unless it is among them."""
    rows: list[dict[str, Any]] = []
    quiet = {("off", batch): [1.0, 1.0, 1.0] for _, batch in ratios}
    for (mode, batch), found in (quiet | ratios).items():
        for context, ratio in zip((4096, 8192, 32768), found, strict=False):
            case = f"mode={mode} phase=decode heads=16 index=64 graph={graph} B={batch} ctx={context}"
            rows.append({"case": case, "metric": "graph", "ratio": ratio})
            rows.append({"case": case, "metric": "step", "ratio": 9.0})
            rows.append({"case": f"{case} freq=4", "metric": "graph", "ratio": 9.0})
    folder.mkdir(exist_ok=True)
    (folder / "0.33.0-h200.json").write_text(json.dumps({"line": "0.33.0", "card": "h200", "rows": rows}))


def choices(table: ModuleType, folder: Path) -> dict[int, str]:
    return {
        batch: point.choice() for points in table.read(folder).values() for batch, point in points.items()
    }


def test_the_stored_table_is_what_the_results_give(table: ModuleType) -> None:
    assert table.main(["--check"]) == 0


SHAPES = [(16, 64), (8, 32)]
POINTS = [(batch, context) for context in (4096, 8192, 32768) for batch in (1, 4, 16, 32, 64)]
POINTS += [(1, 131072), (4, 131072)]


def stored(table: ModuleType, metric: str, mode: str, heads: int, index: int) -> dict[str, dict[str, Any]]:
    """Rows of line 0.33.0 on the H200, by batch and context; fails where a point is missing."""
    rows = json.loads((table.RESULTS / "0.33.0-h200.json").read_text())["rows"]
    head = f"mode={mode} phase=decode heads={heads} index={index} graph=FULL_DECODE_ONLY "
    found = {
        r["case"].removeprefix(head): r for r in rows if r["case"].startswith(head) and r["metric"] == metric
    }
    return {point: found[point] for point in (f"B={batch} ctx={context}" for batch, context in POINTS)}


def points_where_auto_is_as_good(
    table: ModuleType, heads: int, index: int, weights: str
) -> tuple[dict[int, Any], float]:
    """Of line 0.33.0 on the H200, with the noise; fails where a fixed mode is better than auto beyond it."""
    points = table.read(table.RESULTS)["0.33.0", "h200", heads, index, "FULL", weights]
    worst, noise = table.auto_gap(points)
    assert worst >= 1 - noise and noise < 0.02
    return points, noise


@pytest.mark.parametrize(("heads", "index"), SHAPES)
def test_stored_rows_show_full_faster_with_fp8_weights_and_auto_as_good(
    table: ModuleType, heads: int, index: int
) -> None:
    points, noise = points_where_auto_is_as_good(table, heads, index, "fp8")
    full = {
        (batch, context): ratio
        for batch, point in points.items()
        for context, ratio in point.ratios["full"].items()
    }
    assert len(full) == 15 and min(full.values()) > 1 + noise


@pytest.mark.parametrize(("heads", "index"), SHAPES)
def test_stored_rows_show_full_faster_at_every_point_and_auto_as_good(
    table: ModuleType, heads: int, index: int
) -> None:
    _, noise = points_where_auto_is_as_good(table, heads, index, "")
    full = stored(table, "graph", "full", heads, index)
    assert min(row["ratio"] for row in full.values()) > 1 + noise
    blocks = stored(table, "attention block", "full", heads, index)
    assert statistics.median(row["ratio"] for row in blocks.values()) >= 1.05
    for mode in ("full", "auto"):
        for row in stored(table, "overlap fraction", mode, heads, index).values():
            assert row["ours"] > 2 * row["baseline"] and row["streams"] == [2]


def test_auto_acts_only_where_an_engine_gave_the_results_of_off(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape and kind of weights that auto knows needs the rows of a check, of auto and of `full`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(ROOT / "overlay"))
    auto, measured = (importlib.import_module(f"vllm.dsa.overlap.{name}") for name in ("auto", "measured"))
    entries = list(measured.MEASURED)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    assert {entry.line for entry in entries} >= auto.CHECKED_IN_ENGINE
    for entry in entries:
        file = table.RESULTS / f"{entry.line}-{entry.card}.json"
        shape = f"phase=check heads={entry.heads} index={entry.index_heads} "
        rows = [row for row in json.loads(file.read_text())["rows"] if shape in row["case"]]
        rows = [row for row in rows if weights(row) == entry.weights and " kernel=" not in row["case"]]
        if entry.line in auto.CHECKED_IN_ENGINE:
            assert [row for row in rows if "mode=auto " in row["case"]], "auto itself must have run there"
        if entry.line == "0.28.0":
            demand_of_compiled(rows)
            if entry.line in auto.CHECKED_IN_ENGINE:
                demand_of_auto(rows, combos=entry.heads == 16)
            continue
        unsteady = {tail(row) for row in rows if "mode=off " in row["case"] and row["ours"] != 1.0}
        for mode in ("auto", "full"):
            ours = [row for row in rows if f"mode={mode} " in row["case"] and row["forked"] > 0]
            steady = [row for row in ours if tail(row) not in unsteady]
            assert len({tail(row) for row in steady}) >= 5
            assert all(row["ours"] == 1.0 for row in steady)
            assert all(row["ours"] == 1.0 for row in ours if row["metric"] == "equal tokens")
        held_up = {row["case"].rpartition("late=")[2] for row in rows if "late=" in row["case"]}
        assert held_up >= {"main-before", "main-after", "side-begin", "side-end"}


#: Two requests whose top-k upstream takes from equal scores, so that two passes of `off` differ too.
TIES = "B=2 ctx=20000"
#: That point aside, the batches of a check, and those with a branch held up.
CHECKED, HELD_UP = 5, 3
#: And those of 256 and 512 requests, which auto was checked with.
LARGER = 2


def demand_of_compiled(rows: list[dict[str, Any]]) -> None:
    """`full` forked is `full` on one stream, and without combo kernels it is `off`."""
    full = [row for row in rows if "mode=full " in row["case"] and " mtp=" not in row["case"]]
    full = [row for row in full if " graph=FULL_AND_PIECEWISE " in row["case"] and TIES not in row["case"]]
    of: dict[str, list[float]] = {}
    for row in full:
        control = row["case"].partition("control=")[2]
        options = "combo=off" if "combo=off" in row["case"] else ""
        of.setdefault(f"{options} {control}".strip(), []).append(row["ours"])
    for same, batches in (
        *(("again", CHECKED), ("serial", CHECKED), ("combo=off", CHECKED), ("combo=off again", CHECKED)),
        *(("main-after", HELD_UP), ("side-begin", HELD_UP)),
    ):
        assert of[same] == [1.0] * (2 * batches), same  # logits and tokens


def demand_of_auto(rows: list[dict[str, Any]], combos: bool) -> None:
    """`auto`, which forked, is `off` without combo kernels, and itself in every control.

    Args:
        rows: of one shape.
        combos: whether it was compared with itself with combo kernels too.
    """
    auto = [row for row in rows if "mode=auto " in row["case"] and " mtp=" not in row["case"]]
    auto = [row for row in auto if " graph=FULL_AND_PIECEWISE " in row["case"] and TIES not in row["case"]]
    of: dict[tuple[str, str], list[float]] = {}
    for row in auto:
        options = "combo=off" if "combo=off" in row["case"] else ""
        of.setdefault((options, row["case"].partition("control=")[2]), []).append(row["ours"])
    assert all(row["forked"] > 0 for row in auto if "control=" not in row["case"])
    late = ("main-before", "main-after", "side-begin", "side-end")
    for options, batches in (("combo=off", CHECKED + LARGER), ("", CHECKED))[: 2 if combos else 1]:
        for control in ("again", "serial", *late):
            assert of[options, control] == [1.0] * (2 * (HELD_UP if control in late else batches)), control
    assert of["combo=off", ""] == [1.0] * (2 * (CHECKED + LARGER))


def weights(row: dict[str, Any]) -> str:
    """What a case says of quantised weights: `vllm.dsa.overlap.auto.Entry.weights`."""
    return str(row["case"].partition(" quant=")[2].partition(" ")[0])


def tail(row: dict[str, Any]) -> str:
    """Batch, context and options of a check, without mode and pass of off."""
    return str(row["case"].partition(" B=")[2].partition(" pass=")[0])


def test_a_choice_is_slower_nowhere_and_clearly_faster(table: ModuleType, tmp_path: Path) -> None:
    results(
        tmp_path,
        {
            ("wk", 1): [1.02, 1.02, 1.01],
            ("full", 1): [1.06, 1.05, 1.02],  # the best
            ("wk", 4): [1.02, 1.02, 1.01],  # the best that loses nowhere
            ("full", 4): [0.97, 1.09, 1.09],
            ("wk", 16): [1.003, 1.004, 1.002],  # within half a percent
            ("full", 16): [1.06, 1.05],  # too few contexts
            ("off", 32): [0.98, 1.01, 1.0],  # noise of 2 percent
            ("full", 32): [0.99, 1.019, 1.018],
            ("off", 64): [0.98, 1.01, 1.0],
            ("full", 64): [0.985, 1.05, 1.04],
        },
    )
    assert choices(table, tmp_path) == {1: "full", 4: "wk", 16: "off", 32: "off", 64: "full"}


def test_without_a_control_of_off_nothing_is_chosen(table: ModuleType, tmp_path: Path) -> None:
    """One engine start of off says nothing of how far two of them differ."""
    gains = [1.06, 1.05, 1.02]
    results(tmp_path, {("off", 1): [], ("full", 1): gains, ("off", 4): [1.0, 1.0], ("full", 4): gains})
    assert choices(table, tmp_path) == {1: "off", 4: "off"}
    assert "off was not compared with itself" in table.reasons(table.read(tmp_path))


def test_auto_is_compared_with_the_best_fixed_mode(table: ModuleType, tmp_path: Path) -> None:
    measured = {
        ("off", 1): [1.002, 0.98, 1.0],
        ("wk", 1): [0.99, 1.05, 1.0],
        ("full", 1): [0.98, 1.04, 1.1],
        ("auto", 1): [1.0, 1.05, 1.045],
    }
    results(tmp_path, measured)
    (points,) = table.read(tmp_path).values()
    assert table.auto_gap(points) == pytest.approx((1.045 / 1.1, 0.02))
    assert "auto took at most 1.053 times the best fixed mode; noise 0.020" in table.reasons(
        table.read(tmp_path)
    )
    results(tmp_path, {("full", 1): [1.0, 1.0, 1.0]})
    (points,) = table.read(tmp_path).values()
    assert table.auto_gap(points) is None


def test_the_newest_row_of_a_case_counts(table: ModuleType, tmp_path: Path) -> None:
    results(tmp_path, {("full", 1): [1.06, 1.05, 1.02]})
    file = tmp_path / "0.33.0-h200.json"
    data = json.loads(file.read_text())
    data["rows"] += [row | {"ratio": 0.9} for row in data["rows"]]
    file.write_text(json.dumps(data))
    assert choices(table, tmp_path) == {1: "off"}


def test_what_is_written_is_what_auto_reads(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {("full", 1): [1.06, 1.05, 1.02], ("wk", 16): [1.0, 1.0, 1.0]}
    results(tmp_path / "results", measured, graph="FULL_DECODE_ONLY")
    written = tmp_path / "measured.py"
    written.write_text("")
    where = ["--results", str(tmp_path / "results"), "--table", str(written)]
    assert table.main([*where, "--check"]) == 1
    assert "--write" in capsys.readouterr().err
    assert table.main([*where, "--write"]) == 0 and table.main([*where, "--check"]) == 0
    monkeypatch.syspath_prepend(str(ROOT / "overlay"))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    (entry,) = runpy.run_path(str(written))["MEASURED"]
    assert (entry.line, entry.card, entry.heads, entry.index_heads, entry.graph) == (
        "0.33.0",
        "h200",
        16,
        64,
        "FULL",
    )
    assert [entry.mode(tokens).value for tokens in (1, 2, 16, 64)] == ["full", "off", "off", "off"]
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_quantised_weights_are_an_entry_of_their_own(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(tmp_path / "results", {("full", 1): [1.06, 1.05, 1.02]})
    file = tmp_path / "results" / "0.33.0-h200.json"
    data = json.loads(file.read_text())
    slower = {"full": 0.9, "off": 1.0}
    for row in [row for row in data["rows"] if row["metric"] == "graph" and "freq" not in row["case"]]:
        ratio = slower[row["case"].split()[0].removeprefix("mode=")]
        data["rows"].append(row | {"case": f"{row['case']} quant=fp8", "ratio": ratio})
    file.write_text(json.dumps(data))
    written = tmp_path / "measured.py"
    where = ["--results", str(tmp_path / "results"), "--table", str(written), "--write"]
    assert table.main(where) == 0 and "fp8" not in written.read_text()
    for row in [row for row in data["rows"] if row["case"].endswith("quant=fp8") and row["ratio"] == 0.9]:
        row["ratio"] = 1.05
    file.write_text(json.dumps(data))
    assert table.main(where) == 0
    monkeypatch.syspath_prepend(str(ROOT / "overlay"))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    entries = runpy.run_path(str(written))["MEASURED"]
    assert [(entry.weights, entry.points) for entry in entries] == [
        ("", ((1, "full"),)),
        ("fp8", ((1, "full"),)),
    ]
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_nothing_better_than_off_gives_no_entry(table: ModuleType, tmp_path: Path) -> None:
    results(tmp_path, {("full", 1): [0.9, 0.9, 0.9]})
    assert "MEASURED: tuple[Entry, ...] = ()" in table.text(table.entries(table.read(tmp_path)))
