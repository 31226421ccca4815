"""How much of what the patches change a test file can really see, as one number.

Importing a touched file says little when half of the tree imports it (``vllm/envs.py``) and much when three
files do. So each touched file counts by how rarely it is imported, more when the test names a function or
class that a patch changes there, less when the test reaches it through another module. What the overlay
imports of upstream counts a little: our code runs on it, but it is upstream's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_series.baseline.imports import Graph, imported, module_of
from vllm_series.pysource import Source
from vllm_series.series import Patch

CROWD = 10  # so many importers halve what a file counts
UNNAMED = 0.4  # imports the file, names nothing that a patch changes in it
THROUGH = 0.3  # reaches it through one other module
NAMED_AFTER = 0.5  # test_indexer_x.py and indexer.py
OVERLAY = 0.25  # a file that the overlay imports and no patch touches


@dataclass
class Relevance:
    """Scores tests of one tree. ``targets`` maps a file to the names that patches change in it."""

    graph: Graph
    targets: Mapping[str, frozenset[str]]
    overlay: frozenset[str] = frozenset()
    _importers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for found in self.graph.imports.values():
            for name in found:
                self._importers[name] = self._importers.get(name, 0) + 1

    def rarity(self, path: str) -> float:
        """1 for a file that nobody imports, 1/2 at `CROWD` importers, towards 0 for one of everybody."""
        return 1 / (1 + self._importers.get(path, 0) / CROWD)

    def score(self, test: str, text: str) -> float:
        """Return the relevance of a test file; 0 if it reaches nothing.

        Args:
            test: its path in the tree.
            text: its source.
        """
        total = 0.0
        for name in self.graph.imports.get(test, frozenset()):
            value = self._value(name)
            if value:
                named = any(re.search(rf"\b{re.escape(one)}\b", text) for one in self.targets.get(name, ()))
                total += value * (1 if named else UNNAMED)
                total += NAMED_AFTER * value * _named_after(test, name)
            else:
                behind = self.graph.imports.get(name, frozenset())
                total += THROUGH * self.rarity(name) * max(map(self._value, behind), default=0.0)
        return round(total, 5)

    def _value(self, name: str) -> float:
        kind = 1.0 if name in self.targets else OVERLAY if name in self.overlay else 0.0
        return kind * self.rarity(name)


def _named_after(test: str, source: str) -> bool:
    stem = source.rpartition("/")[2].removesuffix(".py")
    return f"_{stem}_" in f"{test.rpartition('/')[2].removesuffix('.py')}_"


def changed_names(patches: Iterable[Patch], sources: Mapping[str, bytes]) -> dict[str, frozenset[str]]:
    """Return the top-level functions, classes and values of each file that the patches' anchors name.

    Args:
        patches: the line's patches; an anchor is ``file::Qual.name``.
        sources: the pristine text of the files; an anchor that is no definition there counts for nothing.
    """
    found: dict[str, set[str]] = {}
    for patch in patches:
        for anchor in patch.get("Anchor"):
            path, _, name = anchor.partition("::")
            top = name.partition(".")[0]
            if path in sources and top != "TYPE_CHECKING":
                try:
                    known = bool(Source(sources[path], path).spans(top))
                except SyntaxError:
                    known = False
                found.setdefault(path, set()).update([top] if known else [])
    return {path: frozenset(names) for path, names in found.items()}


def overlay_imports(texts: Mapping[str, str], files: Iterable[str]) -> frozenset[str]:
    """Return the files of upstream that overlay modules import.

    Args:
        texts: overlay path (``vllm/dsa/x.py``) -> source.
        files: all Python files of the pristine tree.
    """
    modules = {module_of(name): name for name in files}
    return frozenset(one for path, text in texts.items() for one in imported(text, path, modules))
