"""Modes of a run: which tree, and which of our switches are set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
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

    @property
    def feature(self) -> str:
        """The feature that a mode is of; empty for the others."""
        kind, _, rest = self.name.partition(":")
        return rest.partition("=")[0] if kind == "feature" else ""


def features(tree: Path) -> dict[str, str]:
    """Return ``{feature: main switch}`` of the registry in a patched tree (``vllm/dsa/features.py``),
    unexecuted."""
    rows = _rows(tree / "vllm" / "dsa" / "features.py")
    return {name: switch for name, switch in rows.items() if switch}


def shipped(tree: Path) -> dict[str, str]:
    """Return ``{feature: main switch}`` of the known features whose subpackage has a ``FEATURE`` row.

    The others are names without code (``not in this release``): there is nothing to switch on.
    """
    found: dict[str, str] = {}
    for name, switch in features(tree).items():
        own = _rows(tree / "vllm" / "dsa" / name / "feature.py")
        if name in own:
            found[name] = own[name] or switch
    return found


def _rows(source: Path) -> dict[str, str]:
    """``{name: first switch}`` of the ``Feature(...)`` calls in a file; module constants are looked up.

    The switch is empty where it is imported from elsewhere.
    """
    if not source.is_file():
        return {}
    tree = ast.parse(source.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Feature"):
            continue
        words: list[object] = []
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for one in ast.walk(argument):
                named = constants.get(one.id) if isinstance(one, ast.Name) else one
                words += [named.value] if isinstance(named, ast.Constant) else []
        switches = [one for one in words if isinstance(one, str) and one.startswith("VLLM_")]
        if words and isinstance(words[0], str):
            found[words[0]] = switches[0] if switches else ""
    return found


def choices(tree: Path, switch: str) -> list[str]:
    """Return the values that ``vllm/envs.py`` declares for a switch: ``["0", "1"]`` for a bool."""
    text = (tree / "vllm" / "envs.py").read_text(encoding="utf-8")
    found = re.search(rf"^    {switch}: (bool|Literal\[[^\]]*\])", text, re.MULTILINE)
    if not found:
        return []
    return ["0", "1"] if found[1] == "bool" else re.findall(r'"([^"]+)"', found[1])


EVERY = "features"


def forced(tree: Path, switch: str) -> list[str]:
    """Values that switch a feature on whatever it would choose itself; ``auto`` only if there is no other."""
    values = [value for value in choices(tree, switch) if value not in ("off", "0")]
    return [value for value in values if value != "auto"] or values


def expand(names: Iterable[str], tree: Path) -> list[str]:
    """Spell modes out: ``features`` is one for each value of each shipped feature, ``<id>`` is
    ``feature:<id>``.

    ``upstream`` is dropped: it is what the others are compared with. ``tree`` is the patched tree.
    """
    known = features(tree)
    found: list[str] = []
    for name in names:
        if name == EVERY:
            for feature, switch in shipped(tree).items():
                values = forced(tree, switch)
                found += [
                    f"feature:{feature}={one}" if len(values) > 1 else f"feature:{feature}" for one in values
                ]
        elif name.partition("=")[0] in known:
            found.append(f"feature:{name}")
        elif name != "upstream":
            found.append(name)
    return list(dict.fromkeys(found))


def resolve(name: str, tree: Path) -> Mode:
    """Return the mode called ``name``: upstream, off, on, ``feature:<id>`` or ``feature:<id>=<value>``.

    ``feature:<id>`` switches that feature on (see `forced`) and the others off. ``tree`` is the patched tree.

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
            fix="use upstream, off, on, features, or feature:<id> with one of: "
            + (", ".join(sorted(known)) or "none"),
        )
    env = {}
    for one, switch in known.items():
        values = choices(tree, switch)
        if one != feature:
            env[switch] = "off" if "off" in values else "0"
            continue
        on = forced(tree, switch)
        if (value and value not in values) or not on:
            raise UsageError(
                f"{switch} has no value {value or 'that switches it on'}", fix=f"use one of: {values}"
            )
        env[switch] = value or on[0]
    return Mode(name, patched=True, env=env)
