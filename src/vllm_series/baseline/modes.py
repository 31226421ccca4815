"""Modes of a run: which tree, and which of our switches are set."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import UsageError

MASTER = "VLLM_DSA"


@dataclass(frozen=True)
class Mode:
    """``patched`` tells the tree; ``env`` is set for every test process; ``exact``: must equal upstream
    exactly."""

    name: str
    patched: bool
    env: dict[str, str]
    exact: bool = False


def features(tree: Path) -> dict[str, str]:
    """Return ``{feature: main switch}`` of the registry in a patched tree (``vllm/dsa/features.py``),
    unexecuted."""
    source = tree / "vllm" / "dsa" / "features.py"
    if not source.is_file():
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Feature"):
            continue
        words = [
            one.value
            for arg in node.args
            for one in ast.walk(arg)
            if isinstance(one, ast.Constant) and one.value
        ]
        switch = next((one for one in words if isinstance(one, str) and one.startswith("VLLM_")), None)
        if switch and isinstance(words[0], str):
            found[words[0]] = switch
    return found


def choices(tree: Path, switch: str) -> list[str]:
    """Return the values that ``vllm/envs.py`` declares for a switch: ``["0", "1"]`` for a bool."""
    text = (tree / "vllm" / "envs.py").read_text(encoding="utf-8")
    found = re.search(rf"^    {switch}: (bool|Literal\[[^\]]*\])", text, re.MULTILINE)
    if not found:
        return []
    return ["0", "1"] if found[1] == "bool" else re.findall(r'"([^"]+)"', found[1])


def resolve(name: str, tree: Path) -> Mode:
    """Return the mode called ``name``: upstream, off, on, ``feature:<id>`` or ``feature:<id>=<value>``.

    ``feature:<id>`` switches that feature on and the others off. ``tree`` is the patched tree.

    Raises:
        UsageError: no such mode, feature or value.
    """
    if name == "upstream":
        return Mode(name, patched=False, env={})
    if name == "off":
        return Mode(name, patched=True, env={MASTER: "0"}, exact=True)
    if name == "on":
        return Mode(name, patched=True, env={})
    kind, _, rest = name.partition(":")
    known = features(tree)
    feature, _, value = rest.partition("=")
    if kind != "feature" or feature not in known:
        raise UsageError(
            f"unknown mode {name!r}",
            fix="use upstream, off, on, or feature:<id> with one of: " + (", ".join(sorted(known)) or "none"),
        )
    env = {}
    for one, switch in known.items():
        values = choices(tree, switch)
        if one != feature:
            env[switch] = "off" if "off" in values else "0"
            continue
        on = [choice for choice in values if choice not in ("off", "0")]
        if (value and value not in values) or not on:
            raise UsageError(
                f"{switch} has no value {value or 'that switches it on'}", fix=f"use one of: {values}"
            )
        env[switch] = value or on[0]
    return Mode(name, patched=True, env=env)
