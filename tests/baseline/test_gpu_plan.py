"""Relevance of tests, and what a lease of a card is spent on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from vllm_series.baseline import needs
from vllm_series.baseline.gpu_plan import FILE_S, START_S, TESTS, candidates, card_name, gpu_plan, named
from vllm_series.baseline.imports import Graph
from vllm_series.baseline.inside.series_probe import sample
from vllm_series.baseline.needs import Need
from vllm_series.baseline.plan import Plan, PlannedTest, make_plan
from vllm_series.baseline.relevance import Relevance, changed_names, overlay_imports
from vllm_series.baseline.store import Recorded
from vllm_series.runtime import pristine_site
from vllm_series.series import parse
from vllm_series.workspace import Workspace

ROOT = Path(__file__).parents[2]
RARE, CROWDED, MIDDLE = "vllm/rare.py", "vllm/envs.py", "vllm/middle.py"


@pytest.fixture
def relevance() -> Relevance:
    """envs.py is imported by 200 files, rare.py by one module and some tests; both are touched."""
    imports = {f"vllm/m{n}.py": {CROWDED} for n in range(200)}
    imports |= {MIDDLE: {RARE}, "vllm/dsa_base.py": set()}
    imports |= {
        "tests/test_envs.py": {CROWDED},
        "tests/test_rare.py": {RARE},
        "tests/test_names.py": {RARE},
        "tests/test_far.py": {MIDDLE},
        "tests/test_crowd.py": {CROWDED},
        "tests/test_base.py": {"vllm/dsa_base.py"},
        "tests/test_none.py": {"vllm/m1.py"},
    }
    graph = Graph({name: frozenset(found) for name, found in imports.items()})
    targets = {RARE: frozenset({"pack"}), CROWDED: frozenset({"compile_factors"})}
    return Relevance(graph, targets, frozenset({"vllm/dsa_base.py"}))


def test_rarely_imported_files_and_changed_names_weigh_most(relevance: Relevance) -> None:
    texts = {"tests/test_names.py": "from vllm.rare import pack", "tests/test_crowd.py": "unpacked()"}
    names = ["test_names", "test_rare", "test_far", "test_base", "test_envs", "test_crowd", "test_none"]
    scores = {name: relevance.score(f"tests/{name}.py", texts.get(f"tests/{name}.py", "")) for name in names}
    assert scores["test_names"] > scores["test_far"] > scores["test_crowd"] > 0
    assert scores["test_rare"] > scores["test_base"] > scores["test_crowd"]
    assert scores["test_envs"] > 2 * scores["test_crowd"]  # named after the file
    assert scores["test_rare"] > 10 * scores["test_envs"]
    assert scores["test_none"] < scores["test_crowd"]


def test_a_name_counts_as_a_word(relevance: Relevance) -> None:
    score = relevance.score
    assert score("tests/test_names.py", "x.pack(1)") > score("tests/test_names.py", "unpack(packed)")


PATCH = b"""From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@example.invalid>
Date: Sun, 29 Nov 2026 16:00:00 +0000
Subject: [PATCH] Change

Anchor: vllm/a.py::Indexer.forward
Anchor: vllm/a.py::TYPE_CHECKING
Anchor: vllm/a.py::gone
Anchor: vllm/b.py::table

diff --git a/vllm/a.py b/vllm/a.py
"""


def test_changed_names_come_from_the_anchors() -> None:
    sources = {
        "vllm/a.py": b"from typing import TYPE_CHECKING\nclass Indexer:\n    def forward(self): pass\n",
        "vllm/b.py": b"table = {}\n",
    }
    found = changed_names([parse("a.patch", PATCH)], sources)
    assert found == {"vllm/a.py": frozenset({"Indexer"}), "vllm/b.py": frozenset({"table"})}


def test_overlay_imports() -> None:
    texts = {
        "vllm/dsa/x.py": "def f():\n    from vllm.a import b\n    import vllm.gone\nfrom vllm.dsa import y\n"
    }
    assert overlay_imports(texts, ["vllm/__init__.py", "vllm/a.py", "vllm/c.py"]) == {"vllm/a.py"}


def test_sample_is_spread_stable_and_the_same_for_any_order() -> None:
    names = [f"a.py::test_{name}[{n}]" for name in "xyz" for n in range(50)] + ["a.py::test_alone"]
    chosen = sample(list(names), 10)
    assert len(chosen) == 10 and chosen == sample(list(names), 10)
    assert {name.partition("[")[0] for name in chosen[:4]} == {
        f"a.py::test_{n}" for n in ("x", "y", "z", "alone")
    }
    assert set(chosen) == set(sample(names[::-1], 10))
    assert set(sample(list(names), 5)) < set(chosen)  # a smaller sample is a part of a larger one
    fewer = [name for name in names if name not in chosen[:1]]
    assert len(set(sample(fewer, 10)) & set(chosen)) == 9  # a test that is gone changes nothing else


def planned(name: str, weight: float, kind: str = needs.SM90) -> PlannedTest:
    return PlannedTest(f"tests/{name}.py", 1, (RARE,), Need(kind, "last run"), None, 0, weight)


def test_a_monster_gets_its_share_and_no_more() -> None:
    tests = [
        planned("monster", 2.0),
        planned("quick", 0.5),
        planned("never_run", 1.0),
        planned("junk", 0.001),
    ]
    card = {
        "tests/monster.py": Recorded(110.0, {"passed": 90, "skipped": 10, "not_run": 2300}),
        "tests/quick.py": Recorded(12.0, {"passed": 7}),
    }
    plan = Plan("0.0.0", [RARE], [], tests)
    found = gpu_plan(plan, card, {}, budget_s=240, modes=3, jobs=4)
    by = {one.path: one for one in found.files}
    monster = by["tests/monster.py"]
    assert monster.expected == START_S + 2400 and monster.seconds == FILE_S
    assert monster.sample == 75  # 1 s a test, 50 s after the start, half as many again
    assert by["tests/quick.py"].expected < 15
    order = [one.path.rpartition("/")[2] for one in found.files]
    assert order == ["quick.py", "monster.py", "never_run.py", "junk.py"]
    assert sum(min(one.expected, one.seconds) for one in found.files) <= (240 - 45) * 4 / 3


def test_what_does_not_fit_is_named() -> None:
    plan = Plan("0.0.0", [RARE], [], [planned(f"t{n}", 1.0 - n / 10) for n in range(8)])
    found = gpu_plan(plan, {}, {f"tests/t{n}.py": Recorded(1, {"skipped": 500}) for n in range(8)},
                     budget_s=165, modes=3, jobs=4)  # fmt: skip
    assert [one.path for one in found.files] == ["tests/t0.py", "tests/t1.py"]
    assert len(found.dropped) == 6
    assert gpu_plan(plan, {}, {}, budget_s=10, modes=3, jobs=4).files == []


def test_named_files_get_limit_and_sample_too() -> None:
    plan = Plan("0.0.0", [RARE], [], [planned("a", 1.0), planned("b", 1.0)])
    found = named(plan, ["tests/far.py", "tests/b.py"], {}, {"tests/b.py": Recorded(1, {"skipped": 500})})
    assert [one.path for one in found.files] == ["tests/far.py", "tests/b.py"]
    assert all(one.seconds == FILE_S and one.sample == 75 for one in found.files)


def test_a_file_that_a_cpu_skips_as_a_whole_has_an_unknown_number_of_tests() -> None:
    plan = Plan("0.0.0", [RARE], [], [planned("a", 1.0)])
    whole, one = Recorded(1, {"skipped": 1}), Recorded(1, {"passed": 1})
    times = [named(plan, ["tests/a.py"], {}, {"tests/a.py": last}).files[0].expected for last in (whole, one)]
    assert times == [START_S + TESTS, START_S + 1]


def test_files_that_are_asked_for_come_first_and_take_their_time() -> None:
    plan = Plan("0.0.0", [RARE], [], [planned(f"t{n}", 1.0 - n / 10) for n in range(8)])
    cpu = {
        f"tests/{name}.py": Recorded(1, {"skipped": 500}) for name in ("far", *(f"t{n}" for n in range(8)))
    }
    also = ["tests/far.py", "tests/t7.py"]
    found = gpu_plan(plan, {}, cpu, budget_s=210, modes=3, jobs=4, also=also)
    assert [one.path for one in found.files] == [*also, "tests/t0.py"]
    assert len(found.dropped) == 6 and not {one.path for one in found.dropped} & set(also)


def test_a_mode_of_one_feature_runs_the_tests_of_what_its_patches_touch() -> None:
    other = dataclasses.replace(planned("other", 0.5), reaches=(CROWDED,))
    plan = Plan("0.0.0", [RARE, CROWDED], [], [planned("rare", 1.0), other])
    cpu = {f"tests/{name}.py": Recorded(1, {"skipped": 500}) for name in ("rare", "other")}
    features = {"feature:x": frozenset({RARE}), "feature:y=1": frozenset({RARE, MIDDLE})}
    found = gpu_plan(plan, {}, cpu, budget_s=45 + 150, modes=2, jobs=2, features=features)
    assert [(one.path, one.features) for one in found.files] == [("tests/rare.py", tuple(features))]
    assert [one.path for one in found.dropped] == ["tests/other.py"]  # 240 of 300 s went to four modes
    every = named(plan, ["tests/other.py"], {}, cpu, features={"feature:x": None})
    assert every.files[0].features == ("feature:x",)


def test_files_of_little_relevance_come_last_by_relevance() -> None:
    """A lease has room for everything: what half of the tree has fills it up, however quick it is."""
    tests = [planned("slow", 0.1), planned("junk", 0.001), planned("better", 0.02)]
    cpu = {"tests/slow.py": Recorded(1, {"skipped": 45}), "tests/junk.py": Recorded(1, {"passed": 1})}
    found = gpu_plan(Plan("0.0.0", [RARE], [], tests), {}, cpu, budget_s=400, modes=3, jobs=8)
    assert [one.path for one in found.files] == ["tests/slow.py", "tests/better.py", "tests/junk.py"]


def test_candidates_need_a_gpu_and_nothing_else() -> None:
    tests = [planned("sm90", 1.0), planned("gpu", 1.0, needs.GPU), planned("cpu", 1.0, needs.CPU)]
    tests += [planned("weights", 1.0, needs.HUB), planned("sm100", 1.0, needs.SM100), planned("far", 0.0)]
    tests.append(dataclasses.replace(planned("both", 1.0, needs.CPU), others=frozenset({needs.GPU})))
    plan = Plan("0.0.0", [], [], tests)
    names = {one.path for one in candidates(plan, {})}
    assert names == {"tests/sm90.py", "tests/gpu.py", "tests/both.py"}
    # What ran on the card outweighs what the CPU run suggests.
    card = {"tests/sm100.py": Recorded(9, {"passed": 1}), "tests/sm90.py": Recorded(9, {"skipped": 4})}
    card["tests/gpu.py"] = Recorded(9, {"failed": 1, "not_run": 40})
    names = {one.path for one in candidates(plan, card)}
    assert names == {"tests/sm100.py", "tests/gpu.py", "tests/both.py"}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ({"name": "NVIDIA H200"}, "h200"),
        ({"name": "NVIDIA H100 80GB HBM3"}, "h100"),
        ({"name": "NVIDIA B200"}, "b200"),
        ({"name": "NVIDIA GeForce RTX"}, "geforce-rtx"),
        (None, "cpu"),
    ],
)
def test_card_name(gpu: object, name: str) -> None:
    assert card_name(gpu) == name


@pytest.mark.slow
def test_the_lease_of_the_real_line_is_spent_on_what_the_patches_reach() -> None:
    """With patches on the indexer's path the first files are the indexer's, not those that import envs.py."""
    ws = Workspace(ROOT)
    indexer = "vllm/v1/attention/backends/mla/indexer.py"
    plan = make_plan(ws, "0.33.0", pristine_site(ws, "0.33.0"), touched=["vllm/envs.py", indexer])
    found = gpu_plan(plan, {}, {}, budget_s=360, modes=3, jobs=8)
    first = found.files[:6]
    reaches = {one.path: one.reaches for one in plan.tests}
    assert len(found.files) >= 6
    assert sum(indexer in reaches[one.path] for one in first) >= 3, [one.path for one in first]
    assert max(one.weight for one in found.files) > 20 * min(one.weight for one in candidates(plan, {}))
