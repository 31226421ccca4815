# SPDX-License-Identifier: Apache-2.0
"""Which steps of one compiled piece run on the side stream, and in which order: plain data in and out.

What makes it sound, all checked here:

- Whatever reads a result of the side stream runs there too, so nothing in the piece has to join.
- What the side stream reads is there when the fork is recorded and stays until the join: inputs of the piece,
  what the fork was given, or its own. Nothing after the fork changes it on the main stream.
- It changes nothing but its own.
- The side stream gives the piece's marked outputs, all and only those. Their reader joins.
- Side steps come last. So the main branch is enqueued first, and memory that the side stream reads is not
  planned for anything else in this piece; the layer holds it until the join. The first of them computes: an
  empty allocation takes the stream that it finds.

The fork comes first among what the model does after it, or the compiler would move work of the main branch
before it, where the side stream waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Unsound(Exception):
    """Why a piece stays on one stream; the message is one line."""


@dataclass(frozen=True)
class Step:
    """One step of a piece, before fusion.

    Attributes:
        name: unique.
        reads: buffers, in the version that is read (a change of a buffer gives it a new name).
        writes: buffers that it makes, changed versions among them.
        changes: buffers that it changes in place, by their first name.
        marked: the model put it on the side stream.
        fork: it records the fork.
        late: the model does it after the fork.
        empty: it allocates and computes nothing.
    """

    name: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    marked: bool = False
    fork: bool = False
    late: bool = False
    empty: bool = False


@dataclass(frozen=True)
class Plan:
    """Names of the steps in order, the fork between ``early`` and ``late``; ``side`` on the side stream."""

    early: tuple[str, ...]
    fork: str
    late: tuple[str, ...]
    side: tuple[str, ...]


def plan(
    steps: Sequence[Step], outputs: Sequence[str], marked: Iterable[int], first_name: dict[str, str]
) -> Plan:
    """Decide for one piece.

    Args:
        steps: in an order that the compiler may run them in.
        outputs: buffers that the piece returns.
        marked: positions of the outputs that the side stream has to give.
        first_name: of buffers that were changed, where it differs.

    Raises:
        Unsound: the piece has to stay on one stream.
    """
    producer = {name: step for step in steps for name in step.writes}
    forks = [index for index, step in enumerate(steps) if step.fork]
    if len(forks) != 1:
        raise Unsound(f"{len(forks)} forks in one piece")
    fork = steps[forks[0]].name
    side = _side_steps(steps, producer)
    late = {step.name for step in steps if step.late}
    late = _with_readers(steps, producer, late | {fork}) - side - {fork}
    if any(name in producer and producer[name].name in side | late for name in steps[forks[0]].reads):
        raise Unsound("the fork reads what comes after it")
    early = {step.name for step in steps} - side - late - {fork}
    _check_reads(steps, side, producer, late, first_name)

    got = {i for i, name in enumerate(outputs) if name in producer and producer[name].name in side}
    if got != set(marked):
        raise Unsound(f"outputs {sorted(got)} of the piece come from the side stream, not {sorted(marked)}")

    last = [step for step in steps if step.name in side]
    first = next((step for step in last if not step.empty), None)
    if first is None:
        raise Unsound("nothing to compute on the side stream")
    if any(name in producer and producer[name].name in side for name in first.reads):
        raise Unsound(f"{first.name} fills an allocation made before it")
    ordered = [first, *(step for step in last if step is not first)]
    return Plan(
        tuple(step.name for step in steps if step.name in early),
        fork,
        tuple(step.name for step in steps if step.name in late),
        tuple(step.name for step in ordered),
    )


def _with_readers(steps: Sequence[Step], producer: dict[str, Step], names: set[str]) -> set[str]:
    """These steps and whatever reads their results, directly or not."""
    found = set(names)
    while True:
        more = {
            step.name
            for step in steps
            if any(name in producer and producer[name].name in found for name in step.reads)
        }
        if more <= found:
            return found
        found |= more


def _side_steps(steps: Sequence[Step], producer: dict[str, Step]) -> set[str]:
    """Marked steps, the allocations that they fill, and whatever reads their results."""
    side = {step.name for step in steps if step.marked}
    while True:
        found = _with_readers(steps, producer, side)
        filled = {name for step in steps if step.name in found for name in step.changes}
        found |= {producer[name].name for name in filled if name in producer and producer[name].empty}
        if found == side:
            return side
        side = found


def _check_reads(
    steps: Sequence[Step],
    side: set[str],
    producer: dict[str, Step],
    late: set[str],
    first_name: dict[str, str],
) -> None:
    read: set[str] = set()
    for step in (step for step in steps if step.name in side):
        for name in step.reads:
            source = producer.get(name)
            if source is not None and source.name not in side and not source.fork:
                raise Unsound(f"{step.name} reads {name}, which the fork was not given")
            read.add(first_name.get(name, name))
        for name in step.changes:
            if name not in producer or producer[name].name not in side:
                raise Unsound(f"{step.name} changes {name}, which is not the side stream's")
    for step in steps:
        if step.name in late and step.changes & read:
            raise Unsound(f"{step.name} changes what the side stream reads")
