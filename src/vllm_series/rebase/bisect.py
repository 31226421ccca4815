"""Finds the patch that makes a command fail: tries the line's first patches, the overlay on top of each."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_series import importer, overlay, scratch, stack
from vllm_series.errors import CheckFailed, NeedsPerson, UsageError
from vllm_series.git import Git
from vllm_series.lock_file import locked
from vllm_series.pins import Pin
from vllm_series.ui import say
from vllm_series.workspace import Workspace

SKIP = 125  # as `git bisect run` has it: this tree cannot be tried
PRISTINE, OVERLAY = "upstream without anything", "the overlay"
NEVER_RUN = {126, 127}


@dataclass(frozen=True)
class Try:
    """One tree that the command ran in."""

    upto: str  # last patch in it, or PRISTINE or OVERLAY
    code: int
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """``guilty`` is a patch name, PRISTINE, OVERLAY, or '' if the command does not fail with all patches.

    ``candidates`` has more than one name where skipped trees lie between.
    """

    line: str
    guilty: str
    candidates: tuple[str, ...]
    tries: tuple[Try, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "line": self.line,
            "guilty": self.guilty,
            "candidates": list(self.candidates),
            "tries": [vars(one) for one in self.tries],
        }

    def text(self) -> str:
        if not self.guilty:
            return f"line {self.line}: the command does not fail with all patches"
        if self.guilty == PRISTINE:
            return f"line {self.line}: the command fails on upstream itself, no patch is to blame"
        if len(self.candidates) > 1:
            names = ", ".join(self.candidates)
            return f"line {self.line}: one of {names} makes it fail (trees between were skipped)"
        return f"line {self.line}: {self.guilty} makes the command fail"


def bisect(ws: Workspace, pin: Pin, command: Sequence[str]) -> Verdict:
    """Run ``command`` in throw-away trees of the line; its exit code says good (0), bad (1-124) or skip
    (125).

    Raises:
        UsageError: there is no command, or it cannot be run.
        NeedsPerson: the tree with all patches is one that the command skips.
    """
    if not command:
        raise UsageError("bisect needs a command", fix=f"series bisect {pin.line} -- COMMAND ...")
    made = stack.current(ws, pin)
    store = importer.odb(ws)
    laid = overlay.store(store, overlay.overlay_files(ws))
    heads = [(PRISTINE, made.base), (OVERLAY, _on_top(ws, store, made.base, laid))]
    heads += [(name, _on_top(ws, store, commit, laid)) for name, commit in made.commits]
    name = f"bisect-{pin.line}"
    with locked(ws.work / f"{name}.lock"), scratch.work_tree(store, ws, made.base, name) as tree:
        tries: dict[int, Try] = {}

        def code(number: int) -> int:
            if number not in tries:
                tries[number] = _run(tree, *heads[number], command)
            return tries[number].code

        found = search(len(heads), code)
    names = [heads[number][0] for number in found]
    if found and tries[len(heads) - 1].code == SKIP:
        raise NeedsPerson(
            f"line {pin.line}: the command skips the tree with all patches (exit code {SKIP})",
            fix="let it exit with 0 or 1 there",
        )
    return Verdict(pin.line, names[-1] if names else "", tuple(names), tuple(tries[n] for n in sorted(tries)))


def search(count: int, code: Callable[[int], int]) -> list[int]:
    """Return the numbers of the first bad tree, and of skipped ones right before it; empty if the last is
    not bad.

    Trees are numbered from 0; all before the culprit are taken to be good, all after it bad.
    """
    last = count - 1
    if code(last) == 0:
        return []
    if code(last) == SKIP:
        return [last]
    if code(0) not in {0, SKIP}:
        return [0]
    good, bad = 0, last
    while True:
        middle = next((n for n in _from_the_middle(good + 1, bad) if code(n) != SKIP), None)
        if middle is None:
            return list(range(good + 1, bad + 1))
        if code(middle) == 0:
            good = middle
        else:
            bad = middle


def _from_the_middle(first: int, end: int) -> list[int]:
    """Order the numbers ``first..end-1`` by their distance from the middle."""
    centre = (first + end - 1) / 2
    return sorted(range(first, end), key=lambda n: (abs(n - centre), n))


def _on_top(ws: Workspace, store: Git, commit: str, laid: dict[str, tuple[str, str]]) -> str:
    return stack.lay(ws, store, commit, laid) if laid else commit


def _run(tree: Git, name: str, commit: str, command: Sequence[str]) -> Try:
    tree.run("read-tree", "--reset", "-u", commit)
    tree.run("update-ref", "--no-deref", "HEAD", commit)
    tree.run("clean", "-q", "-f", "-d")
    # Bytecode is keyed by second and size: two steps within one second could run each other's.
    env = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "SERIES_BISECT_PATCH": name,
        "SERIES_BISECT_TREE": str(tree.cwd),
    }
    begin = time.monotonic()
    try:
        code = subprocess.run(list(command), cwd=tree.cwd, env=env).returncode
    except OSError as err:
        raise UsageError(
            f"cannot run {command[0]}: {err.strerror}", fix="give a command that exists"
        ) from err
    seconds = time.monotonic() - begin
    word = {0: "good", SKIP: "skipped"}.get(code, "bad")
    if code in NEVER_RUN or code < 0 or code > 127:
        raise CheckFailed(
            f"the command ended with {code} in the tree up to {name}: that is neither good nor bad",
            fix="exit codes: 0 good, 1 to 124 bad, 125 skip this tree",
        )
    say(f"up to {name}: {word} ({code}, {seconds:.1f} s)")
    return Try(name, code, round(seconds, 2))
