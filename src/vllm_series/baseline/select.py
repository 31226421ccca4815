"""Which files a command runs: a set of the plan, or what the user's patterns name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from vllm_series.baseline.gpu_plan import candidates
from vllm_series.baseline.plan import Plan, is_test
from vllm_series.errors import UsageError

SETS = ("short", "features", "full", "gpu")


def chosen(plan: Plan, which: str, patterns: Sequence[str], budget_s: float, tree: Path) -> list[str]:
    """Return test files in the order in which they are to be started, what matters most first.

    Args:
        plan: the line's plan.
        which: one of `SETS`, used when there is no pattern.
        patterns: the name of any upstream test file (a node id counts as its file), or a pattern among the
            planned files: with wildcards (``tests/v1/*indexer*``), a folder, or a part of the name.
        budget_s: processor seconds of the short set.
        tree: the pristine tree.

    Raises:
        UsageError: a pattern matches nothing.
    """
    if not patterns:
        if which == "gpu":
            return [one.path for one in sorted(candidates(plan, {}), key=lambda one: (-one.weight, one.path))]
        if which == "features":
            return plan.of_features()
        return plan.short(budget_s) if which == "short" else plan.full()
    planned = plan.ranked()
    found: list[str] = []
    for pattern in patterns:
        name = pattern.partition("::")[0].removeprefix("./").rstrip("/")
        if not name:  # it would be a part of every name
            raise UsageError(f"{pattern!r} selects nothing", fix=f"series baseline plan {plan.line}")
        if (tree / name).is_file() and is_test(name):
            found.append(name)
            continue
        matched = [path for path in planned if _matches(path, name)]
        if not matched:
            raise UsageError(
                f"{pattern}: {_why(plan.line, name, tree)}", fix=f"series baseline plan {plan.line}"
            )
        found += matched
    return list(dict.fromkeys(found))


def _matches(path: str, pattern: str) -> bool:
    if any(char in pattern for char in "*?["):
        return fnmatch.fnmatchcase(path, pattern)
    return path.startswith(f"{pattern}/") or pattern in path


def _why(line: str, name: str, tree: Path) -> str:
    if name.endswith(".py") and "*" not in name:
        return f"upstream {line} has no such test file"
    there = sum(_matches(path.relative_to(tree).as_posix(), name) for path in (tree / "tests").rglob("*.py"))
    planned = "no planned test matches"
    return f"{planned}; {there} others do, name them in full" if there else planned


def split_modes(text: str) -> list[str]:
    """``"off, on"`` -> ``["off", "on"]``."""
    return [one.strip() for one in text.split(",") if one.strip()]
