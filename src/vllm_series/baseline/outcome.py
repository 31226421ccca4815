"""What a test run says: one outcome per node, kept as plain JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed

SCHEMA = 1

#: Outcomes as pytest names them.
PYTEST = ("passed", "failed", "skipped", "error", "xfailed", "xpassed")
#: Outcomes of a test whose process did not live to tell: signal or early exit, over the time limit, SIGKILL
#: that was not ours (the kernel's answer to lack of memory), and left over when the file's own limit was
#: reached.
DIED = ("crash", "timeout", "killed")
NOT_RUN = "not_run"
#: Not in the sample of a file that has more tests than its time allows (the same sample on both trees).
LEFT_OUT = "left_out"
BAD = frozenset({"failed", "error", *DIED})
OUTCOMES = frozenset({*PYTEST, *DIED, NOT_RUN, LEFT_OUT})


@dataclass
class Node:
    """Outcome of one node. ``reason`` is the skip reason or the last line of the failure, without machine
    paths."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass
class FileRun:
    """Outcome of one test file. ``nodes`` is by node id; a file that failed to import has one node, itself.

    ``seconds`` is wall time, ``cpu`` processor time of its processes (children that were waited for
    included).
    """

    seconds: float = 0.0
    cpu: float = 0.0
    processes: int = 1
    nodes: dict[str, Node] = field(default_factory=dict)


@dataclass
class Run:
    """One run of a set of test files in one mode."""

    line: str
    mode: str
    tree: str
    env: dict[str, str]
    fingerprint: dict[str, Any]
    files: dict[str, FileRun] = field(default_factory=dict)
    date: str = ""
    problems: dict[str, str] = field(default_factory=dict)

    def nodes(self) -> dict[str, Node]:
        """All nodes of all files."""
        return {name: node for one in self.files.values() for name, node in one.nodes.items()}

    def busy(self) -> float:
        """How many times longer than its processor time the run took: what else the machine did."""
        wall = sum(one.seconds for one in self.files.values())
        cpu = sum(one.cpu for one in self.files.values())
        return max(1.0, wall / cpu) if cpu else 1.0

    def counts(self) -> dict[str, int]:
        """How many nodes have each outcome."""
        found: dict[str, int] = {}
        for node in self.nodes().values():
            found[node.outcome] = found.get(node.outcome, 0) + 1
        return dict(sorted(found.items()))

    def save(self, path: Path) -> None:
        """Write the run as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run.

        Raises:
            CheckFailed: not there, not JSON, or of another schema.
        """
        again = "run it again with `series baseline run`"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckFailed(f"cannot read the run {path}: {error}", fix=again) from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise CheckFailed(f"{path} is not a run of schema {SCHEMA}", fix=again)
        try:
            files = {
                name: FileRun(
                    one["seconds"],
                    one["cpu"],
                    one["processes"],
                    {k: Node(**v) for k, v in one["nodes"].items()},
                )
                for name, one in data.pop("files").items()
            }
            run = cls(files=files, **data)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckFailed(f"{path} is not a run of schema {SCHEMA}: {error}", fix=again) from error
        wrong = {node.outcome for node in run.nodes().values()} - OUTCOMES
        if wrong:
            raise CheckFailed(f"{path} holds unknown outcomes: {', '.join(sorted(wrong))}", fix=again)
        return run
