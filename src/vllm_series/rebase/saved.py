"""The saved state of an interactive rebase: one JSON file, replaced atomically, so a kill leaves the last
good one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.files import write_atomic
from vllm_series.rebase.model import Outcome
from vllm_series.workspace import Workspace

SCHEMA = 1
RUNNING = "running"  # the tool works on the tree: after a kill its content is worth nothing
STOPPED = "stopped"  # a person works on the tree: its content is never thrown away
WRITING = "writing"  # all patches are settled, the new line is being written


@dataclass(frozen=True)
class Saved:
    """``head`` is the commit with all settled patches; ``outcomes`` are theirs, plus the one that stopped
    the run.

    ``patches`` are ``(name, sha256)`` of the old line in order; ``git`` and ``ref`` name a clone and its
    commit.
    """

    old: str
    new: str
    phase: str
    base: str
    head: str
    patches: tuple[tuple[str, str], ...]
    outcomes: tuple[Outcome, ...] = ()
    accept: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    git: str = ""
    ref: str = ""

    @property
    def position(self) -> int:
        """Index of the patch that comes next, or that the run stopped at."""
        return sum(1 for one in self.outcomes if one.settled)

    def tree(self, ws: Workspace) -> Path:
        return tree_path(ws, self.new)


def folder(ws: Workspace) -> Path:
    return ws.work / "rebase"


def path_of(ws: Workspace, new: str) -> Path:
    return folder(ws) / f"{new}.json"


def message_path(ws: Workspace, new: str) -> Path:
    """Where the message of the patch that stopped the run lies, trailers included, to be edited if need
    be."""
    return folder(ws) / f"{new}.message"


def tree_path(ws: Workspace, new: str) -> Path:
    return ws.root / "build" / f"{new}.rebase"


def save(ws: Workspace, state: Saved) -> None:
    data: dict[str, Any] = {"schema": SCHEMA, **{k: v for k, v in vars(state).items() if k != "outcomes"}}
    data["outcomes"] = [one.as_json() for one in state.outcomes]
    write_atomic(path_of(ws, state.new), json.dumps(data, indent=1) + "\n")


def load(ws: Workspace, new: str) -> Saved | None:
    """Return the state of the rebase to ``new``, or None.

    Raises:
        CheckFailed: the file is not readable by this version of the tool.
    """
    path = path_of(ws, new)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError("it was written by another version of this tool")
        data["outcomes"] = tuple(Outcome.from_json(one) for one in data["outcomes"])
        data["patches"] = tuple((name, digest) for name, digest in data["patches"])
        data["accept"], data["drop"] = tuple(data["accept"]), tuple(data["drop"])
        return Saved(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckFailed(
            f"the saved state {path.name} is not readable: {err}",
            fix=f"series rebase --abort --to {new} (the tree build/{new}.rebase is kept aside)",
        ) from err


def in_progress(ws: Workspace) -> list[str]:
    """Return the names of the lines that a rebase is under way to."""
    return sorted(path.name.removesuffix(".json") for path in folder(ws).glob("*.json"))


def the_one(ws: Workspace, new: str | None, asked: str) -> str:
    """Return which rebase ``--continue`` or ``--abort`` means.

    Raises:
        UsageError: there is none, or there are several.
    """
    there = in_progress(ws)
    if new is not None and new in there:
        return new
    if new is None and len(there) == 1:
        return there[0]
    if not there or new is not None:
        which = f" to {new}" if new else ""
        raise UsageError(
            f"{asked}: no rebase{which} is in progress", fix="start one: series rebase FROM --to NEW"
        )
    raise UsageError(
        f"{asked}: several are in progress: {', '.join(there)}", fix=f"series rebase {asked} --to {there[0]}"
    )


def forget(ws: Workspace, new: str) -> None:
    message_path(ws, new).unlink(missing_ok=True)
    path_of(ws, new).unlink(missing_ok=True)


def with_outcome(state: Saved, outcome: Outcome, **changes: Any) -> Saved:
    """Return the state with the outcome of the current patch put in place of an earlier try."""
    return replace(state, outcomes=(*state.outcomes[: state.position], outcome), **changes)
