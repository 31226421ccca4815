"""What --select names, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_series.baseline import needs
from vllm_series.baseline.needs import Need
from vllm_series.baseline.plan import Plan, PlannedTest
from vllm_series.baseline.select import chosen
from vllm_series.errors import UsageError


@pytest.fixture
def chooser(site: Callable[..., Path]) -> Callable[..., list[str]]:
    """``chooser(*patterns)`` on a tree with four test files, of which three are planned."""
    names = ("test_a.py", "v1/test_indexer.py", "v1/test_mla.py", "other/test_far.py")
    place = site("a", {**dict.fromkeys(names, ""), "conftest.py": ""})
    tests = [
        PlannedTest(f"tests/{name}", 1, ("vllm/x.py",), Need(needs.CPU, "last run"), 10.0, 5, weight)
        for name, weight in (("test_a.py", 0.1), ("v1/test_indexer.py", 5.0), ("v1/test_mla.py", 1.0))
    ]
    features = {"core": frozenset({"vllm/x.py"}), "topk": frozenset({"vllm/y.py"})}
    tests[1] = dataclasses.replace(tests[1], reaches=("vllm/x.py", "vllm/y.py"))
    plan = Plan("0.0.0", ["vllm/x.py"], [], tests, features)
    return lambda *patterns, which="full": chosen(plan, which, patterns, 60, place)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((), ["v1/test_indexer.py", "v1/test_mla.py", "test_a.py"]),  # the most telling first
        (("tests/test_a.py::test_x",), ["test_a.py"]),
        (("./tests/other/test_far.py",), ["other/test_far.py"]),  # any upstream test file by its full name
        (("tests/v1/",), ["v1/test_indexer.py", "v1/test_mla.py"]),
        (("tests/*mla*", "indexer"), ["v1/test_mla.py", "v1/test_indexer.py"]),
        (("indexer", "tests/v1"), ["v1/test_indexer.py", "v1/test_mla.py"]),
    ],
)
def test_select_by_pattern(
    chooser: Callable[..., list[str]], patterns: tuple[str, ...], found: list[str]
) -> None:
    assert chooser(*patterns) == [f"tests/{name}" for name in found]


def test_the_set_of_the_features_leaves_out_what_only_core_touches(
    chooser: Callable[..., list[str]],
) -> None:
    assert chooser(which="features") == ["tests/v1/test_indexer.py"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("tests/test_b.py", "has no such test file"),
        ("tests/conftest.py", "has no such test file"),
        ("test_far", "1 others do, name them in full"),
        ("lighthouse", "no planned test matches"),
        ("", "selects nothing"),
    ],
)
def test_select_refuses_what_matches_nothing(
    chooser: Callable[..., list[str]], pattern: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        chooser(pattern)
    assert pattern in str(caught.value) and "series baseline plan" in caught.value.fix
