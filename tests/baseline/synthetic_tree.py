"""Small pytest projects that stand for upstream's tree, run by the real engine in real processes."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from vllm_series.baseline.engine import FileRunner, Limits, run_files
from vllm_series.baseline.outcome import Run
from vllm_series.baseline.workers import ForkPool, FreshPool, Pool

MACHINE = {"cpu": "test", "cores": 2}


def lay(site: Path, files: Mapping[str, str]) -> Path:
    """Write test files (name -> text) into ``site/tests``."""
    for name, text in files.items():
        path = site / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return site


class Runs:
    """Makes pools and runs for synthetic sites; closes the pools at the end."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.pools = scratch, list[Pool]()

    def runner(
        self, site: Path, limits: Limits, *, fresh: bool = False, env: Mapping[str, str] = {}
    ) -> FileRunner:
        place = self.scratch / f"s{len(self.pools)}"
        place.mkdir(parents=True)
        own = {"PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(site), **env}
        python = Path(sys.executable)
        pool = FreshPool(python, site, own) if fresh else ForkPool(python, site, own, place / "server.log")
        self.pools.append(pool)
        return FileRunner(pool, site, place, limits)

    def run(self, site: Path, mode: str = "upstream", limits: Limits | None = None, **kind: object) -> Run:
        runner = self.runner(site, limits or Limits(20, 60), **kind)  # type: ignore[arg-type]
        names = sorted(path.relative_to(site).as_posix() for path in (site / "tests").rglob("test_*.py"))
        run = Run("0.0.0", mode, "tree", {}, dict(MACHINE), date="2026-01-01")
        run.files = run_files(runner, names, 2)
        return run
