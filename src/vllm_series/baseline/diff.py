"""Compares two runs node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_series.baseline.fingerprint import differences
from vllm_series.baseline.outcome import BAD, LEFT_OUT, NOT_RUN, Node, Run
from vllm_series.baseline.quarantine import Entry
from vllm_series.errors import CheckFailed


class Kind(StrEnum):
    """What a node's two outcomes mean together. SAME covers equal passes, skips and expected failures."""

    SAME = "SAME"
    BROKEN_UPSTREAM = "BROKEN_UPSTREAM"
    REGRESSION = "REGRESSION"
    FIXED = "FIXED"
    MISSING = "MISSING"
    NEW = "NEW"
    SKIP_CHANGED = "SKIP_CHANGED"
    NOT_COMPARED = "NOT_COMPARED"
    SAMPLED = "SAMPLED"
    FLAKY = "FLAKY"
    QUARANTINED = "QUARANTINED"


#: Kinds that a re-run has to confirm.
DOUBTFUL = frozenset({Kind.REGRESSION, Kind.FIXED, Kind.MISSING, Kind.NEW, Kind.SKIP_CHANGED})


@dataclass
class Row:
    """One node of a comparison. ``again`` holds the outcomes of re-runs as ``(upstream, patched)``."""

    node: str
    file: str
    kind: Kind
    before: Node | None
    after: Node | None
    again: list[tuple[str, str]] = field(default_factory=list)
    first: Kind | None = None  # the kind before the re-runs, if they changed it
    note: str = ""

    @property
    def lost(self) -> bool:
        """True if the test passed upstream and no longer runs."""
        return self.before is not None and self.before.outcome == "passed"


@dataclass
class Diff:
    """A comparison of one mode with upstream. ``exact`` modes fail on any confirmed difference."""

    line: str
    mode: str
    exact: bool
    rows: list[Row]
    forced: list[str] = field(default_factory=list)
    #: Planned files that one of the runs did not reach.
    unreached: list[str] = field(default_factory=list)

    def of(self, *kinds: Kind) -> list[Row]:
        """The rows of these kinds."""
        return [row for row in self.rows if row.kind in kinds]

    def failing(self) -> list[Row]:
        """The rows that make the comparison fail."""
        if self.exact:
            return self.of(*DOUBTFUL)
        lost = [row for row in self.of(Kind.SKIP_CHANGED) if row.lost]
        return self.of(Kind.REGRESSION, Kind.MISSING) + lost

    def samples(self) -> dict[str, tuple[int, int]]:
        """``{file: (tests in its sample, all its tests)}`` of the files of which only a sample ran."""
        left: dict[str, int] = {}
        for row in self.of(Kind.SAMPLED):
            left[row.file] = left.get(row.file, 0) + 1
        every = {name: sum(row.file == name for row in self.rows) for name in left}
        return {name: (every[name] - number, every[name]) for name, number in left.items()}

    def counts(self) -> dict[str, int]:
        """How many rows are of which kind, all kinds named."""
        return {kind.value: len(self.of(kind)) for kind in Kind}


def classify(before: Node | None, after: Node | None) -> Kind:
    """Return what two outcomes of one node mean."""
    if before is None:
        return Kind.NEW
    if after is None:
        return Kind.MISSING
    if before.outcome == after.outcome == LEFT_OUT:
        return Kind.SAMPLED
    if {NOT_RUN, LEFT_OUT} & {before.outcome, after.outcome}:
        return Kind.NOT_COMPARED
    if after.outcome in BAD:
        return Kind.BROKEN_UPSTREAM if before.outcome in BAD else Kind.REGRESSION
    if before.outcome in BAD:
        return Kind.SKIP_CHANGED if after.outcome == "skipped" else Kind.FIXED
    if before.outcome == after.outcome:
        changed = before.outcome == "skipped" and before.reason != after.reason
        return Kind.SKIP_CHANGED if changed else Kind.SAME
    if "skipped" in (before.outcome, after.outcome):
        return Kind.SKIP_CHANGED
    # passed, xfailed, xpassed among themselves: an expected failure that a patch brings is a failure
    return Kind.FIXED if after.outcome == "passed" else Kind.REGRESSION


def compare(
    upstream: Run,
    patched: Run,
    *,
    exact: bool,
    force: bool = False,
    planned: Sequence[str] | None = None,
) -> Diff:
    """Compare the files that both runs hold.

    Args:
        upstream: the run of the pristine tree.
        patched: the run of a mode.
        exact: any difference fails the mode.
        force: compare whatever the machines.
        planned: what should have run, where a time limit may have cut a run short: what one of the runs
            lacks is named in the result. Without it both must hold the same files.

    Raises:
        CheckFailed: the runs are of different machines, packages or settings and ``force`` is not set, or
        hold different files.
    """
    other = differences(upstream.fingerprint, patched.fingerprint)
    if upstream.line != patched.line:
        other.append(f"line: {upstream.line} / {patched.line}")
    if other and not force:
        raise CheckFailed(
            f"the runs {upstream.mode} and {patched.mode} of {patched.line} cannot be compared:\n  "
            + "\n  ".join(other),
            fix="run both on one machine (`series baseline diff` does), or pass --force",
        )
    both = [name for name in upstream.files if name in patched.files]
    if planned is None and set(upstream.files) != set(patched.files):
        odd = sorted(set(upstream.files) ^ set(patched.files))
        raise CheckFailed(
            f"the runs {upstream.mode} and {patched.mode} hold different files: {', '.join(odd[:5])}",
            fix="run both with the same --set, or without --saved",
        )
    rows = []
    for name in both:
        before, after = upstream.files[name].nodes, patched.files[name].nodes
        # A side that ran out of time before it knew its tests says nothing about any of them.
        cut = any(side.get(name, Node("passed")).outcome == NOT_RUN for side in (before, after))
        for node in dict.fromkeys([*before, *after]):
            one, two = before.get(node), after.get(node)
            kind = Kind.NOT_COMPARED if cut else classify(one, two)
            note = ""
            if kind is Kind.BROKEN_UPSTREAM and one and two and one.reason != two.reason:
                note = "the message changed"
            rows.append(Row(node, name, kind, one, two, note=note))
    unreached = [name for name in planned or () if name not in both]
    return Diff(patched.line, patched.mode, exact, rows, forced=other, unreached=unreached)


#: Re-runs nodes: ``again(files -> nodes) -> {node: Node}`` for one side, None if there is no time left.
Again = Callable[[Mapping[str, list[str]]], Mapping[str, Node] | None]
RUNS = 3


def confirm(
    diff: Diff, upstream: Again, patched: Again, whole: Callable[[str], bool] = lambda file: True
) -> None:
    """Re-run the nodes that differ, three times on both sides; what does not differ each time is FLAKY.

    A test that fails only after another one of its file does not show when it runs alone. So where running
    alone gives no difference at all, the whole file is run again, if ``whole(file)`` allows it (it is short
    enough).
    """
    rows = diff.of(*DOUBTFUL)
    for row in rows:
        row.first = row.kind
    _rerun(rows, upstream, patched, alone=True)
    rest = [row for row in rows if row.again and not _differs(row) and whole(row.file)]
    if rest:
        for row in rest:
            row.again.clear()
            row.note = "re-run with its whole file"
        _rerun(rest, upstream, patched, alone=False)
    for row in rows:
        if _differs(row) < len(row.again):
            row.kind = Kind.FLAKY


def judge(diff: Diff, again: Mapping[str, list[tuple[str, str]]]) -> None:
    """Apply re-runs that were made elsewhere; a row without any keeps its kind."""
    for row in diff.of(*DOUBTFUL):
        row.first, row.again = row.kind, list(again.get(row.node, []))
        if _differs(row) < len(row.again):
            row.kind = Kind.FLAKY


def _rerun(rows: list[Row], upstream: Again, patched: Again, *, alone: bool) -> None:
    if not rows:
        return
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(row.file, []).append(row.node)
    if not alone:
        wanted = {file: [] for file in wanted}
    for _ in range(RUNS):
        before, after = upstream(wanted), patched(wanted)
        if before is None or after is None:
            return  # the kind stays: a difference that could not be looked at again is a difference
        for row in rows:
            one, two = before.get(row.node), after.get(row.node)
            row.again.append((one.outcome if one else "absent", two.outcome if two else "absent"))
            if _same_kind(row, one, two):
                row.before, row.after = one or row.before, two or row.after


def _same_kind(row: Row, one: Node | None, two: Node | None) -> bool:
    return (one is not None or two is not None) and classify(one, two) is row.first


def _differs(row: Row) -> int:
    """In how many re-runs the two sides still differ, in the outcome or (both skipped) in the reason."""
    if (
        row.first is Kind.SKIP_CHANGED
        and row.before
        and row.after
        and row.before.outcome == row.after.outcome
    ):
        return sum(1 for one, two in row.again if one == two == "skipped")

    def group(outcome: str) -> str:
        return "bad" if outcome in BAD else outcome

    return sum(1 for one, two in row.again if group(one) != group(two))


def quarantine(diff: Diff, entries: Iterable[Entry]) -> None:
    """Mark what ``quarantine.toml`` names, in modes that need not be exact and among failures alone."""
    known = {(one.node, one.line): one for one in entries}
    for row in diff.of(Kind.REGRESSION, Kind.FLAKY):
        entry = known.get((row.node, diff.line))
        if entry is not None:
            row.first, row.kind = row.first or row.kind, Kind.QUARANTINED
            row.note = (
                f"fails {entry.rate:.0%} of {entry.runs} runs upstream, until {entry.expires}: {entry.reason}"
            )
