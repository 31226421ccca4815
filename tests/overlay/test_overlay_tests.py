"""The comparison behind `series overlay-test`, on files that pytest wrote."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_series import overlay_tests
from vllm_series.errors import UsageError
from vllm_series.pins import load_pin
from vllm_series.workspace import Workspace

SUITE = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
@pytest.mark.parametrize("n", [1, 2])
def test_skip(n): pytest.skip("no GPU")
@pytest.mark.xfail
def test_xfail(): assert False
"""


def junit(folder: Path, suite: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "test_it.py").write_text(suite)
    report = folder / "junit.xml"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "test_it.py",
        ],
        cwd=folder,
        capture_output=True,
    )
    return overlay_tests.read_junit(report)


def test_outcomes_are_read_by_node(tmp_path: Path) -> None:
    assert junit(tmp_path / "a", SUITE) == {
        "test_it::test_good": "passed",
        "test_it::test_bad": "failed",
        "test_it::test_error": "error",
        "test_it::test_skip[1]": "skipped",
        "test_it::test_skip[2]": "skipped",
        "test_it::test_xfail": "skipped",
    }


def test_equal_outcomes_are_no_problem_even_where_upstream_fails(tmp_path: Path) -> None:
    before = junit(tmp_path / "a", SUITE)
    assert overlay_tests._compare(before, {**before, "ours::test": "passed", "ours::gpu": "skipped"}) == []


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ({"a": "failed"}, "a: passed in the pristine tree, failed in the patched tree"),
        ({}, "a: passed in the pristine tree, missing in the patched tree"),
        ({"a": "skipped"}, "a: passed in the pristine tree, skipped in the patched tree"),
        ({"a": "passed", "ours": "failed"}, "ours: failed"),
        ({"a": "passed", "ours": "error"}, "ours: error"),
    ],
)
def test_every_difference_is_a_problem(after: dict[str, str], problem: str) -> None:
    assert overlay_tests._compare({"a": "passed"}, after) == [problem]


def test_cache_keys_are_compared_by_name() -> None:
    (problem,) = overlay_tests._compare_keys({"A": "1", "B": "2"}, {"A": "1", "B": "2", "VLLM_DSA": "True"})
    assert "VLLM_DSA is True, upstream has None" in problem
    assert overlay_tests._compare_keys({"A": "1"}, {"A": "1"}) == []


def test_a_run_that_collects_nothing_is_an_error(tmp_path: Path) -> None:
    """pytest ends with 5 when it collects nothing; a typo in a path with 4: neither may count as success."""
    outcomes, error = overlay_tests._pytest(Path(sys.executable), tmp_path, "tests/dsa")
    assert outcomes == {} and "ended with 4" in error
    (tmp_path / "tests" / "dsa").mkdir(parents=True)
    outcomes, error = overlay_tests._pytest(Path(sys.executable), tmp_path, "tests/dsa")
    assert outcomes == {} and "ended with 5" in error


def test_the_laid_tree_has_a_version_that_keeps_triton(root: Path, tmp_path: Path) -> None:
    overlay_tests._add_metadata(tmp_path, load_pin(Workspace(root), "0.28.0"))
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.28.0"


def test_an_unknown_line_is_named_before_anything_is_made(root: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown line '0\.9'"):
        overlay_tests.run(Workspace(root), ["0.33.0", "0.9"])
