"""The GPU suite's rows name what exists, and its runner does not take nothing for success. Needs no card."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import catalog
import pytest
import steps
import suite
from catalog import Machine, Step

H200 = Machine("NVIDIA H200", "9.0", 1, "0.33.0", "0.33.0+dsa.1", "", "2.14.0+cu130")
STEP = Step("demo", "tests", 200, ("9.0",), ("0.33.0",), 1, False, tests=("test_demo.py",))


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a folder of tests that a test may fill."""
    folder = tmp_path / "checkout" / catalog.TESTS
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setattr(steps, "ROOT", tmp_path / "checkout")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to load
    return folder


def run(step: Step, tmp_path: Path, machine: Machine = H200) -> steps.Row:
    return steps.run_step(step, machine, tmp_path / "out", tmp_path / "log")


def test_rows_name_lines_and_tests_that_exist(root: Path) -> None:
    lines = {path.stem for path in (root / "pins").glob("*.toml")}
    suites = catalog.load()
    for name, (_, rows) in suites.items():
        assert rows, name
        for step in rows:
            assert set(step.lines) <= lines, step
            assert all(re.fullmatch(r"\d+\.\d", one) for one in step.capabilities), step
            filled = step.command.format(out="out", line="0.33.0", card="h200", commit="c0ffee")
            if step.command and '"--commit"' in (root / step.command.split()[0]).read_text():
                assert "--commit c0ffee" in filled, step
    named = {test for _, rows in suites.values() for step in rows for test in step.tests}
    there = {path.name for path in (root / catalog.TESTS).glob("**/test_*_gpu.py")}
    assert there <= {Path(name).name for name in named}, "a GPU test is in no row of ci/gpu/suites.toml"


def test_tests_for_two_cards_are_in_a_row_that_gets_two(root: Path) -> None:
    rows = [step for _, steps in catalog.load().values() for step in steps if step.gpus > 1]
    for line in ("0.28.0", "0.33.0"):
        named = {name for step in rows if line in step.lines for name in step.tests}
        for path in (root / catalog.TESTS).glob("**/test_*.py"):
            if re.search(r"device_count\(\) < 2", path.read_text()):
                assert path.relative_to(root / catalog.TESTS).as_posix() in named, (line, path.name)


def is_fixture(node: ast.FunctionDef) -> bool:
    return any("fixture" in ast.unparse(one) for one in node.decorator_list)


def test_the_suite_has_every_fixture_that_its_tests_take(root: Path) -> None:
    """Upstream's conftest is not there where only the wheel is installed."""
    builtin = {"caplog", "capfd", "capsys", "monkeypatch", "record_property", "request", "tmp_path"}
    missing = []
    for file in sorted({test for _, rows in catalog.load().values() for row in rows for test in row.tests}):
        here, common = (
            ast.parse((root / catalog.TESTS / name).read_text()) for name in (file, "conftest.py")
        )
        functions = [one for one in ast.walk(here) if isinstance(one, ast.FunctionDef)]
        own = {one.name for one in functions if is_fixture(one)}
        own |= {one.name for one in common.body if isinstance(one, ast.FunctionDef) and is_fixture(one)}
        for one in functions:
            if is_fixture(one) or one.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in one.decorator_list]
                given = " ".join(mark for mark in marks if "parametrize" in mark)
                free = {arg.arg for arg in one.args.args} - builtin - own - set(re.findall(r"\w+", given))
                missing += [f"{file}::{one.name} takes {name}" for name in sorted(free)]
    assert not missing


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[a]\ntitle = "x"\n', "missing or unknown key"),
        (
            '[a]\ntitle = "x"\ncapabilities = []\nlines = []\nseconds = 1\ntests = ["test_none.py"]\n',
            "does not exist",
        ),
        (
            '[a]\ntitle = "x"\ncapabilities = []\nlines = []\nseconds = 1\ntests = []\n'
            "[[a.bench]]\nname = 'n'\n",
            "a bench of",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "suites.toml").write_text(text)
    with pytest.raises(catalog.SuiteError, match=why):
        catalog.load(tmp_path / "suites.toml")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "NVIDIA B200", "capability": "10.0"}, "NVIDIA B200 has 10.0"),
        ({"line": "0.28.0", "version": "0.28.0+dsa.1"}, "installed is 0.28.0"),
        ({"cards": 1}, "needs 2 cards, there is 1"),
    ],
)
def test_what_a_machine_does_not_support_is_said_and_not_failed(
    change: dict[str, str], why: str, tmp_path: Path
) -> None:
    step = replace(STEP, gpus=2) if "cards" in change else STEP
    row = run(step, tmp_path, replace(H200, **change))
    assert row.state == steps.UNSUPPORTED and why in row.reason


def test_missing_kernels_are_a_failure(tmp_path: Path) -> None:
    row = run(replace(STEP, kernels=True), tmp_path, replace(H200, kernels="this build has no kernels"))
    assert (row.state, row.reason) == (steps.FAILED, "this build has no kernels")


@pytest.mark.parametrize(
    ("body", "state", "counts"),
    [
        ("def test_a(): pass", steps.OK, {"passed": 1, "failed": 0, "skipped": 0}),
        ("def test_a(): assert 0", steps.FAILED, {"passed": 0, "failed": 1, "skipped": 0}),
        ("import not_there", steps.FAILED, None),
    ],
)
def test_outcomes(overlay: Path, tmp_path: Path, body: str, state: str, counts: dict | None) -> None:
    (overlay / "test_demo.py").write_text(body + "\n")
    row = run(STEP, tmp_path)
    assert row.state == state, (row, (tmp_path / "log").read_text())
    assert counts is None or row.counts == counts


def test_one_skipped_file_among_others_is_seen(overlay: Path, tmp_path: Path) -> None:
    (overlay / "test_demo.py").write_text("def test_a(): pass\n")
    (overlay / "test_idle.py").write_text("import pytest\npytest.skip('no', allow_module_level=True)\n")
    row = run(replace(STEP, tests=("test_demo.py", "test_idle.py")), tmp_path)
    assert (row.state, row.reason) == (steps.FAILED, "all tests were skipped in test_idle")


def test_a_bench_gets_folder_line_and_card(overlay: Path, tmp_path: Path) -> None:
    script = tmp_path / "checkout" / "bench.py"
    script.write_text("import sys; print(sys.argv[1:])\n")
    step = replace(STEP, tests=(), command="bench.py {commit} --out {out}/a/{line}-{card}.json --set 'A:X=1'")
    assert run(step, tmp_path).state == steps.OK
    words = [
        suite.commit(tmp_path / "checkout"),
        "--out",
        f"{tmp_path}/out/a/0.33.0-h200.json",
        "--set",
        "A:X=1",
    ]
    assert (tmp_path / "log").read_text() == f"{words}\n"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 5090", "nvidia-geforce-rtx-5090"),
    ],
)
def test_card_names(name: str, short: str) -> None:
    assert replace(H200, name=name).card == short


def test_results_of_other_cases_stay(tmp_path: Path) -> None:
    path = suite.store([steps.Row("a tests", steps.OK), steps.Row("b tests", steps.OK)], H200, tmp_path)
    suite.store([steps.Row("b tests", steps.FAILED, "x"), steps.Row("c", steps.LEFT_OUT)], H200, tmp_path)
    data = json.loads(path.read_text())
    assert path == tmp_path / "gpu-suite/0.33.0-h200.json"
    assert [(row["case"], row["state"]) for row in data["rows"]] == [("a tests", "ok"), ("b tests", "FAILED")]


@pytest.mark.parametrize("text", ["", '{"rows": [', "[]", '{"rows": [{}]}', '{"rows": 3}'])
def test_a_damaged_file_of_results_costs_no_new_row(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is set aside, not lost; a second one does not take its place."""
    path = tmp_path / "gpu-suite/0.33.0-h200.json"
    path.parent.mkdir()
    for _ in range(2):
        path.write_text(text)
        assert suite.store([steps.Row("a tests", steps.OK)], H200, tmp_path) == path
        assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["a tests"]
        assert "cannot be read" in capsys.readouterr().err
    there = sorted(one.name for one in path.parent.iterdir())
    assert there == [path.name, f"{path.name}.broken", f"{path.name}.broken2"]
    assert (path.parent / f"{path.name}.broken").read_text() == text


def test_the_commit_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
        command = ["git", "-C", str(tmp_path), *name, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert suite.commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    git("tag", "-am", "v1", "v1")
    head = git("rev-parse", "--short=7", "HEAD")
    assert suite.commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert suite.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert suite.commit(tmp_path) == "unknown"


def test_selection() -> None:
    suites = catalog.load()
    chosen = suite.choose(suites, ["fused_q:table", "topk_compare"], tests_only=False)
    assert [(step.suite, step.name) for step in chosen] == [("fused_q", "table"), ("topk_compare", "tests")]
    assert all(step.tests for step in suite.choose(suites, [], tests_only=True))
    with pytest.raises(catalog.SuiteError, match="no nothing in the GPU suite"):
        suite.choose(suites, ["nothing"], tests_only=False)
    for names, tests_only, cards in (([], False, 9), (["startup"], False, 2), (["fused_q:table"], True, 1)):
        with pytest.raises(catalog.SuiteError, match="no row fits"):
            suite.choose(suites, names, tests_only, cards)


def test_without_torch_or_card_it_says_what_to_do(root: Path) -> None:
    command = ["bash", str(root / "scripts/test.sh"), "--gpu"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "error: " in done.stderr and "fix: " in done.stderr
    listed = subprocess.run([*command, "--list"], env=env, capture_output=True, text=True, check=False)
    assert listed.returncode == 0 and "fused_q: " in listed.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_suite_that_is_ended_from_outside_ends_its_step(
    tmp_path: Path, root: Path, number: signal.Signals
) -> None:
    """As `timeout`, a job's limit and Ctrl-C do it. What the step printed is shown."""
    mark = tmp_path / "pid"
    (tmp_path / "bench.py").write_text(
        "import os, pathlib, time\n"
        "print('the step began', flush=True)\n"
        f"new = pathlib.Path({str(mark)!r} + '.new')\n"
        f"new.write_text(str(os.getpid())); new.rename({str(mark)!r})\n"
        "time.sleep(300)\n"
    )
    step = replace(STEP, tests=(), command="bench.py")
    code = f"""
import sys
sys.path.insert(0, {str(root / "ci/gpu")!r})
import steps, suite
from pathlib import Path
from catalog import Machine, Step
steps.ROOT = suite.ROOT = Path({str(tmp_path)!r})
suite.load = lambda: {{"demo": ("", [{step!r}])}}
suite.look = lambda: {H200!r}
sys.exit(suite.main([]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while not mark.exists() and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(number)
        said, _ = child.communicate(timeout=100)
        assert "the step began" in said and "stopped from outside" in said, said
        assert child.returncode == 1
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)
    finally:
        child.kill()
        if mark.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(mark.read_text()), signal.SIGKILL)
