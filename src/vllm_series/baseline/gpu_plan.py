"""Which tests a lease of a GPU is spent on: the most telling for their time first, none beyond its share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vllm_series.baseline import needs
from vllm_series.baseline.outcome import LEFT_OUT, NOT_RUN
from vllm_series.baseline.plan import Plan, PlannedTest
from vllm_series.baseline.store import Recorded

START_S = 10.0  # from starting a file to its first test
TEST_S = 1.0  # a test on a GPU that was never timed there
TESTS = 30  # of a file that was never run anywhere
FLOOR = 0.03  # less relevance than this is what half of the tree has
SAMPLE_ROOM = 1.5  # tests in a sample, in those that should fit: what is estimated too slow is no loss
SETUP_S = 45.0  # laying the trees, importing vLLM once for each mode
FILE_S = 60.0  # most that one file gets of one mode


@dataclass(frozen=True)
class GpuFile:
    """One file of a lease. ``seconds`` is its limit in one mode; of more than ``sample`` tests only that many
    run, the same ones in each mode. ``features``: the modes of one feature that it runs in besides."""

    path: str
    weight: float
    expected: float
    seconds: float
    sample: int
    features: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For the kit's ``plan.json``."""
        return {"path": self.path, "seconds": self.seconds, "sample": self.sample}


#: Modes of one feature -> the upstream files that its patches touch, None for any: such a mode runs only the
#: tests that import or name one of them.
Features = Mapping[str, frozenset[str] | None]


@dataclass
class GpuPlan:
    """What fits into the time, and what does not."""

    files: list[GpuFile] = field(default_factory=list)
    dropped: list[GpuFile] = field(default_factory=list)


def candidates(plan: Plan, on_card: Mapping[str, Recorded]) -> list[PlannedTest]:
    """Files that a Hopper card adds, the most telling for their time first.

    Tests passed there in the last run, or the CPU run (or, unrun, the text) names a GPU as what is missing,
    no model and no other card. Files of little relevance come last, by relevance alone.

    Args:
        plan: the line's plan.
        on_card: what the last run on such a card stored, by file.
    """
    wanted = {needs.SM90, needs.GPU}

    def adds(one: PlannedTest) -> bool:
        last = on_card.get(one.path)
        if last is not None and not {NOT_RUN, LEFT_OUT} & last.counts.keys():
            return bool(last.counts.get("passed"))
        mixed = one.need.kind in (needs.CPU, needs.SM100, needs.OTHER) and one.others & wanted
        return one.need.kind in wanted or bool(mixed)

    return [one for one in plan.tests if one.weight and adds(one)]


def gpu_plan(
    plan: Plan,
    on_card: Mapping[str, Recorded],
    on_cpu: Mapping[str, Recorded],
    *,
    budget_s: float,
    modes: int,
    jobs: int,
    file_s: float = FILE_S,
    also: Sequence[str] = (),
    features: Features = MappingProxyType({}),
) -> GpuPlan:
    """Fill ``budget_s`` seconds of a card.

    Args:
        plan: the line's plan.
        on_card: what the last run on such a card stored, by file.
        on_cpu: what the last CPU run stored: how many tests a file has.
        budget_s: wall seconds of everything.
        modes: runs of each file, upstream's among them.
        jobs: files at a time.
        file_s: most that one file gets in one mode.
        also: files that come first, whatever they reach.
        features: further modes, which run some of the files.
    """
    rest = [one.path for one in candidates(plan, on_card) if one.path not in also]
    rows = named(plan, also, on_card, on_cpu, file_s, features).files
    rows += sorted(named(plan, rest, on_card, on_cpu, file_s, features).files, key=_order)
    found, left = GpuPlan(), max(0.0, budget_s - SETUP_S) * jobs
    for row in rows:
        cost = min(row.expected, row.seconds) * (modes + len(row.features))
        if cost <= left:
            found.files.append(row)
            left -= cost
        else:
            found.dropped.append(row)
    return found


def _order(row: GpuFile) -> tuple[float, float, str]:
    if row.weight < FLOOR:
        return 0.0, -row.weight, row.path
    return -row.weight / min(row.expected, row.seconds), 0.0, row.path


def named(
    plan: Plan,
    paths: Sequence[str],
    on_card: Mapping[str, Recorded],
    on_cpu: Mapping[str, Recorded],
    file_s: float = FILE_S,
    features: Features = MappingProxyType({}),
) -> GpuPlan:
    """A lease of exactly these files, in this order, each with its limit, its sample and the modes of
    features that concern it."""
    known = {one.path: one for one in plan.tests}
    absent = PlannedTest("", 0, (), needs.Need(needs.OTHER, ""), None, 0, 0.0)
    rows = []
    for path in paths:
        test = replace(known.get(path, absent), path=path)
        row = _timed(test, on_card.get(path), on_cpu.get(path), file_s)
        modes = [mode for mode, files in features.items() if files is None or files & set(test.reaches)]
        rows.append(replace(row, features=tuple(modes)))
    return GpuPlan(rows)


def _timed(test: PlannedTest, card: Recorded | None, cpu: Recorded | None, file_s: float) -> GpuFile:
    each, number = TEST_S, sum(cpu.counts.values()) if cpu else 0
    if number == 1 and cpu and not cpu.counts.get("passed"):
        number = 0  # skipped or failed as a whole, before its tests were known
    if card is not None:
        all_of = sum(card.counts.values())
        ran = all_of - card.counts.get(NOT_RUN, 0) - card.counts.get(LEFT_OUT, 0)
        number = max(number, all_of)
        if ran:
            each = max(0.02, (card.seconds - START_S) / ran)
    expected = START_S + each * (number or TESTS)
    fitting = (file_s - START_S) / each
    sample = max(5, math.ceil(SAMPLE_ROOM * fitting))
    return GpuFile(test.path, test.weight, round(expected, 1), file_s, sample)


def card_name(gpu: object) -> str:
    """``{"name": "NVIDIA H200", ...}`` of a fingerprint -> ``h200``; ``cpu`` without a GPU."""
    if not isinstance(gpu, Mapping):
        return "cpu"
    name = str(gpu.get("name", "")).removeprefix("NVIDIA")
    found = re.search(r"\b[A-Za-z]{1,4}\d{1,4}[A-Za-z]?\b", name)
    return (found[0] if found else re.sub(r"\W+", "-", name).strip("-") or "gpu").lower()
