"""Which files of a tree import which, from their source text alone (``ast``, nothing is executed)."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: A dotted module name in quotes: the target of a monkeypatch, or a module that a subprocess runs.
_MENTION = re.compile(r"""["'](vllm(?:\.[A-Za-z_]\w*)+)["']""")
HUB = 60
FOLDERS = ("vllm", "tests")


@dataclass(frozen=True)
class Graph:
    """``imports`` maps a file (posix path in the tree) to the files that it imports or names in a string."""

    imports: Mapping[str, frozenset[str]]

    def importers(self, targets: Iterable[str], depth: int) -> dict[str, int]:
        """Return ``{file: distance}`` of everything that reaches ``targets`` in at most ``depth`` imports.

        Nothing is reached through a file that more than ``HUB`` others import (``vllm/envs.py``) but its
        direct importers.
        """
        back: dict[str, set[str]] = {}
        for source, found in self.imports.items():
            for target in found:
                back.setdefault(target, set()).add(source)
        targets = set(targets)
        distance, frontier = dict.fromkeys(targets, 0), targets
        for step in range(1, depth + 1):
            reached = {one for target in frontier for one in back.get(target, ())} - distance.keys()
            # Whose importers are asked next: what was reached through a file that half of the tree imports
            # is not.
            telling = [one for one in frontier if len(back.get(one, ())) <= HUB]
            frontier = {one for target in telling for one in back.get(target, ())} & reached
            distance.update(dict.fromkeys(reached, step))
        return {name: step for name, step in distance.items() if step}


def module_of(path: str) -> str:
    """``vllm/a/__init__.py`` -> ``vllm.a``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements below ``body``, functions and classes included; expressions are not walked (they are
    most)."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(part.body)


def imported(source: str, path: str, modules: Mapping[str, str]) -> set[str]:
    """Return the files that ``source`` (the text of ``path``) imports at any level, or names in a string.

    Args:
        source: Python text.
        path: posix path in the tree, for relative imports.
        modules: dotted name -> file of every module of the tree.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    package = path.split("/")[:-1]
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{start}.{alias.name}"
                names.add(full if full in modules else start)
    for found in set(_MENTION.findall(source)):
        while found and found not in modules:
            found = found.rpartition(".")[0]
        if "." in found:
            names.add(found)
    return {modules[name] for name in names if name in modules} - {path}


def build_graph(tree: Path, cache: Path | None = None) -> Graph:
    """Parse ``vllm/`` and ``tests/`` of a tree (20 s for a vLLM release); ``cache`` keeps the result."""
    if cache is not None and cache.is_file():
        saved: dict[str, list[str]] = json.loads(cache.read_text())
        return Graph({name: frozenset(found) for name, found in saved.items()})
    files = [
        path.relative_to(tree).as_posix()
        for folder in FOLDERS
        for path in sorted((tree / folder).rglob("*.py"))
        if "third_party" not in path.parts
    ]
    modules = {module_of(name): name for name in files}
    graph = {
        name: frozenset(imported((tree / name).read_text(encoding="utf-8", errors="replace"), name, modules))
        for name in files
    }
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_name(f".{cache.name}.{os.getpid()}")
        fresh.write_text(json.dumps({name: sorted(found) for name, found in graph.items() if found}))
        fresh.replace(cache)
    return Graph(graph)
