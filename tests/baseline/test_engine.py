"""The engine: every way in which a test file can end is a result, and the rest of the file goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_tree import Runs

from vllm_series.baseline.engine import Limits
from vllm_series.baseline.outcome import Run
from vllm_series.baseline.render import missing_packages

ORDINARY = """
    import pytest

    def test_ok(): pass
    def test_bad(): assert 1 == 2, "one is not two"
    @pytest.mark.skip(reason="needs a lighthouse")
    def test_skipped(): pass
    @pytest.mark.xfail(reason="known")
    def test_xfailed(): assert False
    @pytest.mark.xfail(reason="known")
    def test_xpassed(): pass
    @pytest.fixture
    def broken(): raise RuntimeError("no set-up")
    def test_error(broken): pass
    @pytest.fixture
    def untidy():
        yield
        raise RuntimeError("no tear-down")
    def test_untidy(untidy): pass
    @pytest.mark.parametrize("n", [1, 2])
    def test_many(n): pass
"""


def outcomes(run: Run) -> dict[str, str]:
    return {name.rpartition("::")[2]: node.outcome for name, node in run.nodes().items()}


@pytest.mark.parametrize("fresh", [False, True], ids=["fork", "fresh"])
def test_ordinary_outcomes(runs: Runs, site: Callable[..., Path], fresh: bool) -> None:
    run = runs.run(site("a", {"test_a.py": ORDINARY}), fresh=fresh)
    assert outcomes(run) == {
        "test_ok": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_xfailed": "xfailed",
        "test_xpassed": "xpassed",
        "test_error": "error",
        "test_untidy": "error",
        "test_many[1]": "passed",
        "test_many[2]": "passed",
    }
    nodes = run.nodes()
    assert nodes["tests/test_a.py::test_skipped"].reason == "Skipped: needs a lighthouse"
    assert "one is not two" in nodes["tests/test_a.py::test_bad"].reason
    assert "no tear-down" in nodes["tests/test_a.py::test_untidy"].reason
    assert run.files["tests/test_a.py"].processes == 1
    assert run.files["tests/test_a.py"].cpu > 0


DEATHS = {
    "exit": ("import os; os._exit(0)", "crash", "the process ended early"),
    "code": ("import os; os._exit(9)", "crash", "exit code 9"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "crash", "SIGSEGV"),
    "abort": ("import os; os.abort()", "crash", "SIGABRT"),
    "oom": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "out of memory"),
}


@pytest.mark.parametrize("fresh", [False, True], ids=["fork", "fresh"])
def test_a_test_that_takes_its_process_down(runs: Runs, site: Callable[..., Path], fresh: bool) -> None:
    body = "def test_first(): pass\n" + "".join(
        f"def test_{name}():\n    {code}\ndef test_after_{name}(): pass\n"
        for name, (code, _, _) in DEATHS.items()
    )
    run = runs.run(site("a", {"test_a.py": body}), fresh=fresh)
    nodes = {name.rpartition("::")[2]: node for name, node in run.nodes().items()}
    for name, (_, outcome, reason) in DEATHS.items():
        assert nodes[f"test_{name}"].outcome == outcome, name
        assert reason in nodes[f"test_{name}"].reason
        assert nodes[f"test_after_{name}"].outcome == "passed"
    assert nodes["test_first"].outcome == "passed"
    assert run.files["tests/test_a.py"].processes == len(DEATHS) + 1


def test_time_limits(runs: Runs, site: Callable[..., Path]) -> None:
    hang = """
        import signal, time
        def test_soft(): time.sleep(60)
        def test_between(): pass
        def test_hard():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(60)
        def test_after(): pass
    """
    run = runs.run(site("a", {"test_a.py": hang}), limits=Limits(3, 300, grace_s=6))
    assert outcomes(run) == {
        "test_soft": "timeout",
        "test_between": "passed",
        "test_hard": "timeout",
        "test_after": "passed",
    }
    log = next(runs.scratch.rglob("log.1.txt")).read_text()
    assert "test_hard" in log  # faulthandler wrote where it hung


def test_file_limit_leaves_the_rest_not_run(runs: Runs, site: Callable[..., Path]) -> None:
    slow = "import time\ndef test_one(): pass\ndef test_two(): time.sleep(300)\ndef test_three(): pass\n"
    run = runs.run(site("a", {"test_a.py": slow}), limits=Limits(400, 20))
    assert outcomes(run) == {"test_one": "passed", "test_two": "not_run", "test_three": "not_run"}
    assert run.files["tests/test_a.py"].seconds < 100


def test_file_limit_during_collection(runs: Runs, site: Callable[..., Path]) -> None:
    body = "import time\ntime.sleep(300)\ndef test_one(): pass\n"
    run = runs.run(site("a", {"test_a.py": body}), limits=Limits(400, 8))
    assert outcomes(run) == {"tests/test_a.py": "not_run"}


def test_collection_failures(runs: Runs, site: Callable[..., Path]) -> None:
    files = {
        "test_import.py": "import no_such_package_here.sub\ndef test_x(): pass\n",
        "test_again.py": "import no_such_package_here\ndef test_x(): pass\n",
        "test_dies.py": "import os\nos._exit(3)\n",
        "test_skipped.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
        "test_empty.py": "",
    }
    run = runs.run(site("a", files))
    assert {name: node.outcome for name, node in run.nodes().items()} == {
        "tests/test_import.py": "error",
        "tests/test_again.py": "error",
        "tests/test_dies.py": "crash",
        "tests/test_skipped.py": "skipped",
    }
    assert run.files["tests/test_empty.py"].nodes == {}
    assert "not here" in run.nodes()["tests/test_skipped.py"].reason
    assert missing_packages(run) == {"no_such_package_here": 2}


def test_reasons_hold_no_machine_path_or_address(runs: Runs, site: Callable[..., Path]) -> None:
    body = """
        import pathlib, pytest
        def test_path(): pytest.skip(f"{pathlib.Path(__file__).parent} at 0x7f00deadbeef in /tmp/pytest-1/x")
    """
    one, two = runs.run(site("a", {"test_a.py": body})), runs.run(site("b", {"test_a.py": body}))
    reason = one.nodes()["tests/test_a.py::test_path"].reason
    assert reason == two.nodes()["tests/test_a.py::test_path"].reason
    assert "<site>" in reason and "deadbeef" not in reason and "pytest-1" not in reason


def test_state_does_not_leak_between_files(runs: Runs, site: Callable[..., Path]) -> None:
    leak = "import sys\ndef test_x():\n    assert not hasattr(sys, 'mark')\n    sys.mark = 1\n"
    run = runs.run(site("a", {"test_a.py": leak, "test_b.py": leak}))
    assert set(outcomes(run).values()) == {"passed"}


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie that nobody waits for has), within some seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_processes_that_a_test_leaves_are_ended(
    runs: Runs, site: Callable[..., Path], tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    body = f"""
        import pathlib, subprocess
        def test_x():
            child = subprocess.Popen(["sleep", "300"])
            pathlib.Path({str(note)!r}).write_text(str(child.pid))
    """
    runs.run(site("a", {"test_a.py": body}))
    assert gone(int(note.read_text()))


def test_only_the_named_nodes_run_again(runs: Runs, site: Callable[..., Path]) -> None:
    place = site("a", {"test_a.py": ORDINARY})
    runner = runs.runner(place, Limits(20, 60))
    again = runner.run("tests/test_a.py", ["tests/test_a.py::test_many[2]", "tests/test_a.py::test_bad"])
    assert {name: node.outcome for name, node in again.nodes.items()} == {
        "tests/test_a.py::test_bad": "failed",
        "tests/test_a.py::test_many[2]": "passed",
    }
    assert runner.run("tests/test_absent.py").nodes == {}


def test_run_file_round_trip(runs: Runs, site: Callable[..., Path], tmp_path: Path) -> None:
    run = runs.run(site("a", {"test_a.py": ORDINARY}))
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "files": {"a": {}}}'])
def test_damaged_run_is_named(tmp_path: Path, text: str) -> None:
    from vllm_series.errors import CheckFailed

    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(CheckFailed, match=r"run\.json") as caught:
        Run.load(path)
    assert "series baseline run" in caught.value.fix


def test_tests_end_when_the_runner_is_killed(site: Callable[..., Path], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    body = f"""
        import os, pathlib, time
        def test_x():
            pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
            time.sleep(300)
    """
    place = site("a", {"test_a.py": body})
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from synthetic_tree import Runs
        Runs(Path({str(tmp_path / "scratch")!r})).run(Path({str(place)!r}))
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    for _ in range(300):
        if note.exists() and note.read_text():
            break
        time.sleep(0.1)
    runner.kill()
    runner.wait()
    assert gone(int(note.read_text()))
