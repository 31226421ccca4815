"""Comparison of two runs: every kind of difference, what re-runs decide, and what makes a mode fail."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from synthetic_tree import Runs

from vllm_series.baseline import diff as diffing
from vllm_series.baseline import quarantine, render
from vllm_series.baseline.diff import Diff, Kind, classify, compare, confirm
from vllm_series.baseline.engine import FileRunner, Limits, run_files
from vllm_series.baseline.outcome import OUTCOMES, Node, Run
from vllm_series.errors import CheckFailed

UPSTREAM = """
    import pathlib, pytest
    def test_same(): pass
    def test_broken(): assert 0
    def test_breaks(): pass
    def test_mended(): assert 0
    def test_lost(): pass
    @pytest.mark.skip(reason="one")
    def test_reason(): pass
    def test_now_skipped(): pass
    def test_dies(): pass
    def test_unsteady(): pass
"""
PATCHED = """
    import os, pathlib, pytest
    def test_same(): pass
    def test_broken(): assert 1 == 0
    def test_breaks(): raise ValueError("planted")
    def test_mended(): pass
    def test_added(): pass
    @pytest.mark.skip(reason="two")
    def test_reason(): pass
    @pytest.mark.skip(reason="new")
    def test_now_skipped(): pass
    def test_dies(): os.abort()
    def test_unsteady():
        mark = pathlib.Path(os.environ["COUNTER"])
        mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
        assert len(mark.read_text()) % 2 == 0
"""


def again(runner: FileRunner) -> diffing.Again:
    def run(wanted: Mapping[str, list[str]]) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for file, nodes in wanted.items():
            found.update(run_files(runner, [file], 1, only={file: nodes} if nodes else None)[file].nodes)
        return found

    return run


@pytest.fixture
def compared(
    runs: Runs, site: Callable[..., Path], tmp_path: Path
) -> Callable[[bool], tuple[Diff, Run, Run]]:
    def make(exact: bool) -> tuple[Diff, Run, Run]:
        env = {"COUNTER": str(tmp_path / "counter")}
        one, two = site("up", {"test_a.py": UPSTREAM}), site("patched", {"test_a.py": PATCHED})
        before, after = runs.run(one), runs.run(two, "off" if exact else "on", env=env)
        found = compare(before, after, exact=exact)
        limits = Limits(20, 60)
        confirm(found, again(runs.runner(one, limits)), again(runs.runner(two, limits, env=env)))
        return found, before, after

    return make


def kinds(found: Diff) -> dict[str, Kind]:
    return {row.node.rpartition("::")[2]: row.kind for row in found.rows}


def test_every_kind(compared: Callable[[bool], tuple[Diff, Run, Run]]) -> None:
    found, _, _ = compared(False)
    assert kinds(found) == {
        "test_same": Kind.SAME,
        "test_broken": Kind.BROKEN_UPSTREAM,
        "test_breaks": Kind.REGRESSION,
        "test_mended": Kind.FIXED,
        "test_lost": Kind.MISSING,
        "test_added": Kind.NEW,
        "test_reason": Kind.SKIP_CHANGED,
        "test_now_skipped": Kind.SKIP_CHANGED,
        "test_dies": Kind.REGRESSION,
        "test_unsteady": Kind.FLAKY,
    }
    assert {row.node.rpartition("::")[2] for row in found.failing()} == {
        "test_breaks",
        "test_dies",
        "test_lost",
        "test_now_skipped",
    }
    assert all(len(row.again) == 3 for row in found.rows if row.first is not None)
    broken = next(row for row in found.rows if row.node.endswith("test_broken"))
    assert broken.note == "the message changed"


def test_off_must_equal_upstream_and_reports_say_so(
    compared: Callable[[bool], tuple[Diff, Run, Run]], tmp_path: Path
) -> None:
    found, before, after = compared(True)
    names = {row.node.rpartition("::")[2] for row in found.failing()}
    assert names == {
        "test_breaks",
        "test_dies",
        "test_lost",
        "test_now_skipped",
        "test_mended",
        "test_added",
        "test_reason",
    }
    paths = render.write_all(found, (before, after), tmp_path / "reports")
    text, data, suite = (
        paths[0].read_text(),
        json.loads(paths[1].read_text()),
        ElementTree.parse(paths[2]).getroot(),
    )
    assert "FAILED (7 differ)" in text and "ValueError: planted" in text
    assert data["ok"] is False and len(data["failing"]) == 7 and data["counts"]["SAME"] == 1
    assert suite.get("failures") == "7" and len(suite.findall(".//failure")) == 7
    console = Console(record=True, width=200)
    render.show(found, console)
    assert "REGRESSION" in console.export_text()


def test_a_failure_that_needs_its_file_is_confirmed(runs: Runs, site: Callable[..., Path]) -> None:
    """test_second fails only after test_first: alone it passes, so the whole file has to run again."""
    body = "import sys\ndef test_first(): sys.mark = {mark}\ndef test_second(): assert not sys.mark\n"
    one, two = (
        site("up", {"test_a.py": body.format(mark=0)}),
        site("patched", {"test_a.py": body.format(mark=1)}),
    )
    found = compare(runs.run(one), runs.run(two, "on"), exact=False)
    limits = Limits(20, 60)
    confirm(found, again(runs.runner(one, limits)), again(runs.runner(two, limits)))
    assert kinds(found)["test_second"] is Kind.REGRESSION
    assert next(row for row in found.rows if row.node.endswith("second")).note == "re-run with its whole file"


@pytest.mark.parametrize("before", sorted(OUTCOMES))
@pytest.mark.parametrize("after", sorted(OUTCOMES))
def test_no_way_from_good_to_bad_is_called_the_same(before: str, after: str) -> None:
    kind = classify(Node(before), Node(after))
    bad = {"failed", "error", "crash", "timeout", "killed"}
    if before == after == "left_out":
        assert kind is Kind.SAMPLED
    elif {"not_run", "left_out"} & {before, after}:
        assert kind is Kind.NOT_COMPARED
    elif after in bad:
        assert kind is (Kind.BROKEN_UPSTREAM if before in bad else Kind.REGRESSION)
    elif before == after:
        assert kind is Kind.SAME
    else:
        assert kind not in (Kind.SAME, Kind.BROKEN_UPSTREAM)


def run_of(nodes: Mapping[str, Node], mode: str = "on", **other: object) -> Run:
    from vllm_series.baseline.outcome import FileRun

    run = Run("0.33.0", mode, "t", {}, {"cpu": "a", "cores": 2, **other})
    run.files = {"tests/test_a.py": FileRun(1.0, 1.0, 1, dict(nodes))}
    return run


def test_runs_of_two_machines_are_refused_unless_forced() -> None:
    nodes = {"tests/test_a.py::test_x": Node("passed")}
    one, two = run_of(nodes, "upstream"), run_of(nodes, cpu="b", torch="2")
    with pytest.raises(CheckFailed, match="cpu: a / b") as caught:
        compare(one, two, exact=True)
    assert "--force" in caught.value.fix
    forced = compare(one, two, exact=True, force=True)
    assert forced.forced == ["cpu: a / b", "torch: None / 2"] and not forced.failing()


def test_runs_of_different_files_are_refused() -> None:
    one, two = run_of({}, "upstream"), run_of({})
    two.files["tests/test_b.py"] = two.files["tests/test_a.py"]
    with pytest.raises(CheckFailed, match=r"test_b\.py"):
        compare(one, two, exact=False)


ENTRY = """
[[test]]
node = "tests/test_a.py::test_x"
line = "0.33.0"
rate = 0.1
runs = 30
reason = "races with the clock"
expires = 2026-12-31
"""


def test_quarantine_covers_one_node_of_one_line_only(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.toml"
    path.write_text(ENTRY)
    entries = quarantine.load(path, ["0.33.0"])
    bad = {name: Node("failed") for name in ("tests/test_a.py::test_x", "tests/test_a.py::test_y")}
    good = {name: Node("passed") for name in bad}
    found = compare(run_of(good, "upstream"), run_of(bad), exact=False)
    diffing.quarantine(found, entries)
    assert kinds(found) == {"test_x": Kind.QUARANTINED, "test_y": Kind.REGRESSION}
    assert [row.node for row in found.failing()] == ["tests/test_a.py::test_y"]
    other = compare(run_of(good, "upstream"), run_of(bad), exact=False)
    other.line = "0.28.0"
    diffing.quarantine(other, entries)
    assert Kind.QUARANTINED not in kinds(other).values()


def test_expired_quarantine_fails(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.toml"
    path.write_text(ENTRY)
    entries = quarantine.load(path, ["0.33.0"])
    quarantine.check_expired(entries, datetime.date(2026, 12, 31))
    with pytest.raises(CheckFailed, match="test_x"):
        quarantine.check_expired(entries, datetime.date(2027, 1, 1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("test_x", "test_*", "wildcard"),
        ("tests/test_a.py::test_x", "tests/test_a.py", "full node id"),
        ("0.33.0", "0.99.0", "not carried"),
        ("rate = 0.1", "rate = 1.0", "between 0 and 1"),
        ("runs = 30", "runs = 2", "at least 3"),
        ("expires = 2026-12-31", 'expires = "2026-12-31"', "TOML date"),
        ("races with the clock", " ", "reason"),
        ("rate = 0.1", "", "rate"),
        ("[[test]]", "[[test]", "not valid TOML"),
        (ENTRY, ENTRY + ENTRY, "twice"),
    ],
)
def test_wrong_quarantine_entries_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "quarantine.toml"
    path.write_text(ENTRY.replace(old, new, 1))
    with pytest.raises(CheckFailed, match=says):
        quarantine.load(path, ["0.33.0"])


def test_the_projects_own_quarantine_is_valid() -> None:
    root = Path(__file__).parents[2]
    lines = [path.stem for path in (root / "pins").glob("*.toml")]
    assert (root / "quarantine.toml").is_file()
    quarantine.load(root / "quarantine.toml", lines)


def test_a_file_that_was_cut_off_before_collection_is_not_called_missing() -> None:
    nodes = {"tests/test_a.py::test_x": Node("passed"), "tests/test_a.py::test_y": Node("failed")}
    cut = {
        "tests/test_a.py": Node("not_run", "the limit of the file was reached before its tests were known")
    }
    for one, two in ((nodes, cut), (cut, nodes)):
        found = compare(run_of(one, "upstream"), run_of(two), exact=True)
        assert {row.kind for row in found.rows} == {Kind.NOT_COMPARED} and not found.failing()
