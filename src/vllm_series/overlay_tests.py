"""Runs the overlay's own tests inside a line's patched tree, and proves that the patches around the switches
leave upstream's environment handling as it is.

For each line: ``tests/dsa`` and upstream's ``tests/test_envs.py`` in the patched tree; the latter also in the
pristine tree, compared node by node; and the compile-cache key with ``VLLM_DSA=0``, which must be upstream's.
All of it needs torch but neither a GPU nor the official wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from vllm_series import apply as applying
from vllm_series import identity
from vllm_series.envs import torch_env
from vllm_series.errors import CheckFailed
from vllm_series.files import unpack_git_archive
from vllm_series.git import Git
from vllm_series.importer import odb
from vllm_series.lock_file import locked
from vllm_series.pins import Pin, load_pin
from vllm_series.ui import say
from vllm_series.workspace import Workspace

OURS = "tests/dsa"
#: Names the pristine tree to tests that compare the patched one with it.
PRISTINE = "PRISTINE_TREE"
#: Upstream's tests of what the first patch changes.
UPSTREAM = ("tests/test_envs.py",)
#: Folders of the tree that the tests read; the rest (csrc, docs, rust ...) is left out.
FOLDERS = ("vllm", "tests", "requirements", "pyproject.toml")

CACHE_KEY = """
import json, logging
logging.disable(logging.CRITICAL)
from vllm import envs
print(json.dumps({name: repr(value) for name, value in envs.compile_factors().items()}))
"""


@dataclass
class LineResult:
    """What one line's run said. ``outcomes`` of our tests and upstream's in the patched tree, by node."""

    line: str
    outcomes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)


def run(ws: Workspace, lines: Iterable[str], select: str = "") -> list[LineResult]:
    """Run the lines side by side.

    Args:
        ws: the checkout.
        lines: which lines.
        select: pytest's ``-k`` expression for our tests; upstream's comparison is left out then.

    Raises:
        UsageError: an unknown line.
        FetchFailed: a torch environment or an sdist could not be fetched.
    """
    order = [load_pin(ws, line).line for line in lines]
    for line in order:  # one after the other: each fetches and unpacks gigabytes
        torch_env(ws, line)
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda line: _run_line(ws, line, select), order))


def _run_line(ws: Workspace, line: str, select: str) -> LineResult:
    pin = load_pin(ws, line)
    made = applying.ensure(ws, pin)
    python = torch_env(ws, line)
    result = LineResult(line)
    with locked(ws.work / f"overlay-tests-{line}.lock"):
        patched = _lay(ws, pin, made.head, "patched")
        identity.write(patched, pin)
        pristine = _lay(ws, pin, made.base, "pristine")
        beside = {PRISTINE: str(pristine)}
        if select:
            result.outcomes, error = _pytest(python, patched, OURS, "-k", select, **beside)
            _note(result, "patched tree", error)
            result.problems += _compare({}, result.outcomes)
            return result
        say(f"{line}: {', '.join(UPSTREAM)} in the pristine tree")
        before, error = _pytest(python, pristine, *UPSTREAM)
        _note(result, "pristine tree", error)
        say(f"{line}: {OURS}, {', '.join(UPSTREAM)} in the patched tree")
        result.outcomes, error = _pytest(python, patched, OURS, *UPSTREAM, **beside)
        _note(result, "patched tree", error)
        result.problems += _compare(before, result.outcomes)
        result.problems += _compare_keys(
            _cache_key(python, pristine), _cache_key(python, patched, VLLM_DSA="0")
        )
    return result


def _note(result: LineResult, where: str, error: str) -> None:
    if error:
        result.problems.append(f"{where}: {error}")


def _compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Upstream's nodes that are gone or have another outcome, and ours that did not pass or skip."""
    found = [
        f"{node}: {outcome} in the pristine tree, {after.get(node, 'missing')} in the patched tree"
        for node, outcome in sorted(before.items())
        if after.get(node) != outcome
    ]
    return found + [
        f"{node}: {outcome}"
        for node, outcome in sorted(after.items())
        if node not in before and outcome not in ("passed", "skipped")
    ]


def _compare_keys(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = sorted({*before, *after})
    return [
        f"compile-cache key with VLLM_DSA=0: {name} is {after.get(name)}, upstream has {before.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _lay(ws: Workspace, pin: Pin, commit: str, kind: str) -> Path:
    """Return a folder with the commit's Python code and tests; kept until the commit changes."""
    store: Git = odb(ws)
    root = ws.root / "build" / "overlay-tests" / pin.line
    place, mark = root / kind, root / f"{kind}.commit"
    if mark.is_file() and mark.read_text() == commit and list(place.glob("*.dist-info")):
        return place
    mark.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        packed = Path(scratch) / "tree.tar"
        store.run("archive", "--format=tar", "-o", str(packed), commit, *FOLDERS)
        unpack_git_archive(packed, place)
    _add_metadata(place, pin)
    mark.write_text(commit)
    return place


def _add_metadata(place: Path, pin: Pin) -> None:
    """Make the folder an installed ``vllm`` to importlib.metadata: without a version vLLM turns triton off.

    The version must not contain ``cpu``, which turns it off too.
    """
    folder = place / f"vllm-{pin.version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {pin.version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def _environment(tree: Path, **variables: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTHON", "PYTEST_"))
    }
    return env | {
        "PYTHONPATH": str(tree),
        "VLLM_TARGET_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **variables,
    }


def _pytest(python: Path, tree: Path, *arguments: str, **variables: str) -> tuple[dict[str, str], str]:
    """Return the outcome of each node, and what went wrong beside failing tests ('' if nothing)."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        options = ("-q", "-p", "no:cacheprovider", "--timeout=600", f"--junitxml={report}")
        done = subprocess.run(
            [str(python), "-m", "pytest", *options, *arguments],
            cwd=tree,
            env=_environment(tree, **variables),
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes = read_junit(report) if report.is_file() else {}
    failed = any(outcome in ("failed", "error") for outcome in outcomes.values())
    if failed:
        say(_failures(done.stdout))
    if done.returncode not in (0, 1) or not outcomes or (done.returncode == 1 and not failed):
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        return outcomes, f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{tail}"
    return outcomes, ""


def _failures(text: str) -> str:
    start = max(text.find("= FAILURES ="), text.find("= ERRORS ="), 0)
    return text[text.rfind("\n", 0, start) + 1 :]


def read_junit(path: Path) -> dict[str, str]:
    """Return node -> passed, failed, error or skipped from a JUnit file of pytest."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        for tag, name in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if case.find(tag) is not None:
                outcome = name
                break
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def _cache_key(python: Path, tree: Path, **variables: str) -> dict[str, str]:
    """Return what enters the compile-cache key from the environment, by name."""
    env = _environment(tree, **variables)
    done = subprocess.run(
        [str(python), "-c", CACHE_KEY], cwd=tree, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckFailed(
            f"the compile-cache key of {tree.name} cannot be read:\n{done.stderr[-2000:]}",
            fix="mend the patched vllm/envs.py",
        )
    # Paths inside the tree differ between the two trees and must not count.
    key: dict[str, str] = json.loads(done.stdout.splitlines()[-1].replace(str(tree), "<tree>"))
    return key
