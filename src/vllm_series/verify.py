"""`series verify`: proves for each line that pins, patches, overlay and LOCK belong together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_series import (
    anchors,
    export,
    fetch,
    importer,
    lint,
    lock,
    overlay,
    probes,
    sdist,
    series,
    stack,
    upstreamed,
)
from vllm_series import apply as applying
from vllm_series.errors import CheckFailed, IntegrityError, SeriesError
from vllm_series.pins import Pin, load_pin
from vllm_series.stack import Stack
from vllm_series.trees import Tree
from vllm_series.workspace import Workspace

OLDEST_PYTHON = (3, 10)  # grammar that the 0.28.0 line still accepts


@dataclass
class Step:
    """One check of one line; ``detail`` says what was proved, ``error`` what failed."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""
    error: SeriesError | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "detail": self.detail,
        }
        if self.error:
            row |= {"error": self.error.message, "fix": self.error.fix, "exit_code": self.error.exit_code}
        return row


def verify(ws: Workspace, names: Iterable[str], sources: Iterable[Path] = ()) -> dict[str, list[Step]]:
    """Verify several lines side by side; never raises for a failed check."""
    order, given = list(names), list(sources)
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(order, pool.map(lambda line: verify_line(ws, line, given), order), strict=True))


def verify_line(ws: Workspace, line: str, sources: Iterable[Path] = ()) -> list[Step]:
    """Run all checks of one line; those whose input a failed check should have made are left out."""
    run = _Run(ws, line, list(sources))
    with applying.line_lock(ws, line):
        for name, check in run.checks():
            begin = time.monotonic()
            try:
                detail, error = check(), None
            except SeriesError as err:
                detail, error = "", err
            run.steps.append(Step(name, error is None, time.monotonic() - begin, detail, error))
            if error and name in {"pin", "import", "series", "apply"}:
                break
    return run.steps


class _Run:
    def __init__(self, ws: Workspace, line: str, sources: list[Path]) -> None:
        self.ws, self.line, self.sources = ws, line, sources
        self.steps: list[Step] = []
        self.pin: Pin
        self.patches: list[series.Patch]
        self.made: Stack

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("pin", self.check_pin),
            ("import", self.check_import),
            ("series", self.check_series),
            ("apply", self.check_apply),
            ("lock", self.check_lock),
            ("lint", self.check_lint),
            ("anchors", self.check_anchors),
            ("live", self.check_live),
            ("upstreamed", self.check_upstreamed),
            ("round trip", self.check_round_trip),
            ("compile", self.check_compile),
        ]

    def check_pin(self) -> str:
        self.pin = load_pin(self.ws, self.line)
        archive = fetch.fetch(self.ws, self.pin.source.sdist, self.sources)
        commit = sdist.commit_id(archive)
        if not sdist.same_commit(commit, self.pin.source.commit):
            raise IntegrityError(
                f"{archive.name} was made from commit {commit}, the pin says {self.pin.source.commit}",
                fix=f"correct pins/{self.line}.toml",
            )
        return f"sha256 {self.pin.source.sdist.sha256[:12]}, commit {commit}"

    def check_import(self) -> str:
        base = importer.import_pin(self.ws, self.pin, self.sources)
        tree = importer.odb(self.ws).tree_of(base)
        if tree != self.pin.source.tree:
            raise IntegrityError(
                f"the import has tree {tree}, pins/{self.line}.toml says {self.pin.source.tree or 'nothing'}",
                fix=f'set source.tree = "{tree}" if the sdist is the right one',
            )
        return f"tree {tree[:12]}"

    def check_series(self) -> str:
        self.patches = series.load(self.ws, self.line)
        return f"{len(self.patches)} patches"

    def check_apply(self) -> str:
        files = overlay.overlay_files(self.ws)
        self.made = stack.build(self.ws, self.pin, self.patches, files, name=f"verify-{self.line}")
        return f"{len(self.made.commits)} commits, {len(files)} overlay files shadow nothing"

    def check_lock(self) -> str:
        lock.check(self.ws, self.made)
        return "LOCK matches"

    def check_lint(self) -> str:
        problems = lint.lint(self.ws, self.line)
        _fail(map(str, problems), f"series lint {self.line} shows all of them")
        return "series, trailers and overlay follow the rules"

    def check_anchors(self) -> str:
        store, before, problems = importer.odb(self.ws), self.made.base, []
        for patch, (_, commit) in zip(self.patches, self.made.commits, strict=True):
            problems += [f"{patch.name}: {row}" for row in anchors.check_patch(store, before, commit, patch)]
            before = commit
        _fail(problems, "move the lines into the anchored place, or correct the Anchor trailer; then export")
        return "every added line lies in its anchor"

    def check_live(self) -> str:
        tree, problems, asked = Tree(importer.odb(self.ws), self.made.base), [], 0
        for patch in self.patches:
            for probe in patch.get("Live-When"):
                answer = probes.ask(tree, probe)
                asked += 1
                if not answer.ok:
                    problems.append(f"{patch.name}: Live-When {probe}: {answer.detail}")
        _fail(
            problems,
            "the patch changes code that no DSA model runs: move it to the code that does, or drop it",
        )
        return f"{asked} probes"

    def check_upstreamed(self) -> str:
        problems = upstreamed.check(self.ws, self.line, Tree(importer.odb(self.ws), self.made.base))
        _fail(problems, f"carry the change as a patch again, or correct patches/{self.line}/upstreamed.toml")
        return f"{len(upstreamed.load(self.ws, self.line))} entries hold"

    def check_round_trip(self) -> str:
        store = importer.odb(self.ws)
        commits = export.collect(self.ws, store, self.made.base, self.made.head, self.line)
        plan = export.plan_patches(store, commits, self.patches, self.made, (), self.line)
        if not plan.empty:
            raise CheckFailed(
                f"an export would change {', '.join([*plan.rewritten, *plan.added, *plan.dropped])}",
                fix=f"series apply {self.line} && series export {self.line}",
            )
        return "export changes nothing"

    def check_compile(self) -> str:
        store = importer.odb(self.ws)
        paths = [
            p
            for p, how in store.changed(self.made.base, self.made.head).items()
            if p.endswith(".py") and how != "D"
        ]
        for path in paths:
            compile_file(store.blob(self.made.head, path) or b"", path)
        return f"{len(paths)} Python files"


def _fail(problems: Iterable[str], fix: str) -> None:
    rows = list(problems)
    if rows:
        raise CheckFailed("\n".join(rows), fix=fix)


def compile_file(data: bytes, path: str) -> None:
    """Compile one file for this interpreter and parse it with the oldest grammar that a line supports.

    Raises:
        CheckFailed: it does not compile.
    """
    import ast

    try:
        compile(data, path, "exec", dont_inherit=True)
        ast.parse(data, path, feature_version=OLDEST_PYTHON)
    except (SyntaxError, ValueError) as err:
        raise CheckFailed(f"{path} does not compile: {err}", fix="correct it and export again") from err
