"""`series baseline diff` on saved runs: exit codes, reports, refusals. It needs no tree and no torch."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vllm_series.baseline.outcome import FileRun, Node, Run
from vllm_series.baseline.session import result_name

ROOT = Path(__file__).parents[2]
LINE = "0.33.0"
FILE = "tests/test_a.py"
GONE = "error: ModuleNotFoundError: No module named 'lighthouse.lamp'"
UPSTREAM = {
    "test_x": Node("passed"),
    "test_y": Node("failed", "AssertionError"),
    "test_z": Node("skipped", "Skipped: FlashInfer is not installed"),
    **{f"test_{n}": Node("error", GONE) for n in range(20)},
}
Compare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A checkout's pins and nothing else; saved runs go into ``saved/``."""
    shutil.copytree(ROOT / "pins", tmp_path / "pins")
    (tmp_path / "patches").mkdir()
    return tmp_path


def save(root: Path, mode: str, other: dict[str, Node], **machine: object) -> None:
    nodes = {f"{FILE}::{name}": node for name, node in {**UPSTREAM, **other}.items()}
    run = Run(LINE, mode, "t" * 40, {}, {"cpu": "a", "cores": 2, **machine}, {FILE: FileRun(1, 1, 1, nodes)})
    run.save(root / "saved" / result_name(mode))


def diff(root: Path, *options: str, modes: str = "on") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "vllm_series.cli", "--root", str(root), "baseline", "diff", LINE]
    argv += ["--saved", "--results", str(root / "saved"), "--no-confirm", "--modes", modes, *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_equal_runs_pass_and_what_is_missing_is_named_once(results: Path) -> None:
    for mode in ("upstream", "off", "on"):
        save(results, mode, {})
    done = diff(results, "--set", "gpu", modes="off,on")  # of a card elsewhere: none is needed here
    assert done.returncode == 0, done.stderr
    said = (
        "Packages that upstream's tests wanted and that are not installed: lighthouse (20), flashinfer (1)."
    )
    assert done.stderr.count("lighthouse") == 1 and said in done.stderr
    report = (results / f"build/baseline/reports/{LINE}-on.md").read_text()
    assert report.count(said) == 1 and "2 SAME, 21 BROKEN_UPSTREAM" in report


def test_runs_of_a_card_are_stored_where_there_is_none(results: Path) -> None:
    """The documented command after a lease runs nothing: how tests would be isolated is no matter."""
    for mode in ("upstream", "on"):
        save(results, mode, {}, gpu={"name": "NVIDIA H200", "count": 1})
    done = diff(results, "--set", "gpu", "--store")
    assert done.returncode == 0, done.stderr
    stored = json.loads((results / f"bench/results/upstream-tests/{LINE}-h200.json").read_text())
    assert stored["diffs"]["on"]["counts"]["SAME"] == 2


def test_a_regression_is_exit_code_7_with_reports_for_people_and_machines(results: Path) -> None:
    save(results, "upstream", {})
    save(results, "on", {"test_x": Node("crash", "SIGSEGV")})
    done = diff(results)
    assert done.returncode == 7
    assert f"series bisect {LINE} -- series baseline try {LINE} --mode on" in done.stderr
    folder = results / "build/baseline/reports"
    data = json.loads((folder / f"{LINE}-on.json").read_text())
    assert data["failing"] == [f"{FILE}::test_x"] and not data["ok"] and data["counts"]["REGRESSION"] == 1
    suite = ElementTree.parse(folder / f"{LINE}-on.xml").getroot()
    assert suite.get("failures") == "1" and suite.get("tests") == "23"
    assert "SIGSEGV" in (folder / f"{LINE}-on.md").read_text()
    printed = json.loads(diff(results, "--json").stdout.partition("\n}\n")[0] + "\n}")
    assert printed["ok"] is False and printed["diffs"][0]["failing"] == data["failing"]


def test_off_fails_where_on_does_not(results: Path) -> None:
    """A test that the patched tree mends is a difference: with VLLM_DSA=0 there must be none."""
    save(results, "upstream", {})
    for mode in ("off", "on"):
        save(results, mode, {"test_y": Node("passed")})
    assert diff(results).returncode == 0
    assert diff(results, modes="off").returncode == 7


def test_runs_of_two_machines_are_refused_unless_forced(results: Path) -> None:
    save(results, "upstream", {})
    save(results, "on", {}, cpu="b")
    done = diff(results)
    assert done.returncode == 1 and "cpu: a / b" in done.stderr and "--force" in done.stderr
    done = diff(results, "--force")
    assert done.returncode == 0
    assert "cpu: a / b" in (results / f"build/baseline/reports/{LINE}-on.md").read_text()


ENTRY = """
[[test]]
node = "{node}"
line = "{line}"
rate = 0.1
runs = 30
reason = "races with the clock"
expires = {day}
"""


@pytest.mark.parametrize(("days", "code"), [(1, 0), (-1, 1)])
def test_quarantine_holds_until_it_expires(results: Path, days: int, code: int) -> None:
    """A quarantined failure passes the mode; an expired entry fails it, even where the test holds again."""
    save(results, "upstream", {})
    save(results, "on", {"test_x": Node("failed", "AssertionError")} if days > 0 else {})
    day = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)
    entry = ENTRY.format(node=f"{FILE}::test_x", line=LINE, day=day.isoformat())
    (results / "quarantine.toml").write_text(entry)
    done = diff(results)
    assert done.returncode == code, done.stderr
    assert ("expired" in done.stderr) == (code == 1)


def test_a_run_that_is_not_there_is_named(results: Path) -> None:
    save(results, "upstream", {})
    done = diff(results)
    assert done.returncode == 1 and "on.json" in done.stderr and "series baseline run" in done.stderr
