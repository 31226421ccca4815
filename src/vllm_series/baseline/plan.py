"""Which of upstream's tests concern the files that the patches touch, and what each of them needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_series.baseline import needs
from vllm_series.baseline.ci_steps import Step, matching
from vllm_series.baseline.imports import Graph, build_graph
from vllm_series.baseline.needs import Need
from vllm_series.baseline.outcome import DIED, NOT_RUN
from vllm_series.baseline.relevance import Relevance, changed_names, overlay_imports
from vllm_series.baseline.store import Recorded, read
from vllm_series.overlay import overlay_files
from vllm_series.runtime import Site
from vllm_series.series import load
from vllm_series.workspace import Workspace

UNKNOWN_S = 15.0  # what a file is taken to need that was never run
CORE = "core"  # the feature of patches that belong to none
DEPTH = 2  # a test that imports a module that imports what we patch


@dataclass(frozen=True)
class PlannedTest:
    """One upstream test file. ``distance`` 1: it imports (or names) a touched file itself; 0: only a CI job
    asks."""

    path: str
    distance: int
    reaches: tuple[str, ...]  # touched files at distance 1
    need: Need
    seconds: float | None
    passed: int
    #: How much of what the patches change it can see (``relevance.py``).
    weight: float
    #: Kinds of need that some of its tests named in the last run, beside ``need``.
    others: frozenset[str] = frozenset()
    #: False if the last run had a test that died, ran out of time or was cut off: too unsteady for every
    #: push.
    steady: bool = True


@dataclass
class Plan:
    """The plan of one line."""

    line: str
    touched: list[str]
    steps: list[Step]
    tests: list[PlannedTest] = field(default_factory=list)
    #: Upstream files that the patches of each feature touch.
    features: dict[str, frozenset[str]] = field(default_factory=dict)

    def of(self, *kinds: str, distance: int = DEPTH) -> list[PlannedTest]:
        """Tests of these needs that are at most so far away."""
        return [one for one in self.tests if one.need.kind in kinds and 1 <= one.distance <= distance]

    def short(self, budget_s: float) -> list[str]:
        """The files for every push, within a time: what was measured and passes on CPU, the most special
        first.

        Each touched file that such a test reaches is reached by the set, if the budget allows one test for
        it. Time that direct importers leave goes to the next nearest tests.
        """
        measured = [
            one for one in self.of(needs.CPU) if one.seconds is not None and one.passed and one.steady
        ]
        order = sorted(measured, key=lambda one: (one.distance, -_value(one), one.path))
        chosen: list[PlannedTest] = []
        left, seen = budget_s, set[str]()
        for first in (True, False):
            for one in order:
                fresh = not seen.issuperset(one.reaches)
                if one not in chosen and (fresh or not first) and _cost(one) <= left:
                    chosen.append(one)
                    seen.update(one.reaches)
                    left -= _cost(one)
        return sorted(one.path for one in chosen)

    def full(self) -> list[str]:
        """Every planned file that runs on CPU or was never run, whatever its distance: see `ranked`."""
        unknown = [one for one in self.tests if one.seconds is None and one.need.evidence.startswith("text")]
        names = {one.path for one in [*self.of(needs.CPU), *(one for one in unknown if one.distance == 1)]}
        return [path for path in self.ranked() if path in names]

    def of_features(self) -> list[str]:
        """Of the full set the files that import or name what a feature's patches touch."""
        touched = frozenset().union(*(files for name, files in self.features.items() if name != CORE))
        names = {one.path for one in self.tests if touched & set(one.reaches)}
        return [path for path in self.full() if path in names]

    def ranked(self) -> list[str]:
        """All planned files, those first that say the most for their time: a run that is cut short has what
        matters."""
        return [one.path for one in sorted(self.tests, key=lambda one: (-_value(one), one.path))]


def _cost(test: PlannedTest) -> float:
    return UNKNOWN_S if test.seconds is None else max(test.seconds, 2.0)


def _value(test: PlannedTest) -> float:
    return (test.weight or test.passed / 1000) / _cost(test)


def touched_files(ws: Workspace, line: str) -> list[str]:
    """Upstream files that the line's patches change, sorted."""
    return sorted({path for patch in load(ws, line) for path in patch.paths})


def features_of(ws: Workspace, line: str) -> dict[str, frozenset[str]]:
    """Upstream files that the line's patches change, by their ``Feature`` trailer."""
    found: dict[str, frozenset[str]] = {}
    for patch in load(ws, line):
        for name in patch.get("Feature"):
            found[name] = found.get(name, frozenset()) | set(patch.paths)
    return found


def is_test(path: str) -> bool:
    """True for a file that pytest collects."""
    name = path.rpartition("/")[2]
    return (
        path.startswith("tests/")
        and path.endswith(".py")
        and (name.startswith("test_") or name.endswith("_test.py"))
    )


GRAPH = 1  # raise when imports.py reads a tree differently


def graph_of(ws: Workspace, line: str, site: Site) -> Graph:
    """The import graph of the pristine tree without conftest files: they are imported by every test."""
    cache = ws.cache / "import-graphs" / f"{GRAPH}-{site.tree}.json"
    graph = build_graph(site.path, cache)
    return Graph({name: found for name, found in graph.imports.items() if not name.endswith("conftest.py")})


def make_plan(
    ws: Workspace, line: str, site: Site, *, depth: int = DEPTH, touched: Iterable[str] | None = None
) -> Plan:
    """Plan a line from its patches, the pristine site's sources and the last stored result."""
    changed = sorted(touched) if touched is not None else touched_files(ws, line)
    graph = graph_of(ws, line, site)
    steps = matching(site.path, changed)
    distances = graph.importers([name for name in changed if name.endswith(".py")], depth)
    direct = {
        name: {test for test, found in graph.imports.items() if name in found and is_test(test)}
        for name in changed
    }
    for step in steps:
        for name in step.tests:
            for path in _files(site.path, name):
                distances.setdefault(path, 0)
    plan = Plan(line, changed, steps, features=features_of(ws, line))
    known = read(ws, line)
    relevance = _relevance(ws, line, site.path, graph, changed)
    for path, distance in sorted(distances.items()):
        if is_test(path):
            plan.tests.append(_planned(site.path, path, distance, direct, known.get(path), relevance))
    plan.tests.sort(
        key=lambda one: (needs.ORDER.index(one.need.kind), one.distance or 99, -one.weight, one.path)
    )
    return plan


def _relevance(ws: Workspace, line: str, tree: Path, graph: Graph, changed: list[str]) -> Relevance:
    sources = {name: (tree / name).read_bytes() for name in changed if (tree / name).is_file()}
    names = changed_names(load(ws, line), sources)
    texts = {
        name: path.read_text(encoding="utf-8", errors="replace")
        for name, path in overlay_files(ws).items()
        if name.startswith("vllm/") and name.endswith(".py")
    }
    known = {one for name, found in graph.imports.items() for one in (name, *found)}
    targets = {name: names.get(name, frozenset()) for name in changed}
    return Relevance(graph, targets, overlay_imports(texts, known) - targets.keys())


def _files(tree: Path, name: str) -> list[str]:
    place = tree / name
    found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [path.relative_to(tree).as_posix() for path in found if is_test(path.relative_to(tree).as_posix())]


def _planned(
    tree: Path,
    path: str,
    distance: int,
    direct: Mapping[str, set[str]],
    last: Recorded | None,
    relevance: Relevance,
) -> PlannedTest:
    text = (tree / path).read_text(encoding="utf-8", errors="replace")
    need = needs.recorded(last.counts, last.reasons) if last else None
    if need is None:
        need = needs.worded(text, path)
    others = frozenset(needs.of_reason(reason) for reason in last.reasons) if last else frozenset[str]()
    reaches = tuple(sorted(name for name, tests in direct.items() if path in tests))
    return PlannedTest(
        path=path,
        distance=distance,
        reaches=reaches,
        need=need,
        seconds=last.seconds if last else None,
        passed=last.counts.get("passed", 0) if last else 0,
        weight=relevance.score(path, text),
        others=others,
        steady=not last or not {*DIED, NOT_RUN} & last.counts.keys(),
    )
