"""Buildkite's form of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from vllm_series.ci.steps import Step

HEADER = "# Made by `series ci pipeline`; the steps are in src/vllm_series/ci/steps.py.\n"


def render(found: Sequence[Step]) -> str:
    """Return the pipeline as YAML: one Buildkite group per ``group`` of the steps, in their order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for step in found:
        groups.setdefault(step.group, []).append(command_step(step))
    data = {"steps": [{"group": name, "steps": rows} for name, rows in groups.items()]}
    return HEADER + yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)


def command_step(step: Step) -> dict[str, Any]:
    """Return one step as Buildkite's ``commandStep``."""
    row: dict[str, Any] = {
        "key": step.key.replace(".", "_"),  # Buildkite's keys have no dots
        "label": step.label,
        "command": step.command,
        "agents": {"queue": step.queue},
        "timeout_in_minutes": step.minutes,
        # An agent that went away is no result; anything else is.
        "retry": {"automatic": [{"exit_status": -1, "limit": 2}]},
    }
    if step.needs:
        row["depends_on"] = [
            {"step": key.replace(".", "_"), **({"allow_failure": True} if step.after_failures else {})}
            for key in step.needs
        ]
    if step.artifacts:
        row["artifact_paths"] = list(step.artifacts)
    if step.shards > 1:
        row["parallelism"] = step.shards
    if step.condition:
        row["if"] = step.condition
    if step.soft_exit is not None:
        row["soft_fail"] = [{"exit_status": step.soft_exit}]
    return row
