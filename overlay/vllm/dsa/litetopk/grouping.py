# SPDX-License-Identifier: Apache-2.0
"""Which of a step's requests share a launch, and the chunks that follow: host data alone, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

#: Fewest rows of a request that shares a launch with others. A block of 4 or 8 rows scans the keys of all of
#: its rows, so shorter requests would have theirs scanned in vain; the shortest that were measured have 8.
FEWEST_ROWS = 8

#: ``(first row, one past the last, keys of the shortest request)`` to the reason against it, '' if none.
WhyNot = Callable[[int, int, int], str]

#: A chunk as upstream's planner writes it: which requests of the step, and which of their rows.
Spec = tuple[slice, slice]


class Specs(list[Spec]):
    """Chunk specs, and of those that are fused the token range and how many keys the longest request has."""

    fused: dict[tuple[int, int], int]

    def __init__(self, specs: Iterable[Spec] = ()) -> None:
        super().__init__(specs)
        self.fused = {}


def groups(
    requests: Iterable[int], keys: Sequence[int], starts: Sequence[int], most_keys: int, why_not: WhyNot
) -> list[range]:
    """Return the ranges of at least two consecutive requests that are worth one launch together.

    All ranks find the same ones, because ``why_not`` answers alike on them.

    Args:
        requests: of the step, ascending; those that may be grouped.
        keys: of each request of the step.
        starts: first row of each request, and one past the last request's rows.
        most_keys: that one launch may have, of all of its requests together.
        why_not: the rule for so many rows whose requests have at least so many keys.
    """
    long_enough = [r for r in requests if starts[r + 1] - starts[r] >= FEWEST_ROWS]
    return [group for run in _runs(long_enough) for group in _split(run, keys, starts, most_keys, why_not)]


def split_off(specs: list[Spec], fused: dict[int, range], starts: list[int], keys: list[int]) -> Specs:
    """Take the fused requests, each with its group, out of upstream's chunks; a shared chunk is never cut."""
    planned = Specs()
    if not fused:
        planned.extend(specs)
        return planned
    for (first, stop), chunks in itertools.groupby(specs, lambda spec: (spec[0].start, spec[0].stop)):
        if fused.keys().isdisjoint(range(first, stop)):
            planned.extend(chunks)
            continue
        for group, run in itertools.groupby(range(first, stop), fused.get):
            members = list(run)
            part = group or range(members[0], members[-1] + 1)
            rows = (starts[part.start], starts[part.stop])
            if rows in planned.fused:  # begun in an earlier chunk of upstream's
                continue
            planned.append((slice(part.start, part.stop), slice(0, rows[1] - rows[0])))
            if group is not None:
                planned.fused[rows] = max(keys[r] for r in part)
    return planned


def _split(
    run: range, keys: Sequence[int], starts: Sequence[int], most_keys: int, why_not: WhyNot
) -> list[range]:
    """Cut a run of requests into groups; what a group would lose by a short request, it loses without it."""
    if len(run) < 2:
        return []
    low, high = starts[run.start], starts[run.stop]
    kept = [r for r in run if not why_not(low, high, keys[r])]
    if len(kept) < len(run):  # fewer rows may need more keys: ask again
        return [g for part in _runs(kept) for g in _split(part, keys, starts, most_keys, why_not)]
    parts = list(_packed(run, keys, most_keys))
    if len(parts) == 1:
        return [run]
    return [g for part in parts for g in _split(part, keys, starts, most_keys, why_not)]


def _packed(run: range, keys: Sequence[int], most_keys: int) -> Iterable[range]:
    """Cut a run into the longest parts, from the first request on, of at most so many keys together."""
    first, total = run.start, 0
    for r in run:
        if r > first and total + keys[r] > most_keys:
            yield range(first, r)
            first, total = r, 0
        total += keys[r]
    yield range(first, run.stop)


def _runs(requests: Iterable[int]) -> list[range]:
    """Join consecutive numbers."""
    found: list[range] = []
    for r in requests:
        if found and found[-1].stop == r:
            found[-1] = range(found[-1].start, r + 1)
        else:
            found.append(range(r, r + 1))
    return found
