"""Runs modes of a line: makes environment, sites and workers, and keeps the results under
``build/baseline``."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_series import apply, fetch, importer
from vllm_series.baseline import diff as diffing
from vllm_series.baseline import fingerprint
from vllm_series.baseline.engine import FileRunner, Limits, run_files
from vllm_series.baseline.environment import driver_stub, run_env
from vllm_series.baseline.modes import Mode, expand, resolve
from vllm_series.baseline.outcome import FileRun, Node, Run
from vllm_series.baseline.progress import Progress
from vllm_series.baseline.workers import ForkPool, FreshPool, Pool
from vllm_series.envs import env_digest, torch_env
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.git import Git
from vllm_series.pins import load_pin
from vllm_series.runtime import Site, host_wheel, make_site, pristine_site
from vllm_series.ui import say
from vllm_series.workspace import Workspace

PATIENCE = 3.0  # limits of a re-run, in those of the first run
WHOLE_FILE_S = 90.0  # a file that takes longer is not run again as a whole to confirm a difference


@dataclass(frozen=True)
class Options:
    """How tests are run. ``isolation``: ``fork`` from a process with vLLM imported, or ``fresh``
    interpreters."""

    jobs: int = 2
    isolation: str = "fork"
    limits: Limits = field(default_factory=Limits)
    gpu: bool = False


class Session:
    """One line on this machine. Use as a context manager: it ends the worker processes."""

    def __init__(self, ws: Workspace, line: str, options: Options) -> None:
        self.ws, self.line, self.options = ws, line, options
        if options.gpu and options.isolation == "fork":
            raise UsageError(
                "CUDA cannot be used in forked processes", fix="pass --isolation fresh with --gpu"
            )
        self.pin = load_pin(ws, line)
        self.root = ws.root / "build" / "baseline" / line
        self.root.mkdir(parents=True, exist_ok=True)
        self._sites: dict[bool, Site] = {}
        self._pools: dict[str, Pool] = {}
        self._print: dict[str, Any] = {}

    @cached_property
    def python(self) -> Path:
        """The interpreter of the line's torch environment, which is made when tests are run here."""
        return torch_env(self.ws, self.line)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def site(self, patched: bool) -> Site:
        """The pristine or the patched site of the line."""
        if patched not in self._sites:
            if patched:
                head = apply.ensure(self.ws, self.pin).head
                self._sites[patched] = make_site(self.ws, self.line, importer.odb(self.ws), head)
            else:
                self._sites[patched] = pristine_site(self.ws, self.line)
        return self._sites[patched]

    def use_commit(self, commit: str) -> None:
        """Take another commit of the object store as the patched tree (bisection)."""
        self._sites[True] = make_site(self.ws, self.line, importer.odb(self.ws), commit)

    def mode(self, name: str) -> Mode:
        """Resolve a mode's name; features are looked up in the patched tree."""
        tree = self.site(patched=True).path if name not in ("upstream", "off", "on") else Path()
        return resolve(name, tree)

    def modes(self, names: Sequence[str]) -> list[str]:
        """Spell out ``features`` and bare feature names; without ``upstream``."""
        plain = all(name in ("upstream", "off", "on") for name in names)
        return expand(names, Path() if plain else self.site(patched=True).path)

    def _env(self, mode: Mode) -> dict[str, str]:
        scratch = self.root / "scratch" / _safe(mode.name)
        scratch.mkdir(parents=True, exist_ok=True)
        stub = None if self.options.gpu else driver_stub(self.ws.cache / "driver-stub")
        return run_env(self.site(mode.patched).path, scratch, mode.env, stub=stub, gpu=self.options.gpu)

    def fingerprint(self) -> dict[str, Any]:
        """What two runs of this line must have in common."""
        if not self._print:
            env = self._env(Mode("upstream", patched=False, env={}))
            limits = self.options.limits
            self._print = {
                **fingerprint.machine(),
                **fingerprint.packages(self.python, env),
                "wheel": host_wheel(self.pin).sha256[:16],
                "environment": env_digest(self.ws, self.line)[:16],
                "isolation": self.options.isolation,
                "limits": f"{limits.test_s:g} s a test, {limits.file_s:g} s a file",
                "compiled parts": "loaded"
                if env.get("SERIES_LOAD_OPS") or self.options.gpu
                else "not loaded",
            }
        return dict(self._print)

    def _pool(self, mode: Mode) -> Pool:
        if mode.name not in self._pools:
            env, site = self._env(mode), self.site(mode.patched).path
            if self.options.isolation == "fresh":
                self._pools[mode.name] = FreshPool(self.python, site, env)
            else:
                log = self.root / "scratch" / _safe(mode.name) / "server.log"
                self._pools[mode.name] = ForkPool(self.python, site, env, log)
        return self._pools[mode.name]

    def _runner(self, mode: Mode, place: str, patience: float = 1.0) -> FileRunner:
        scratch = self.root / "scratch" / _safe(mode.name) / place
        limits = self.options.limits
        limits = Limits(limits.test_s * patience, limits.file_s * patience)
        return FileRunner(self._pool(mode), self.site(mode.patched).path, scratch, limits)

    def run(
        self, name: str, files: Sequence[str], *, resume: bool = False, seconds: float | None = None
    ) -> Run:
        """Run ``files`` in a mode and save the result as ``build/baseline/<line>/<mode>.json``.

        Args:
            name: the mode.
            files: test files, in the order in which they are started.
            resume: take over what the saved run of the same tree, machine and settings has.
            seconds: start no further file after this time; files that were not reached are not in the result.
        """
        mode = self.mode(name)
        run = Run(
            line=self.line,
            mode=name,
            tree=self.site(mode.patched).tree,
            env=mode.env,
            fingerprint=self.fingerprint(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        progress = Progress(run, self.result_path(name), resume=resume)
        left = progress.left(files)
        say(f"{self.line} {name}: {len(left)} of {len(files)} files to run on tree {run.tree[:12]}")
        count = 0

        def told(path: str, one: FileRun) -> None:
            nonlocal count
            count += 1
            progress.add(path, one)
            say(f"  {self.line} {name} {count}/{len(left)} {path}: {_short(one)} in {one.seconds:.0f} s")

        if left:
            pool = self._pool(mode)
            run.problems = dict(getattr(pool, "failed", {}))
            until = None if seconds is None else time.monotonic() + seconds
            try:
                run_files(self._runner(mode, "runs"), left, self.options.jobs, told, until=until)
            finally:  # an interrupted run keeps what it has
                progress.save()
        return progress.of(files)

    def result_path(self, mode: str) -> Path:
        """Where the run of a mode is saved."""
        return self.root / result_name(mode)

    def again(self, name: str) -> diffing.Again:
        """Return a function that runs nodes of a mode again (all nodes of a file whose list is empty).

        The limits are wider than before: a test that was only slow, on a busy machine, is not a difference.
        """
        runner = self._runner(self.mode(name), "again", PATIENCE)

        def run(wanted: Mapping[str, list[str]]) -> dict[str, Node]:
            alone = {path: nodes for path, nodes in wanted.items() if nodes}
            whole = [path for path, nodes in wanted.items() if not nodes]
            found = run_files(runner, alone, self.options.jobs, only=alone) if alone else {}
            found.update(run_files(runner, whole, self.options.jobs) if whole else {})
            return {node: one for file in found.values() for node, one in file.nodes.items()}

        return run

    def compare(
        self,
        upstream: Run,
        patched: Run,
        *,
        confirm: bool = True,
        force: bool = False,
        again: Mapping[str, list[tuple[str, str]]] | None = None,
        planned: Sequence[str] | None = None,
    ) -> diffing.Diff:
        """Compare two runs; what differs is run again three times on both sides, or was (``again``)
        elsewhere. With ``planned``, runs that were cut short are compared in what both have."""
        mode = self.mode(patched.mode)
        found = diffing.compare(upstream, patched, exact=mode.exact, force=force, planned=planned)
        doubtful = found.of(*diffing.DOUBTFUL)
        if again is not None:
            diffing.judge(found, again)
        elif doubtful and confirm:
            say(f"{self.line} {patched.mode}: {len(doubtful)} tests differ, running them again on both trees")
            diffing.confirm(
                found,
                self.again("upstream"),
                self.again(patched.mode),
                lambda file: upstream.files[file].seconds <= WHOLE_FILE_S,
            )
        return found

    def clean(self, modes: Iterable[str]) -> None:
        """Remove scratch folders (compile caches, temporary files, logs of tests that passed)."""
        for name in modes:
            shutil.rmtree(self.root / "scratch" / _safe(name), ignore_errors=True)


_MADE_OF = ("pins", "patches", "overlay")


def commit_of(ws: Workspace) -> str:
    """The last commit that changed what patched trees are made of, with ``+`` if the checkout differs from it
    there; empty without git. (A later commit of anything else gives the same trees.)"""
    try:
        git = Git(ws.root)
        changed = git.out("status", "--porcelain", "-uno", "--", *_MADE_OF)
        return git.out("log", "-1", "--format=%H", "--", *_MADE_OF) + ("+" if changed else "")
    except CheckFailed:
        return ""


def result_name(mode: str) -> str:
    """File name of a mode's saved run."""
    return f"{_safe(mode)}.json"


def confirmed(path: Path, mode: str) -> dict[str, list[tuple[str, str]]]:
    """Read the re-runs that another machine made (``device.py``): outcomes by node, upstream's first."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8")).get(mode, {})
    return {node: [(one, two) for one, two in pairs] for node, pairs in rows.items()}


def _safe(mode: str) -> str:
    return mode.replace(":", "-").replace("=", "-")


def _short(run: FileRun) -> str:
    counts: dict[str, int] = {}
    for node in run.nodes.values():
        counts[node.outcome] = counts.get(node.outcome, 0) + 1
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "no test"


def sdist_of(ws: Workspace, line: str) -> Path:
    """The pinned sdist, fetched if need be."""
    return fetch.fetch(ws, load_pin(ws, line).source.sdist)
