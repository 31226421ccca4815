"""A run that was interrupted goes on where it stopped; a time limit is shared out and what it cut is said."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_tree import MACHINE, Runs

from vllm_series.baseline import progress as progressing
from vllm_series.baseline.diff import Kind, compare
from vllm_series.baseline.engine import Limits, run_files
from vllm_series.baseline.outcome import FileRun, Node, Run
from vllm_series.baseline.progress import Progress, Shares
from vllm_series.baseline.render import coverage, verdict

RUN = Run("0.0.0", "on", "tree", {"VLLM_DSA": "1"}, dict(MACHINE), date="2026-01-01")


def result(*nodes: str) -> FileRun:
    return FileRun(1.0, 1.0, 1, {node: Node("passed") for node in nodes})


def fresh(**other: object) -> Run:
    return replace(RUN, files={}, **other)  # type: ignore[arg-type]


def test_goes_on_where_the_last_run_stopped(tmp_path: Path) -> None:
    path = tmp_path / "on.json"
    first = Progress(fresh(), path, resume=False)
    first.add("tests/test_a.py", result("a::x"))
    first.add("tests/test_b.py", result("b::x"))
    first.save()
    again = Progress(fresh(), path, resume=True)
    assert again.left(["tests/test_c.py", "tests/test_a.py"]) == ["tests/test_c.py"]
    again.add("tests/test_c.py", result("c::x"))
    again.save()
    # The selection decides what is compared; the file keeps everything.
    assert list(again.of(["tests/test_c.py", "tests/test_a.py"]).files) == [
        "tests/test_c.py",
        "tests/test_a.py",
    ]
    assert set(Run.load(path).files) == {f"tests/test_{name}.py" for name in "abc"}
    assert Progress(fresh(), path, resume=False).left(["tests/test_a.py"]) == ["tests/test_a.py"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"tree": "another"}, "tree: tree / another"),
        ({"env": {}}, "switches"),
        ({"fingerprint": {**MACHINE, "limits": "1 s"}}, "limits: None / 1 s"),
    ],
)
def test_what_differs_is_not_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, object], says: str
) -> None:
    path = tmp_path / "on.json"
    first = Progress(fresh(), path, resume=False)
    first.add("tests/test_a.py", result("a::x"))
    first.save()
    assert Progress(fresh(**other), path, resume=True).left(["tests/test_a.py"]) == ["tests/test_a.py"]
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "{}", '{"schema": 1, "files": 3}'])
def test_a_damaged_or_absent_run_is_started_anew(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "on.json"
    if text is not None:
        path.write_text(text)
    assert Progress(fresh(), path, resume=True).left(["tests/test_a.py"]) == ["tests/test_a.py"]


def test_a_killed_run_keeps_its_finished_files(site: Callable[..., Path], tmp_path: Path) -> None:
    """The tool dies in the middle of the second file; the first one need not run again."""
    note, path = tmp_path / "started", tmp_path / "on.json"
    hang = (
        f"import pathlib, time\ndef test_x():\n    pathlib.Path({str(note)!r}).touch()\n    time.sleep(300)\n"
    )
    place = site("a", {"test_a.py": "def test_x(): pass\n", "test_b.py": hang})
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from synthetic_tree import Runs
        from test_progress import fresh
        from vllm_series.baseline import progress
        from vllm_series.baseline.engine import Limits, run_files
        progress.SAVE_S = 0
        runner = Runs(Path({str(tmp_path / "scratch")!r})).runner(Path({str(place)!r}), Limits(400, 400))
        keep = progress.Progress(fresh(), Path({str(path)!r}), resume=False)
        run_files(runner, ["tests/test_a.py", "tests/test_b.py"], 1, keep.add)
    """
    tool = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    while not note.exists() and tool.poll() is None:
        time.sleep(0.05)
    tool.kill()
    tool.wait()
    again = Progress(fresh(), path, resume=True)
    assert again.left(["tests/test_a.py", "tests/test_b.py"]) == ["tests/test_b.py"]
    assert again.of(["tests/test_a.py"]).counts() == {"passed": 1}


def test_no_file_is_started_after_the_time_and_the_report_says_so(
    runs: Runs, site: Callable[..., Path]
) -> None:
    files = {f"test_{name}.py": "def test_x(): pass\n" for name in "abc"}
    place, ended = site("a", files), list[str]()
    names = [f"tests/{name}" for name in files]
    whole = run_files(runs.runner(place, Limits(20, 60)), names, 1)
    assert run_files(runs.runner(place, Limits(20, 60)), names, 1, until=time.monotonic() - 1) == {}
    one = runs.runner(place, Limits(20, 60))
    cut = run_files(one, names, 1, lambda name, _: ended.append(name), until=time.monotonic() + 1e6)
    assert list(cut) == ended == names
    before, after = (
        replace(fresh(), mode="upstream", files=whole),
        replace(fresh(), files={names[0]: whole[names[0]]}),
    )
    found = compare(before, after, exact=False, planned=names)
    assert [row.kind for row in found.rows] == [Kind.SAME] and found.unreached == names[1:]
    assert "2 planned files were not reached" in verdict(found)
    (line,) = coverage(found, len(after.files))
    assert "2 of 3 planned files" in line and "tests/test_c.py" in line


def test_time_is_shared_out_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progressing.time, "monotonic", lambda: now[0])
    shares = Shares(minutes=10, lines=2)
    shares.modes(3)
    assert shares.next() == 100  # 600 s among 3 runs of this line and 3 of the next
    now[0] = 50.0  # it took half of its share
    assert shares.next() == 110
    now[0] = 400.0
    assert shares.next() == 50
    now[0] = 450.0
    shares.modes(3)
    assert shares.next() == 50
    now[0] = 900.0
    assert shares.next() == 0  # over: nothing is started
    unlimited = Shares(None, 1)
    unlimited.modes(3)
    assert unlimited.next() is None
