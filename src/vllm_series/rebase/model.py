"""Words and records of a rebase: the state of a patch, what is known of its targets, the whole report."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

SCHEMA = 1


class State(enum.StrEnum):
    """What became of one patch on the new release."""

    CLEAN = "CLEAN"  # applies at the recorded lines
    OFFSET = "OFFSET"  # applies strictly, at other lines
    MERGED = "MERGED"  # only a 3-way merge took it
    UPSTREAMED = "UPSTREAMED"  # the release has its effect already
    UNREACHED = "UNREACHED"  # it applies, but no DSA model runs that code any more
    CONFLICT = "CONFLICT"  # the 3-way merge left conflicts
    ANCHOR_LOST = "ANCHOR_LOST"  # the function is gone, or the change landed outside of it
    TARGET_GONE = "TARGET_GONE"  # the release has no such file
    TARGET_RENAMED = "TARGET_RENAMED"  # the release has the file under another name


class Need(enum.StrEnum):
    """What it takes to go on."""

    NOTHING = "nothing"
    ACCEPT = "accept"  # look at it, then --accept
    PERSON = "person"  # the tree has to be edited


class Decision(enum.StrEnum):
    """How a patch was settled."""

    NONE = ""
    ADOPTED = "adopted"  # without a person
    ACCEPTED = "accepted"  # --accept
    RESOLVED = "resolved"  # edited by a person, then --continue
    DROPPED = "dropped"  # --drop
    RECORDED = "recorded in upstreamed.toml"


@dataclass(frozen=True)
class Target:
    """One upstream file that a patch touches, compared between the two releases.

    ``status`` is ``same``, ``changed``, ``gone``, ``renamed`` or ``new`` (the patch or an earlier one makes
    it). ``added`` and ``removed`` count upstream's lines. ``commits`` are upstream's, newest first, if a
    history was given.
    """

    path: str
    status: str
    added: int = 0
    removed: int = 0
    now: str = ""
    commits: tuple[str, ...] = ()

    def text(self) -> str:
        if self.status == "renamed":
            return f"{self.path} -> {self.now} (+{self.added} -{self.removed})"
        return (
            f"{self.path} (+{self.added} -{self.removed})"
            if self.status == "changed"
            else f"{self.path} ({self.status})"
        )


@dataclass(frozen=True)
class Outcome:
    """State of one patch. ``how`` tells how far its text got (CLEAN, OFFSET, MERGED, CONFLICT, UPSTREAMED or
    '').

    ``hunks`` are counted in the old and in the new patch; ``lost`` and ``gained`` are changed lines that
    only the old or only the new one has. ``commit`` is the resulting commit ('' if there is none),
    ``seconds`` wall time.
    """

    patch: str
    state: State
    how: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()
    feature: str = ""
    targets: tuple[Target, ...] = ()
    hunks: tuple[int, int] = (0, 0)
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    commit: str = ""
    decision: Decision = Decision.NONE
    seconds: float = 0.0

    @property
    def need(self) -> Need:
        """What has to happen before the rebase goes on, no matter what was decided already."""
        if self.state in {State.CLEAN, State.OFFSET, State.UPSTREAMED}:
            return Need.NOTHING
        if self.state in {State.MERGED, State.UNREACHED} and self.commit:
            return Need.ACCEPT
        if self.state is State.TARGET_RENAMED and self.commit:
            return Need.ACCEPT
        return Need.PERSON

    @property
    def settled(self) -> bool:
        return self.need is Need.NOTHING or self.decision is not Decision.NONE

    def decided(self, decision: Decision, commit: str | None = None) -> Outcome:
        return replace(self, decision=decision, commit=self.commit if commit is None else commit)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "state": self.state.value,
            "decision": self.decision.value,
            "need": self.need.value,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        known = {k: v for k, v in data.items() if k != "need"}
        known["state"], known["decision"] = State(data["state"]), Decision(data["decision"])
        known["targets"] = tuple(Target(**{**t, "commits": tuple(t["commits"])}) for t in data["targets"])
        for key in ("notes", "hunks", "lost", "gained"):
            known[key] = tuple(data[key])
        return cls(**known)


@dataclass(frozen=True)
class Report:
    """Result of one rebase. ``old`` and ``new`` are ``{"line", "version", "commit"}``.

    ``unproven`` are entries of upstreamed.toml that the new release does not bear out, and patches that
    upstream took without a proof that could be written down.
    """

    old: dict[str, str]
    new: dict[str, str]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    unproven: tuple[str, ...] = ()

    @property
    def open(self) -> list[Outcome]:
        """Patches that a person still has to look at."""
        return [one for one in self.outcomes if not one.settled]

    @property
    def clean(self) -> bool:
        """Say whether nobody is needed."""
        return not self.open and not self.unproven

    def counts(self) -> dict[str, int]:
        found = {state.value: 0 for state in State}
        for one in self.outcomes:
            found[one.state.value] += 1
        return {name: n for name, n in found.items() if n}

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "from": self.old,
            "to": self.new,
            "clean": self.clean,
            "counts": self.counts(),
            "patches": [one.as_json() for one in self.outcomes],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "unproven": list(self.unproven),
        }


def settle(outcome: Outcome, accept: Iterable[str], drop: Iterable[str]) -> Outcome:
    """Apply the decisions that were given on the command line, and those that need nobody."""
    if outcome.patch in set(drop):
        return outcome.decided(Decision.DROPPED, commit="")
    if outcome.state is State.UPSTREAMED:
        return outcome.decided(Decision.RECORDED, commit="")
    if outcome.need is Need.NOTHING:
        return outcome.decided(Decision.ADOPTED)
    if outcome.need is Need.ACCEPT and outcome.patch in set(accept):
        return outcome.decided(Decision.ACCEPTED)
    return outcome
