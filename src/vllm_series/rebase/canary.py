"""The nightly look ahead: does the series still fit the newest release on the package index?"""

from __future__ import annotations

from vllm_series import pins
from vllm_series.errors import UsageError
from vllm_series.rebase import trial, upstream
from vllm_series.rebase.model import Report
from vllm_series.workspace import Workspace


def canary(ws: Workspace, line: str | None = None, to: str = upstream.LATEST) -> Report:
    """Return the report of carrying ``line`` (default: the current one) to the newest release; writes no
    file.

    A line that is on the newest release already gives a report without patches that is clean and says so.
    """
    old = upstream.of_line(ws, line or current(ws))
    new = upstream.of_version(ws, to)
    if new.version == old.version:
        return Report(old.as_json(), new.as_json(), (), (f"line {old.line} is on the newest release",))
    done = trial.run(ws, trial.steps_of(ws, old.line), old, new).report
    notes = () if new.pin and new.pin.wheels else (f"vLLM {new.version} has no wheel on the index yet",)
    return Report(done.old, done.new, done.outcomes, (*done.notes, *notes), done.seconds)


def current(ws: Workspace) -> str:
    """Return the line whose role is ``current``.

    Raises:
        UsageError: there is not exactly one.
    """
    found = [line for line in pins.lines(ws) if pins.load_pin(ws, line).role == "current"]
    if len(found) != 1:
        raise UsageError(f"{len(found)} lines have the role `current`", fix="name one: series canary LINE")
    return found[0]
